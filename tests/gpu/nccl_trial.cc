// Communicators on real GPUs: broadcasts and all-gathers bit for bit, the kernels that NCCL says it
// ran, windows and communicators made and freed a thousand times, device memory, and rates. Prints
// SKIPPED if there are fewer than two GPUs or no NCCL. README.md says how to run it by hand.
//
//   REFITD_TRIAL_BYTES=N    the largest message, instead of 256 MiB
//   REFITD_TRIAL_CYCLES=N   windows made and given back, instead of 1000
//   REFITD_TRIAL_SECONDS=N  the process is ended then (SIGALRM), instead of after 240 s
//   REFITD_TRIAL_CUDA, REFITD_TRIAL_NCCL   libraries, for a run over the fakes
#define CATCH_CONFIG_RUNNER
#include <dlfcn.h>
#include <unistd.h>

#include <algorithm>
#include <catch2/catch.hpp>
#include <chrono>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <fstream>
#include <functional>
#include <iterator>
#include <memory>
#include <sstream>
#include <string>
#include <utility>
#include <vector>

#include "transport/base/status.h"
#include "transport/cuda/nccl/nccl.h"

#if defined(REFITD_CUDA)
#include "transport/cuda/nccl/communicator.h"

namespace refitd {
namespace {

using Catch::Matchers::Contains;
using Clock = Communicator::Clock;
using Regions = std::vector<std::shared_ptr<const DeviceRegion>>;

constexpr auto kWait = std::chrono::seconds(60);
constexpr int64_t kKiB = int64_t{1} << 10;
constexpr int64_t kMiB = int64_t{1} << 20;
constexpr int64_t kGuard = 4096;  // bytes after an output that must stay as they were
constexpr unsigned char kPoison = 0xa5;
constexpr uint64_t kSeed = 7;

int64_t Setting(const char* variable, int64_t otherwise) {
  const char* const told = std::getenv(variable);
  return told == nullptr ? otherwise : std::strtoll(told, nullptr, 0);
}

std::string Text(const char* variable, const std::string& otherwise) {
  const char* const told = std::getenv(variable);
  return told == nullptr ? otherwise : told;
}

int64_t LargestBytes() { return Setting("REFITD_TRIAL_BYTES", 256 * kMiB); }

template <typename T>
T Ok(absl::StatusOr<T> value) {
  INFO(value.status().ToString());
  REQUIRE(value.ok());
  return *std::move(value);
}

void RequireOk(const absl::Status& status) {
  INFO(status.ToString());
  REQUIRE(status.ok());
}

double Milliseconds(Clock::time_point since) {
  return std::chrono::duration<double, std::milli>(Clock::now() - since).count();
}

// ---- NCCL's log ----

std::string LogPath() { return "/tmp/nccl_trial." + std::to_string(getpid()) + ".log"; }

std::string ReadLog() {
  std::ifstream file(LogPath());
  return {std::istreambuf_iterator<char>(file), {}};
}

// The lines that NCCL logs while this object lives.
class LogSection {
 public:
  LogSection() : begin_(ReadLog().size()) {}
  // The lines with all of these words, from the beginning of NCCL's own text.
  std::vector<std::string> Lines(const std::vector<std::string>& words) const {
    std::istringstream text(ReadLog().substr(begin_));
    std::vector<std::string> found;
    std::string line;
    while (std::getline(text, line)) {
      const bool has = std::all_of(words.begin(), words.end(), [&line](const std::string& word) {
        return line.find(word) != std::string::npos;
      });
      const size_t info = line.find("NCCL INFO ");
      if (has && info != std::string::npos) found.push_back(line.substr(info + 10));
    }
    return found;
  }

 private:
  const size_t begin_;
};

// ---- the GPUs ----

class Rig {
 public:
  Rig(std::shared_ptr<CudaMemory> memory, const NcclReport& nccl)
      : memory_(std::move(memory)),
        contexts_(dynamic_cast<const CudaContextsOwner&>(*memory_).contexts()),
        communicators_(std::make_unique<Communicators>(
            nccl.api, memory_,
            CommunicatorsOptions{.limit = std::chrono::seconds(20),
                                 .clean_up = std::chrono::seconds(20),
                                 .lost =
                                     [this](const absl::Status& why) {
                                       std::printf("LOST: %s\n", Message(why).c_str());
                                       lost_ = true;
                                     }})),
        real_(nccl.library.find("fake") == std::string::npos) {
    void* const library =
        dlopen(Text("REFITD_TRIAL_CUDA", "libcuda.so.1").c_str(), RTLD_NOW | RTLD_NOLOAD);
    info_ = reinterpret_cast<decltype(info_)>(dlsym(library, "cuMemGetInfo_v2"));
    wait_ = reinterpret_cast<decltype(wait_)>(dlsym(library, "cuStreamWaitValue32_v2"));
    for (const CudaDevice& device : memory_->devices()) devices_.push_back(device.ordinal);
    for (const int device : devices_) {
      On(device, [&](const CudaApi& api) {
        CUstream stream = nullptr;
        RequireOk(REFITD_CUDA_CALL(api, cuStreamCreate, &stream, CU_STREAM_NON_BLOCKING));
        streams_.push_back(stream);
      });
    }
    const int64_t bytes = LargestBytes() * static_cast<int64_t>(devices_.size()) + kGuard;
    random_ = Pinned(bytes);
    back_ = Pinned(bytes);
    uint64_t state = kSeed;
    for (int64_t i = 0; i + 8 <= bytes; i += 8) {
      state = state * 6364136223846793005u + 1442695040888963407u;
      const uint64_t mixed = state ^ (state >> 29);
      std::memcpy(random_ + i, &mixed, 8);
    }
  }

  CudaMemory* memory() const { return memory_.get(); }
  Communicators* communicators() const { return communicators_.get(); }
  const std::vector<int>& devices() const { return devices_; }
  size_t ranks() const { return devices_.size(); }
  const std::vector<CUstream>& streams() const { return streams_; }
  const char* random() const { return random_; }
  const CudaApi& api() const { return contexts_->api(); }
  bool real() const { return real_; }
  bool lost() const { return lost_; }
  bool can_wait() const { return wait_ != nullptr; }
  void End() { communicators_ = nullptr; }

  void On(int device, const std::function<void(const CudaApi&)>& work) {
    const ScopedContext current(api(), Ok(contexts_->Get(device)));
    RequireOk(current.status());
    work(api());
  }
  std::unique_ptr<Communicator> Make(bool copy_engines = false) {
    return Ok(communicators_->Create({.devices = devices_, .copy_engines = copy_engines},
                                     Clock::now() + kWait));
  }
  Regions MakeRegions(int64_t bytes) {
    Regions regions;
    for (const int device : devices_) {
      regions.push_back(Ok(memory_->MakePool(device, bytes)).region);
    }
    return regions;
  }
  void Upload(size_t rank, char* to, const char* from, int64_t bytes) {
    On(devices_[rank], [&](const CudaApi& api) {
      RequireOk(REFITD_CUDA_CALL(api, cuMemcpyHtoDAsync, reinterpret_cast<CUdeviceptr>(to), from,
                                 static_cast<size_t>(bytes), streams_[rank]));
    });
  }
  void Poison(size_t rank, char* to, int64_t bytes) {
    On(devices_[rank], [&](const CudaApi& api) {
      RequireOk(REFITD_CUDA_CALL(api, cuMemsetD8Async, reinterpret_cast<CUdeviceptr>(to), kPoison,
                                 static_cast<size_t>(bytes), streams_[rank]));
    });
  }
  void Synchronize() {
    for (size_t rank = 0; rank < ranks(); ++rank) {
      On(devices_[rank], [&](const CudaApi& api) {
        RequireOk(REFITD_CUDA_CALL(api, cuStreamSynchronize, streams_[rank]));
      });
    }
  }
  // Whether memory has these bytes, and poison behind them.
  bool Holds(size_t rank, const char* at, const char* want, int64_t bytes) {
    On(devices_[rank], [&](const CudaApi& api) {
      RequireOk(REFITD_CUDA_CALL(api, cuMemcpyDtoHAsync, back_, reinterpret_cast<CUdeviceptr>(at),
                                 static_cast<size_t>(bytes + kGuard), streams_[rank]));
      RequireOk(REFITD_CUDA_CALL(api, cuStreamSynchronize, streams_[rank]));
    });
    return std::memcmp(back_, want, static_cast<size_t>(bytes)) == 0 &&
           std::all_of(back_ + bytes, back_ + bytes + kGuard,
                       [](char c) { return static_cast<unsigned char>(c) == kPoison; });
  }
  // The free bytes of each device; empty if the driver can't tell.
  std::vector<int64_t> Free() {
    std::vector<int64_t> all;
    if (info_ == nullptr) return all;
    for (const int device : devices_) {
      On(device, [&](const CudaApi& api) {
        size_t free = 0;
        size_t total = 0;
        RequireOk(api.Check("cuMemGetInfo", info_(&free, &total)));
        all.push_back(static_cast<int64_t>(free));
      });
    }
    return all;
  }
  char* Pinned(int64_t bytes) {
    void* data = nullptr;
    On(devices_[0], [&](const CudaApi& api) {
      RequireOk(REFITD_CUDA_CALL(api, cuMemHostAlloc, &data, static_cast<size_t>(bytes),
                                 CU_MEMHOSTALLOC_PORTABLE));
    });
    std::memset(data, 0, static_cast<size_t>(bytes));
    return static_cast<char*>(data);
  }
  // Makes the rank's stream wait until the flag, in pinned memory, is 1.
  void WaitOnStream(size_t rank, char* flag) {
    On(devices_[rank], [&](const CudaApi& api) {
      RequireOk(api.Check(
          "cuStreamWaitValue32",
          wait_(streams_[rank], reinterpret_cast<CUdeviceptr>(flag), 1, CU_STREAM_WAIT_VALUE_EQ)));
    });
  }

 private:
  const std::shared_ptr<CudaMemory> memory_;
  const std::shared_ptr<CudaContexts> contexts_;
  std::unique_ptr<Communicators> communicators_;
  const bool real_;
  bool lost_ = false;
  CUresult (*info_)(size_t*, size_t*) = nullptr;
  CUresult (*wait_)(CUstream, CUdeviceptr, cuuint32_t, unsigned) = nullptr;
  std::vector<int> devices_;
  std::vector<CUstream> streams_;
  char* random_ = nullptr;
  char* back_ = nullptr;
};

std::shared_ptr<CudaMemory> the_memory;
NcclReport the_nccl;

// The first test case makes the rig, and nothing destroys it, because hanging work may use it to
// the end.
struct TheRig {
  Rig* operator->() const {
    static Rig* const made = new Rig(the_memory, the_nccl);
    return made;
  }
};
constexpr TheRig rig;

std::vector<int64_t> Sizes() {
  std::vector<int64_t> sizes = {
      1,          3,    16,       255,       1000,      4 * kKiB,      65537,
      512 * kKiB, kMiB, kMiB + 1, 16 * kMiB, 64 * kMiB, 64 * kMiB + 3, LargestBytes()};
  std::erase_if(sizes, [](int64_t bytes) { return bytes > LargestBytes(); });
  return sizes;
}

std::string Difference(const std::vector<int64_t>& before, const std::vector<int64_t>& now) {
  std::string text;
  for (size_t i = 0; i < before.size(); ++i) {
    text += (text.empty() ? "" : ", ") + std::to_string((before[i] - now[i]) / kMiB);
  }
  return text.empty() ? "unknown" : text + " MiB";
}

bool Back(const std::vector<int64_t>& before, const std::vector<int64_t>& now) {
  for (size_t i = 0; i < before.size(); ++i) {
    if (std::abs(before[i] - now[i]) > 2 * kMiB) return false;
  }
  return true;
}

Communicator::BroadcastCall BroadcastOf(const Regions& regions, size_t root, int64_t bytes) {
  Communicator::BroadcastCall call;
  call.root = static_cast<int>(root);
  call.send = regions[root]->data();
  for (const auto& region : regions) call.receive.push_back(region->data());
  call.bytes = bytes;
  call.streams = rig->streams();
  return call;
}

TEST_CASE("broadcasts bring every byte to every device, and no byte more") {
  const auto communicator = rig->Make();
  const Regions regions = rig->MakeRegions(LargestBytes() + kGuard);
  const LogSection log;
  for (const int64_t bytes : Sizes()) {
    for (size_t root = 0; root < rig->ranks(); ++root) {
      // Roots send different bytes.
      const char* const want = rig->random() + 64 * root;
      for (size_t rank = 0; rank < rig->ranks(); ++rank) {
        rig->Poison(rank, regions[rank]->data(), bytes + kGuard);
      }
      rig->Upload(root, regions[root]->data(), want, bytes);
      RequireOk(communicator->Broadcast(BroadcastOf(regions, root, bytes), Clock::now() + kWait));
      rig->Synchronize();
      for (size_t rank = 0; rank < rig->ranks(); ++rank) {
        INFO(bytes << " bytes from rank " << root << " at rank " << rank);
        REQUIRE(rig->Holds(rank, regions[rank]->data(), want, bytes));
      }
    }
  }
  if (rig->real()) {
    CHECK(log.Lines({"[Symmetric]"}).empty());
    std::printf("broadcasts ran as\n");
    for (const std::string& line : log.Lines({"Broadcast:", "Bytes ->"})) {
      std::printf("  %s\n", line.c_str());
    }
  }
  RequireOk(communicator->Close(Clock::now() + kWait));
}

// Gathers all sizes in a window, each at a different offset.
void GatherAll(Communicator* communicator, Communicator::WindowId window, const Regions& regions,
               const std::function<void(int64_t)>& ran) {
  const auto ranks = static_cast<int64_t>(rig->ranks());
  int64_t offset = 0;
  for (const int64_t size : Sizes()) {
    const int64_t bytes =
        (size + kAllGatherAlignment - 1) / kAllGatherAlignment * kAllGatherAlignment;
    for (size_t rank = 0; rank < rig->ranks(); ++rank) {
      char* const all = regions[rank]->data() + offset;
      const int64_t share = static_cast<int64_t>(rank) * bytes;
      rig->Poison(rank, all, ranks * bytes + kGuard);
      rig->Upload(rank, all + share, rig->random() + share, bytes);
    }
    RequireOk(communicator->AllGather(
        {.window = window, .byte_offset = offset, .bytes = bytes, .streams = rig->streams()},
        Clock::now() + kWait));
    rig->Synchronize();
    for (size_t rank = 0; rank < rig->ranks(); ++rank) {
      INFO(bytes << " bytes of each, at " << offset << " of rank " << rank);
      REQUIRE(rig->Holds(rank, regions[rank]->data() + offset, rig->random(), ranks * bytes));
    }
    ran(bytes);
    offset = (offset + 1040) % (64 * kKiB);
  }
}

int64_t WindowBytes() {
  return (LargestBytes() + kAllGatherAlignment) * static_cast<int64_t>(rig->ranks()) + 64 * kKiB +
         kGuard;
}

TEST_CASE("all-gathers over windows are right, and symmetric kernels run them") {
  const auto communicator = rig->Make();
  const Regions regions = rig->MakeRegions(WindowBytes());
  const auto window = Ok(communicator->RegisterWindow(regions, Clock::now() + kWait));
  LogSection all;
  size_t seen = 0;
  std::printf("all-gathers over windows, bytes of each rank\n");
  GatherAll(communicator.get(), window, regions, [&](int64_t bytes) {
    if (!rig->real()) return;
    const auto lines = all.Lines({"AllGather", "Bytes ->"});
    REQUIRE(lines.size() > seen);
    std::printf("  %11ld: %s\n", static_cast<long>(bytes), lines.back().c_str());
    if (bytes >= kMiB) CHECK_THAT(lines.back(), Contains("[Symmetric]"));
    seen = lines.size();
  });
  RequireOk(communicator->Close(Clock::now() + kWait));
}

TEST_CASE("with copy engines all-gathers over windows are right, and no kernel runs them") {
  const auto communicator = rig->Make(/*copy_engines=*/true);
  const Regions regions = rig->MakeRegions(WindowBytes());
  const auto window = Ok(communicator->RegisterWindow(regions, Clock::now() + kWait));
  const LogSection log;
  GatherAll(communicator.get(), window, regions, [](int64_t /*bytes*/) {});
  if (rig->real()) {
    CHECK(!log.Lines({"Init CE"}).empty());
    CHECK(log.Lines({"AllGather", "Bytes ->"}).empty());
    std::printf("all-gathers by copy engines: no kernel in NCCL's log\n");
  }
  RequireOk(communicator->Close(Clock::now() + kWait));
}

TEST_CASE("a communicator that is aborted in mid-broadcast gives all back, and the next works") {
  if (!rig->can_wait()) return;
  char* const flag = rig->Pinned(64);
  auto communicator = rig->Make();
  Regions regions = rig->MakeRegions(16 * kMiB + kGuard);
  Ok(communicator->RegisterWindow(regions, Clock::now() + kWait));
  const auto before = rig->Free();
  // All devices but the last begin, and wait for the last.
  rig->WaitOnStream(rig->ranks() - 1, flag);
  RequireOk(communicator->Broadcast(BroadcastOf(regions, 0, 16 * kMiB), Clock::now() + kWait));
  const Clock::time_point begun = Clock::now();
  communicator->Abort(absl::DeadlineExceededError("the trial's"));
  CHECK(!communicator->status().ok());
  __atomic_store_n(reinterpret_cast<uint32_t*>(flag), 1, __ATOMIC_RELEASE);
  communicator = nullptr;
  regions.clear();
  communicator = rig->Make();  // the other communicator has ended by now
  std::printf("aborted in mid-broadcast, given back and made anew in %.0f ms\n",
              Milliseconds(begun));
  rig->Synchronize();
  REQUIRE(!rig->lost());
  const auto now = rig->Free();
  std::printf("  device memory that this cost, its regions given back: %s\n",
              Difference(before, now).c_str());
  for (size_t i = 0; i < now.size(); ++i) CHECK(now[i] >= before[i] + 14 * kMiB);
  regions = rig->MakeRegions(kMiB + kGuard);
  for (size_t rank = 0; rank < rig->ranks(); ++rank) {
    rig->Poison(rank, regions[rank]->data(), kMiB + kGuard);
  }
  rig->Upload(0, regions[0]->data(), rig->random(), kMiB);
  RequireOk(communicator->Broadcast(BroadcastOf(regions, 0, kMiB), Clock::now() + kWait));
  rig->Synchronize();
  CHECK(rig->Holds(rig->ranks() - 1, regions.back()->data(), rig->random(), kMiB));
  RequireOk(communicator->Close(Clock::now() + kWait));
}

TEST_CASE("windows and communicators come and go, and device memory with them") {
  const auto ranks = static_cast<int64_t>(rig->ranks());
  const auto none = rig->Free();
  auto communicator = rig->Make();
  std::printf("device memory of a communicator: %s\n", Difference(none, rig->Free()).c_str());
  {
    const Regions regions = rig->MakeRegions(64 * kMiB);
    const auto unused = rig->Free();
    const auto window = Ok(communicator->RegisterWindow(regions, Clock::now() + kWait));
    std::printf("  of its first window, beside the region: %s\n",
                Difference(unused, rig->Free()).c_str());
    RequireOk(communicator->DeregisterWindow(window, Clock::now() + kWait));
  }
  RequireOk(communicator->Close(Clock::now() + kWait));
  const auto closed = rig->Free();
  std::printf("  that stays after its end: %s\n", Difference(none, closed).c_str());

  const int64_t cycles = Setting("REFITD_TRIAL_CYCLES", 1000);
  double windows_ms = 0;
  double makes_ms = 0;
  double closes_ms = 0;
  int makes = 0;
  int closes = 0;
  communicator = nullptr;
  for (int64_t i = 0; i < cycles; ++i) {
    if (communicator == nullptr) {
      const Clock::time_point begun = Clock::now();
      communicator = rig->Make(/*copy_engines=*/makes % 2 == 1);
      makes_ms += Milliseconds(begun);
      ++makes;
    }
    const Regions regions = rig->MakeRegions(64 * kMiB);
    const Clock::time_point begun = Clock::now();
    const auto window = Ok(communicator->RegisterWindow(regions, Clock::now() + kWait));
    windows_ms += Milliseconds(begun);
    if (i % 10 == 0) {
      for (size_t rank = 0; rank < rig->ranks(); ++rank) {
        char* const all = regions[rank]->data();
        rig->Poison(rank, all, 2 * kMiB);
        rig->Upload(rank, all + static_cast<int64_t>(rank) * 1008, rig->random() + i, 1008);
      }
      RequireOk(communicator->AllGather(
          {.window = window, .byte_offset = 0, .bytes = 1008, .streams = rig->streams()},
          Clock::now() + kWait));
      rig->Synchronize();
      CHECK(rig->Holds(0, regions[0]->data() + (ranks - 1) * 1008, rig->random() + i, 1008));
    }
    // Some communicators are closed or aborted while they have a window.
    if (i % 60 == 59) {
      const Clock::time_point closing = Clock::now();
      if (i % 120 == 59) {
        RequireOk(communicator->Close(Clock::now() + kWait));
        closes_ms += Milliseconds(closing);
        ++closes;
      }
      communicator = nullptr;
      continue;
    }
    const Clock::time_point ending = Clock::now();
    RequireOk(communicator->DeregisterWindow(window, Clock::now() + kWait));
    windows_ms += Milliseconds(ending);
  }
  if (communicator != nullptr) RequireOk(communicator->Close(Clock::now() + kWait));
  const auto now = rig->Free();
  std::printf(
      "%ld windows of 64 MiB: %.2f ms each; %d communicators made in %.0f ms, closed in "
      "%.0f ms; device memory gone: %s\n",
      static_cast<long>(cycles), windows_ms / static_cast<double>(cycles), makes,
      makes_ms / std::max(makes, 1), closes_ms / std::max(closes, 1),
      Difference(closed, now).c_str());
  CHECK(Back(closed, now));
  CHECK(!rig->lost());
}

// The mean milliseconds of one collective, when `times` of them are issued one after the other.
double TimeOf(int times, const std::function<void()>& issue) {
  issue();
  rig->Synchronize();
  const Clock::time_point begun = Clock::now();
  for (int i = 0; i < times; ++i) issue();
  rig->Synchronize();
  return Milliseconds(begun) / times;
}

TEST_CASE("rates") {
  constexpr int kTimes = 20;
  const int64_t bytes = LargestBytes();
  const auto megabytes = static_cast<double>(bytes) / 1e6;
  const auto communicator = rig->Make();
  const auto engines = rig->Make(/*copy_engines=*/true);
  const Regions regions = rig->MakeRegions(WindowBytes());
  const auto window = Ok(communicator->RegisterWindow(regions, Clock::now() + kWait));
  const auto engine_window = Ok(engines->RegisterWindow(regions, Clock::now() + kWait));

  const double copy = TimeOf(kTimes, [&] {
    rig->On(rig->devices()[0], [&](const CudaApi& api) {
      RequireOk(REFITD_CUDA_CALL(api, cuMemcpyDtoDAsync,
                                 reinterpret_cast<CUdeviceptr>(regions[1]->data()),
                                 reinterpret_cast<CUdeviceptr>(regions[0]->data()),
                                 static_cast<size_t>(bytes), rig->streams()[0]));
    });
  });
  std::printf("%ld MiB, peer copy by a copy engine, 1 to 1: %.0f GB/s\n",
              static_cast<long>(bytes / kMiB), megabytes / copy);
  const auto broadcast = [&](int64_t count) {
    return TimeOf(kTimes, [&, call = BroadcastOf(regions, 0, count)] {
      RequireOk(communicator->Broadcast(call, Clock::now() + kWait));
    });
  };
  std::printf("%ld MiB, ncclBroadcast, 1 to %zu: %.0f GB/s into each\n",
              static_cast<long>(bytes / kMiB), rig->ranks() - 1, megabytes / broadcast(bytes));
  for (const int64_t share : {16 * kMiB, 64 * kMiB, bytes}) {
    if (share > bytes) continue;
    const auto gather = [&](Communicator* by, Communicator::WindowId in) {
      const double time = TimeOf(kTimes, [&] {
        RequireOk(by->AllGather(
            {.window = in, .byte_offset = 0, .bytes = share, .streams = rig->streams()},
            Clock::now() + kWait));
      });
      return static_cast<double>(rig->ranks() - 1) * static_cast<double>(share) / 1e6 / time;
    };
    std::printf(
        "%ld MiB a rank, all-gather over windows: symmetric kernel %.0f, copy engines "
        "%.0f GB/s into each\n",
        static_cast<long>(share / kMiB), gather(communicator.get(), window),
        gather(engines.get(), engine_window));
  }
  const double each = broadcast(kKiB);
  double alone = 0;
  for (int i = 0; i < 200; ++i) {
    const Clock::time_point begun = Clock::now();
    RequireOk(communicator->Broadcast(BroadcastOf(regions, 0, kKiB), Clock::now() + kWait));
    alone += Milliseconds(begun) / 200;
    rig->Synchronize();
  }
  std::printf("1 KiB broadcast: %.0f us until it is issued, %.0f us each in a row\n", alone * 1e3,
              each * 1e3);
  RequireOk(engines->Close(Clock::now() + kWait));
  RequireOk(communicator->Close(Clock::now() + kWait));
}

int Main(int argc, char** argv) {
  alarm(static_cast<unsigned>(Setting("REFITD_TRIAL_SECONDS", 240)));
  setenv("NCCL_DEBUG", "INFO", 1);
  setenv("NCCL_DEBUG_SUBSYS", "INIT,ENV,TUNING,REG,COLL,NVLS", 1);
  setenv("NCCL_DEBUG_FILE", LogPath().c_str(), 1);
  for (const std::string& dropped : CleanNcclEnvironment("lo").dropped) {
    std::printf("dropped: %s\n", dropped.c_str());
  }
  auto memory = CudaMemory::Create(Text("REFITD_TRIAL_CUDA", "libcuda.so.1"));
  if (!memory.ok() || (*memory)->devices().size() < 2) {
    std::printf("SKIPPED: %s\n", memory.ok() ? "needs two GPUs" : Message(memory.status()).c_str());
    return 0;
  }
  const NcclReport nccl = FindNccl(Text("REFITD_TRIAL_NCCL", ""));
  std::printf("%zu GPUs, %s\n", (*memory)->devices().size(), Describe(nccl).c_str());
  if (nccl.api == nullptr) {
    std::printf("SKIPPED: no NCCL\n");
    return 0;
  }
  the_memory = *std::move(memory);
  the_nccl = nccl;
  int failed = Catch::Session().run(argc, argv);
  rig->End();
  const std::string log = ReadLog();
  const bool off = log.find("NCCL_NVLS_ENABLE set by environment to 0") != std::string::npos;
  if (rig->real() && !off) {
    std::printf("FAILED: NCCL's log does not say that multicast is off\n");
    ++failed;
  }
  if (rig->real() && off) std::printf("NCCL's log: NCCL_NVLS_ENABLE set by environment to 0\n");
  if (failed == 0) std::remove(LogPath().c_str());
  std::fflush(stdout);
  // Destructors may hang after a loss, so skip them.
  _exit(failed == 0 && !rig->lost() ? 0 : 1);
}

}  // namespace
}  // namespace refitd

int main(int argc, char** argv) { return refitd::Main(argc, argv); }

#else

int main() {
  std::printf("SKIPPED: CUDA not compiled in\n");
  return 0;
}

#endif
