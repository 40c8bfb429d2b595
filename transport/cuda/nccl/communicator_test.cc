#include "transport/cuda/nccl/communicator.h"

#include <catch2/catch.hpp>

#if defined(REFITD_CUDA)
#include <chrono>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <filesystem>
#include <functional>
#include <iterator>
#include <memory>
#include <numeric>
#include <string>
#include <thread>
#include <utility>
#include <vector>

#include "transport/base/mutex.h"
#include "transport/cuda/fakes/fake_cuda.h"
#include "transport/cuda/fakes/fake_nccl.h"
#include "transport/cuda/nccl/nccl.h"
#endif

namespace refitd {
namespace {

#if !defined(REFITD_CUDA)

TEST_CASE("where CUDA is not compiled in there are no communicators") { SUCCEED(); }

#else

using Catch::Matchers::Contains;
using Clock = Communicator::Clock;
using Regions = std::vector<std::shared_ptr<const DeviceRegion>>;

constexpr int64_t kMiB = int64_t{1} << 20;
constexpr int kDevices = 2;
constexpr auto kPlenty = std::chrono::seconds(30);  // only a failing test reaches it
constexpr auto kShort = std::chrono::milliseconds(30);

Clock::time_point Plenty() { return Clock::now() + kPlenty; }

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

void WaitFor(const std::function<bool()>& condition) {
  const Clock::time_point last = Plenty();
  while (!condition()) {
    if (Clock::now() >= last) FAIL("waited for " << kPlenty.count() << " s");
    std::this_thread::yield();
  }
}

// Both fakes, two devices with a stream each, and a Communicators over them.
class Host {
 public:
  explicit Host(CommunicatorsOptions options = {}) {
    memory_ = Ok(CudaMemory::Create(FakeCuda::Path(), {.own_contexts = true}));
    const NcclReport nccl = FindNccl(FakeNccl::Path());
    INFO(nccl.problem);
    REQUIRE(nccl.api != nullptr);
    options.lost = [this](const absl::Status& why) {
      MutexLock lock(&mutex_);
      told_.push_back(why);
    };
    communicators_ = std::make_unique<Communicators>(nccl.api, memory_, std::move(options));
    contexts_ = dynamic_cast<const CudaContextsOwner&>(*memory_).contexts();
    for (int device = 0; device < kDevices; ++device) {
      const ScopedContext current(contexts_->api(), *contexts_->Get(device));
      CUstream stream = nullptr;
      CUevent event = nullptr;
      const CudaApi& api = contexts_->api();
      RequireOk(REFITD_CUDA_CALL(api, cuStreamCreate, &stream, CU_STREAM_NON_BLOCKING));
      RequireOk(REFITD_CUDA_CALL(api, cuEventCreate, &event, CU_EVENT_DISABLE_TIMING));
      streams_.push_back(stream);
      events_.push_back(event);
    }
  }

  CudaMemory* memory() { return memory_.get(); }
  Communicators* communicators() { return communicators_.get(); }
  void Destroy() { communicators_ = nullptr; }
  const std::vector<CUstream>& streams() const { return streams_; }
  FakeCuda* cuda() { return &cuda_; }
  FakeNccl* nccl() { return &nccl_; }
  std::vector<absl::Status> told() {
    MutexLock lock(&mutex_);
    return told_;
  }

  std::unique_ptr<Communicator> Make(bool copy_engines = false) {
    return Ok(communicators_->Create({.devices = {0, 1}, .copy_engines = copy_engines}, Plenty()));
  }
  Regions MakeRegions(int64_t bytes) {
    Regions regions;
    for (int device = 0; device < kDevices; ++device) {
      regions.push_back(Ok(memory_->MakePool(device, bytes)).region);
    }
    return regions;
  }
  // Runs the work on the streams, except on devices that are stopped.
  bool RunStreams() {
    bool ended = true;
    const CudaApi& api = contexts_->api();
    for (size_t device = 0; device < kDevices; ++device) {
      const ScopedContext current(api, *contexts_->Get(static_cast<int>(device)));
      RequireOk(REFITD_CUDA_CALL(api, cuEventRecord, events_[device], streams_[device]));
    }
    for (size_t device = 0; device < kDevices; ++device) {
      const ScopedContext current(api, *contexts_->Get(static_cast<int>(device)));
      ended = api.cuEventQuery(events_[device]) == CUDA_SUCCESS && ended;
    }
    return ended;
  }
  // Returns what is open, without the streams and events of this class.
  FakeCudaCounts Open() {
    FakeCudaCounts counts = cuda_.Count();
    counts.allocation_calls = 0;
    counts.small_stacks = 0;
    return counts;
  }

 private:
  FakeCuda cuda_;
  FakeNccl nccl_;
  Mutex mutex_;
  std::vector<absl::Status> told_ ABSL_GUARDED_BY(mutex_);
  std::shared_ptr<CudaMemory> memory_;
  std::shared_ptr<CudaContexts> contexts_;
  std::vector<CUstream> streams_;
  std::vector<CUevent> events_;
  std::unique_ptr<Communicators> communicators_;
};

// The fake's device memory is the host's: the bytes from `first` on count up from `value`.
void Fill(char* data, int64_t bytes, char value) { std::iota(data, data + bytes, value); }
bool Filled(const char* data, int64_t bytes, char value) {
  std::vector<char> want(static_cast<size_t>(bytes));
  std::iota(want.begin(), want.end(), value);
  return std::memcmp(data, want.data(), want.size()) == 0;
}

void CheckNothingOpen(const FakeNccl& nccl) {
  const FakeNcclCounts counts = nccl.Count();
  CHECK(counts.comms == 0);
  CHECK(counts.windows == 0);
  CHECK(counts.groups == 0);
  CHECK(counts.listeners == 0);
  CHECK(counts.lost_windows == 0);
  CHECK(counts.unsafe_revokes == 0);
}

Communicator::BroadcastCall BroadcastOf(Host* host, const Regions& regions, int root,
                                        int64_t bytes) {
  Communicator::BroadcastCall call;
  call.root = root;
  call.send = regions[static_cast<size_t>(root)]->data();
  for (const auto& region : regions) call.receive.push_back(region->data());
  call.bytes = bytes;
  call.streams = host->streams();
  return call;
}

TEST_CASE("a broadcast is on the streams when it returns, and its bytes come with them") {
  Host host;
  const auto communicator = host.Make();
  CHECK(host.cuda()->Count().small_stacks == 0);
  const Regions regions = host.MakeRegions(kMiB);
  Fill(regions[0]->data(), 1000, 3);
  Fill(regions[1]->data(), 1000, 99);
  RequireOk(communicator->Broadcast(BroadcastOf(&host, regions, 0, 999), Plenty()));
  CHECK(Filled(regions[1]->data(), 1000, 99));
  REQUIRE(host.RunStreams());
  CHECK(Filled(regions[1]->data(), 999, 3));
  CHECK(regions[1]->data()[999] == static_cast<char>(99 + 999));

  Fill(regions[1]->data(), 500, 7);
  RequireOk(communicator->Broadcast(BroadcastOf(&host, regions, 1, 500), Plenty()));
  REQUIRE(host.RunStreams());
  CHECK(Filled(regions[0]->data(), 500, 7));
  CHECK(host.nccl()->Count().broadcasts == 3);  // one by Create
  CHECK(host.nccl()->Count().threads == 1);
  RequireOk(communicator->Close(Plenty()));
  CheckNothingOpen(*host.nccl());
  CHECK(host.told().empty());
}

TEST_CASE("a broadcast waits for what is before it on each stream") {
  Host host;
  const auto communicator = host.Make();
  const Regions regions = host.MakeRegions(kMiB);
  Fill(regions[0]->data(), 100, 3);
  host.cuda()->Hold(2);
  RequireOk(communicator->Broadcast(BroadcastOf(&host, regions, 0, 100), Plenty()));
  REQUIRE(!host.RunStreams());
  Fill(regions[0]->data(), 100, 4);
  host.cuda()->Hold(0);
  REQUIRE(host.RunStreams());
  CHECK(Filled(regions[1]->data(), 100, 4));
  RequireOk(communicator->Close(Plenty()));
}

TEST_CASE("an all-gather over a window is symmetric, with copy engines where they are asked for") {
  const bool engines = GENERATE(false, true);
  Host host;
  const auto communicator = host.Make(engines);
  const Regions regions = host.MakeRegions(kMiB);
  const auto window = Ok(communicator->RegisterWindow(regions, Plenty()));
  CHECK(host.nccl()->Count().windows == kDevices);
  Fill(regions[0]->data() + 4096, 304, 1);
  Fill(regions[1]->data() + 4096 + 304, 304, 2);
  RequireOk(communicator->AllGather(
      {.window = window, .byte_offset = 4096, .bytes = 304, .streams = host.streams()}, Plenty()));
  REQUIRE(host.RunStreams());
  for (const auto& region : regions) {
    CHECK(Filled(region->data() + 4096, 304, 1));
    CHECK(Filled(region->data() + 4096 + 304, 304, 2));
  }
  const FakeNcclCounts counts = host.nccl()->Count();
  CHECK(counts.symmetric_all_gathers == (engines ? 0 : 1));
  CHECK(counts.engine_all_gathers == (engines ? 1 : 0));
  RequireOk(communicator->DeregisterWindow(window, Plenty()));
  CHECK(host.nccl()->Count().windows == 0);
  RequireOk(communicator->Close(Plenty()));
  CheckNothingOpen(*host.nccl());
}

TEST_CASE("windows hold their regions until NCCL let go of them, also when nobody closes") {
  Host host;
  const int how = GENERATE(0, 1, 2, 3, 4);
  auto communicator = host.Make();
  const auto window = Ok(communicator->RegisterWindow(host.MakeRegions(kMiB), Plenty()));
  CHECK(host.cuda()->Count().created == kDevices);
  CHECK(host.communicators()->Describe().back().windows == 1);
  CHECK(host.communicators()->Describe().back().window_bytes == 2 * kMiB);
  if (how == 0) {
    RequireOk(communicator->DeregisterWindow(window, Plenty()));
    CHECK(host.communicators()->Describe().back().windows == 0);
    CHECK(host.communicators()->Describe().back().window_bytes == 0);
  } else if (how == 1) {
    RequireOk(communicator->Close(Plenty()));
  } else if (how == 2) {
    communicator->Abort(absl::InternalError("a device hangs"));
  } else if (how == 3) {
    communicator->DeregisterLater(window, Plenty());
    RequireOk(communicator->Close(Plenty()));  // queued behind that
  } else {
    communicator = nullptr;
  }
  WaitFor([&host] { return host.cuda()->Count().created == 0; });
  communicator = nullptr;
  WaitFor([&host] { return host.nccl()->Count().comms == 0; });
  CheckNothingOpen(*host.nccl());
  CHECK(host.told().empty());
}

TEST_CASE("a window that NCCL does not let go of later holds its regions, and nobody up") {
  Host host;
  auto communicator = host.Make();
  const auto window = Ok(communicator->RegisterWindow(host.MakeRegions(kMiB), Plenty()));
  host.nccl()->Block("ncclCommWindowDeregister");
  communicator->DeregisterLater(window, Plenty());
  WaitFor([&host] { return host.nccl()->Count().blocked_calls == 1; });
  CHECK(host.cuda()->Count().created == kDevices);
  const bool fails = GENERATE(false, true);
  if (fails) host.nccl()->FailAt("ncclCommWindowDeregister", 1, 4);
  host.nccl()->Block("");
  WaitFor([&host] { return host.cuda()->Count().created == 0; });
  WaitFor([&] { return communicator->status().ok() != fails; });
  if (fails) {
    CHECK_THAT(std::string(communicator->status().message()),
               Contains("giving back a window of communicator 1"));
  }
  communicator = nullptr;
  WaitFor([&host] { return host.nccl()->Count().comms == 0; });
  CheckNothingOpen(*host.nccl());
  CHECK(host.told().empty());
}

TEST_CASE("wrong arguments are refused by name, and cost nothing") {
  Host host;
  const auto communicator = host.Make();
  const Regions regions = host.MakeRegions(kMiB);
  const auto refused = [&communicator](const absl::Status& status, const std::string& part) {
    INFO(status.ToString());
    CHECK(status.code() == absl::StatusCode::kInvalidArgument);
    CHECK_THAT(std::string(status.message()), Contains(part));
    CHECK(communicator->status().ok());
  };
  for (const auto& [devices, part] :
       std::vector<std::pair<std::vector<int>, std::string>>{{{}, "0 devices"},
                                                             {{1}, "1 devices"},
                                                             {{0, 2}, "no CUDA device 2"},
                                                             {{-1, 0}, "no CUDA device -1"},
                                                             {{1, 1}, "device 1 comes twice"}}) {
    refused(host.communicators()->Create({.devices = devices}, Plenty()).status(), part);
  }
  const auto window = Ok(communicator->RegisterWindow(regions, Plenty()));
  const auto registered = [&](const Regions& given) {
    return communicator->RegisterWindow(given, Plenty()).status();
  };
  refused(registered({regions[0]}), "1 regions for 2 devices");
  refused(registered({regions[1], regions[0]}), "region 0 is not on device 0");
  refused(registered({regions[0], nullptr}), "region 1 is not on device 1");
  refused(registered({host.MakeRegions(kMiB)[0], host.MakeRegions(3 * kMiB)[1]}),
          "has 4194304 bytes, that of device 0 2097152");
  refused(registered(regions), "region of device 0 is in window 1 already");

  const Communicator::BroadcastCall good = BroadcastOf(&host, regions, 0, 10);
  const auto broadcast = [&](const std::function<void(Communicator::BroadcastCall*)>& change) {
    Communicator::BroadcastCall call = good;
    change(&call);
    return communicator->Broadcast(call, Plenty());
  };
  refused(broadcast([](auto* call) { call->root = 2; }), "from rank 2 of 2");
  refused(broadcast([](auto* call) { call->root = -1; }), "from rank -1");
  refused(broadcast([](auto* call) { call->bytes = -1; }), "of -1 bytes");
  refused(broadcast([](auto* call) { call->send = nullptr; }), "from null");
  refused(broadcast([](auto* call) { call->receive.pop_back(); }), "1 pointers for 2 devices");
  refused(broadcast([](auto* call) { call->receive[1] = nullptr; }), "one is null");
  refused(broadcast([](auto* call) { call->streams.pop_back(); }), "1 streams for 2 devices");
  refused(broadcast([](auto* call) { call->streams[1] = nullptr; }), "of device 1 is null");

  const auto gather = [&](Communicator::WindowId id, int64_t offset, int64_t bytes) {
    return communicator->AllGather(
        {.window = id, .byte_offset = offset, .bytes = bytes, .streams = host.streams()}, Plenty());
  };
  refused(gather(window + 1, 0, 16), "no window 2");
  refused(gather(window, -16, 16), "at -16");
  refused(gather(window, 0, -16), "of -16 bytes");
  refused(gather(window, 8, 16), "16 bytes at 8, must be multiples of 16");
  refused(gather(window, 16, 17), "17 bytes at 16, must be multiples of 16");
  refused(gather(window, 0, kMiB + 16), "2 shares of 1048592 bytes at 0 of a window of 2097152");
  refused(gather(window, 16, kMiB), "at 16 of a window");
  refused(gather(window, 3 * kMiB, 16), "at 3145728 of a window");
  refused(gather(window, 16, std::numeric_limits<int64_t>::max() - 15), "of a window");
  refused(communicator->DeregisterWindow(window + 1, Plenty()), "no window 2");

  RequireOk(broadcast([](auto* call) { call->bytes = 0; }));
  RequireOk(gather(window, 0, 0));
  RequireOk(gather(window, 0, kMiB));
  RequireOk(broadcast([](auto* /*call*/) {}));
  REQUIRE(host.RunStreams());
  RequireOk(communicator->Close(Plenty()));
}

TEST_CASE("where there is no symmetric memory that is said, and all else works") {
  Host host;
  const auto communicator = host.Make();
  const Regions regions = host.MakeRegions(kMiB);
  host.nccl()->Symmetric(false);
  const auto window = communicator->RegisterWindow(regions, Plenty());
  CHECK(window.status().code() == absl::StatusCode::kUnimplemented);
  CHECK_THAT(std::string(window.status().message()), Contains("no symmetric memory"));
  RequireOk(communicator->Broadcast(BroadcastOf(&host, regions, 0, 10), Plenty()));
  host.nccl()->Symmetric(true);
  Ok(communicator->RegisterWindow(regions, Plenty()));
  RequireOk(communicator->Close(Plenty()));
  CheckNothingOpen(*host.nccl());
}

TEST_CASE("an NCCL before 2.28.7 broadcasts, and has no windows") {
  setenv("REFITD_FAKE_NCCL_VERSION", "22005", 1);
  Host host;
  unsetenv("REFITD_FAKE_NCCL_VERSION");
  const auto communicator = host.Make();
  const Regions regions = host.MakeRegions(kMiB);
  const auto window = communicator->RegisterWindow(regions, Plenty());
  CHECK(window.status().code() == absl::StatusCode::kUnimplemented);
  CHECK_THAT(std::string(window.status().message()), Contains("2.28.7") && Contains("2.20.5"));
  RequireOk(communicator->Broadcast(BroadcastOf(&host, regions, 1, 10), Plenty()));
  RequireOk(communicator->Close(Plenty()));
}

TEST_CASE("memory that NCCL can't map into a window poisons the communicator, not the daemon") {
  Host host;
  const auto communicator = host.Make();
  Regions regions;
  for (int device = 0; device < kDevices; ++device) {
    std::string handle;
    host.cuda()->Export(device, kMiB, &handle);
    regions.push_back(Ok(host.memory()->OpenBlock(device, handle)));
  }
  const auto window = communicator->RegisterWindow(regions, Plenty());
  CHECK(window.status().code() == absl::StatusCode::kUnavailable);
  CHECK_THAT(std::string(window.status().message()), Contains("registering a window"));
  CHECK(!communicator->status().ok());
  WaitFor([&host] { return host.nccl()->Count().comms == 0; });
  regions.clear();
  WaitFor([&host] { return host.cuda()->Count().opened_handles == 0; });
  CheckNothingOpen(*host.nccl());
  CHECK(host.told().empty());
}

TEST_CASE("whatever call fails while a communicator is made, nothing of it is left") {
  Host host({.clean_up = std::chrono::milliseconds(200)});
  const FakeCudaCounts before = host.Open();
  const auto failed = [&](const std::string& part) {
    const auto made = host.communicators()->Create({.devices = {0, 1}}, Plenty());
    INFO(part);
    REQUIRE(!made.ok());
    CHECK_THAT(std::string(made.status().message()), Contains(part));
    // The end of its listener may take longer than Create waits for it.
    WaitFor([&host] {
      const FakeNcclCounts counts = host.nccl()->Count();
      return counts.comms == 0 && counts.listeners == 0;
    });
    CheckNothingOpen(*host.nccl());
    CHECK(host.Open() == before);
  };
  const int result = static_cast<int>(NcclResult::kSystemError);
  for (const char* call :
       {"ncclGetUniqueId", "ncclCommInitRankConfig", "ncclGroupStart", "ncclGroupEnd",
        "ncclCommGetAsyncError", "ncclAllGather", "ncclBroadcast"}) {
    for (const int nth : {1, 2}) {
      if (nth == 2 && std::string(call) == "ncclGetUniqueId") continue;
      host.nccl()->FailAt(call, nth, result);
      failed(call);
    }
  }
  for (const int nth : {1, 2, 3}) {
    host.nccl()->FailGroup(nth, result);
    failed(nth == 1 ? "making it" : "the first");
  }
  for (const char* call : {"cuMemAlloc", "cuStreamCreate", "cuEventCreate"}) {
    host.cuda()->FailAt(call, 2, CUDA_ERROR_OUT_OF_MEMORY);
    failed(call);
  }
  CHECK(host.told().empty());
  const auto communicator = host.Make();
  CHECK(host.communicators()->Describe().back().number > 19);
  RequireOk(communicator->Close(Plenty()));
}

TEST_CASE("a communicator that is not made in time is given back, and the device is named") {
  Host host;
  host.nccl()->Stick(true);
  const auto made = host.communicators()->Create({.devices = {1, 0}}, Clock::now() + kShort);
  CHECK(made.status().code() == absl::StatusCode::kDeadlineExceeded);
  CHECK_THAT(std::string(made.status().message()),
             Contains("communicator 1 (devices 1, 0)") && Contains("NCCL waits for device 1"));
  CheckNothingOpen(*host.nccl());
  host.nccl()->Stick(false);
  // The first collective does not end.
  host.cuda()->Hold(1);
  const auto held = host.communicators()->Create({.devices = {1, 0}}, Clock::now() + kShort);
  CHECK(held.status().code() == absl::StatusCode::kDeadlineExceeded);
  CHECK_THAT(std::string(held.status().message()),
             Contains("communicator 2") && Contains("device"));
  CheckNothingOpen(*host.nccl());
  CHECK(host.told().empty());
}

TEST_CASE("a call that fails poisons its communicator alone; the next has a new number") {
  Host host;
  const auto first = host.Make();
  const auto other = host.Make();
  const Regions regions = host.MakeRegions(kMiB);
  const int result = static_cast<int>(NcclResult::kInternalError);
  if (GENERATE(false, true)) {
    host.nccl()->FailGroup(1, result);
  } else {
    host.nccl()->FailAt("ncclBroadcast", 2, result);
  }
  const absl::Status failed = first->Broadcast(BroadcastOf(&host, regions, 0, 10), Plenty());
  CHECK(failed.code() == absl::StatusCode::kInternal);
  CHECK_THAT(std::string(failed.message()),
             Contains("a broadcast of communicator 1 (devices 0, 1): device"));
  const absl::Status refused = first->Broadcast(BroadcastOf(&host, regions, 0, 10), Plenty());
  CHECK(refused.code() == absl::StatusCode::kInternal);
  CHECK_THAT(std::string(refused.message()), Contains("is no longer usable"));
  CHECK(first->Close(Plenty()) == refused);
  WaitFor([&host] { return host.nccl()->Count().comms == kDevices; });
  CHECK(host.nccl()->Count().aborts == kDevices);

  RequireOk(other->Broadcast(BroadcastOf(&host, regions, 0, 10), Plenty()));
  const auto next = host.Make();
  CHECK(host.communicators()->Describe().back().number == 3);
  RequireOk(next->Broadcast(BroadcastOf(&host, regions, 0, 10), Plenty()));
  REQUIRE(host.RunStreams());
  RequireOk(next->Close(Plenty()));
  RequireOk(other->Close(Plenty()));
  CheckNothingOpen(*host.nccl());
  CHECK(host.told().empty());
}

TEST_CASE("a call that is late poisons; its windows go once it has ended after all") {
  Host host({.clean_up = kPlenty});
  const auto communicator = host.Make();
  const Regions regions = host.MakeRegions(kMiB);
  Ok(communicator->RegisterWindow(regions, Plenty()));
  host.nccl()->Stick(true);
  const absl::Status late =
      communicator->Broadcast(BroadcastOf(&host, regions, 0, 10), Clock::now() + kShort);
  CHECK(late.code() == absl::StatusCode::kDeadlineExceeded);
  CHECK_THAT(std::string(late.message()), Contains("NCCL waits for device 0"));
  CHECK(!communicator->status().ok());
  CHECK(host.nccl()->Count().windows == kDevices);
  host.nccl()->Stick(false);
  WaitFor([&host] { return host.nccl()->Count().comms == 0; });
  CHECK(host.nccl()->Count().revokes == kDevices);
  CheckNothingOpen(*host.nccl());
  CHECK(host.told().empty());
}

TEST_CASE("windows of a call that never ends are never given back: the GPUs are lost") {
  Host host({.limit = std::chrono::seconds(5), .clean_up = kShort});
  const bool revoke = GENERATE(false, true);
  const auto communicator = host.Make();
  Regions regions = host.MakeRegions(kMiB);
  Ok(communicator->RegisterWindow(regions, Plenty()));
  const auto call = BroadcastOf(&host, regions, 0, 10);
  regions.clear();
  host.nccl()->Stick(!revoke, revoke);
  if (revoke) {
    communicator->Abort(absl::DeadlineExceededError("device 1 hangs"));
  } else {
    CHECK(!communicator->Broadcast(call, Clock::now() + kShort).ok());
  }
  WaitFor([&host] { return !host.told().empty(); });
  CHECK_THAT(std::string(host.told()[0].message()), Contains("the end of communicator 1"));
  CHECK(host.nccl()->Count().windows == kDevices);
  CHECK(host.cuda()->Count().created == kDevices);
  const auto next = host.communicators()->Create({.devices = {0, 1}}, Plenty());
  CHECK(next.status().code() == absl::StatusCode::kDeadlineExceeded);
}

TEST_CASE("an abort gives all back, whatever the devices are at") {
  Host host;
  const bool windows = GENERATE(false, true);
  const auto communicator = host.Make();
  Regions regions = host.MakeRegions(kMiB);
  if (windows) Ok(communicator->RegisterWindow(regions, Plenty()));
  Fill(regions[0]->data(), 10, 1);
  Fill(regions[1]->data(), 10, 50);
  host.cuda()->Hold(2);
  RequireOk(communicator->Broadcast(BroadcastOf(&host, regions, 0, 10), Plenty()));
  REQUIRE(!host.RunStreams());
  communicator->Abort(absl::DeadlineExceededError("device 1 hangs"));
  CHECK_THAT(std::string(communicator->status().message()), Contains("device 1 hangs"));
  WaitFor([&host] { return host.nccl()->Count().comms == 0; });
  CHECK(host.nccl()->Count().revokes == (windows ? kDevices : 0));
  CheckNothingOpen(*host.nccl());
  host.cuda()->Hold(0);
  REQUIRE(host.RunStreams());
  CHECK(Filled(regions[1]->data(), 10, 50));
  CHECK(host.told().empty());
}

TEST_CASE("a call that hangs in NCCL holds nobody beyond his deadline, and is told as a loss") {
  Host host({.limit = std::chrono::milliseconds(100)});
  const std::string hangs = GENERATE("ncclBroadcast", "ncclCommGetAsyncError", "ncclCommAbort");
  const auto communicator = host.Make();
  const auto other = host.Make();
  const Regions regions = host.MakeRegions(kMiB);
  const auto call = BroadcastOf(&host, regions, 0, 10);
  host.nccl()->Block(hangs.c_str());
  if (hangs == "ncclCommAbort") {
    communicator->Abort(absl::InternalError("enough"));
  } else {
    const absl::Status late = communicator->Broadcast(call, Clock::now() + kShort);
    CHECK(late.code() == absl::StatusCode::kDeadlineExceeded);
    CHECK_THAT(std::string(late.message()), Contains("does not return"));
    CHECK(!communicator->status().ok());
  }
  WaitFor([&host] { return host.nccl()->Count().blocked_calls == 1; });
  // Other calls are told what they wait for. Their communicators are not poisoned, because the
  // calls were not begun.
  const absl::Status behind = other->Broadcast(call, Clock::now() + kShort);
  CHECK(behind.code() == absl::StatusCode::kDeadlineExceeded);
  CHECK_THAT(std::string(behind.message()),
             Contains("a broadcast of communicator 2 (devices 0, 1) waits for another call of "
                      "NCCL: ") &&
                 Contains("of communicator 1 (devices 0, 1)"));
  CHECK(other->status().ok());
  WaitFor([&host] { return !host.told().empty(); });
  CHECK(host.told()[0].code() == absl::StatusCode::kDeadlineExceeded);
  CHECK_THAT(std::string(host.told()[0].message()),
             Contains("of communicator 1") && Contains("did not return within 100 ms"));
  CHECK(!host.communicators()->Create({.devices = {0, 1}}, Plenty()).ok());

  if (GENERATE(false, true)) host.Destroy();  // does not hang either
  CHECK(host.told().size() == 1);
  host.nccl()->Block("");
  WaitFor([&host] { return host.nccl()->Count().blocked_calls == 0; });
}

TEST_CASE("communicators outlive what made them, without use") {
  Host host;
  const auto communicator = host.Make();
  const Regions regions = host.MakeRegions(kMiB);
  host.Destroy();
  CHECK(communicator->Broadcast(BroadcastOf(&host, regions, 0, 10), Plenty()).code() ==
        absl::StatusCode::kUnavailable);
  CHECK(!communicator->Close(Plenty()).ok());
}

TEST_CASE("what is told of communicators is what there is") {
  Host host;
  CHECK(host.communicators()->Describe().empty());
  auto first = host.Make();
  const auto second = host.Make(/*copy_engines=*/true);
  Ok(second->RegisterWindow(host.MakeRegions(kMiB), Plenty()));
  Ok(second->RegisterWindow(host.MakeRegions(3 * kMiB), Plenty()));
  first->Abort(absl::InternalError("enough"));
  std::vector<CommunicatorStatus> all = host.communicators()->Describe();
  REQUIRE(all.size() == 2);
  CHECK(all[0].number == 1);
  CHECK(all[0].devices == std::vector<int>{0, 1});
  CHECK_THAT(std::string(all[0].status.message()), Contains("enough"));
  CHECK(all[1].number == 2);
  CHECK(all[1].copy_engines);
  CHECK(all[1].windows == 2);
  CHECK(all[1].window_bytes == 6 * kMiB);
  CHECK(all[1].status.ok());
  first = nullptr;
  WaitFor([&host] { return host.communicators()->Describe().size() == 1; });
}

TEST_CASE("a window more than the limit is refused, and another takes its place") {
  Host host;
  const auto communicator = host.Make();
  Communicator::WindowId first = 0;
  for (size_t i = 0; i < kMaxCommunicatorWindows; ++i) {
    const auto window = Ok(communicator->RegisterWindow(host.MakeRegions(kMiB), Plenty()));
    if (i == 0) first = window;
  }
  const auto more = communicator->RegisterWindow(host.MakeRegions(kMiB), Plenty());
  CHECK(more.status().code() == absl::StatusCode::kResourceExhausted);
  RequireOk(communicator->DeregisterWindow(first, Plenty()));
  Ok(communicator->RegisterWindow(host.MakeRegions(kMiB), Plenty()));
  RequireOk(communicator->Close(Plenty()));
  CheckNothingOpen(*host.nccl());
}

// Ends the process, so that a test can't hang.
class Watchdog {
 public:
  Watchdog() : thread_([this] { Watch(); }) {}
  ~Watchdog() {
    {
      MutexLock lock(&mutex_);
      ended_ = true;
    }
    changed_.NotifyAll();
    thread_.join();
  }
  Watchdog(const Watchdog&) = delete;
  Watchdog& operator=(const Watchdog&) = delete;

 private:
  void Watch() {
    MutexLock lock(&mutex_);
    while (!ended_) {
      if (changed_.WaitUntil(&mutex_, last_) || ended_) continue;
      std::fputs("the watchdog's time is up\n", stderr);
      std::abort();
    }
  }

  const Clock::time_point last_ = Clock::now() + std::chrono::minutes(4);
  Mutex mutex_;
  CondVar changed_;
  bool ended_ ABSL_GUARDED_BY(mutex_) = false;
  std::thread thread_;  // last: it uses the other members
};

std::ptrdiff_t EntriesOf(const char* folder) {
  return std::distance(std::filesystem::directory_iterator(folder), {});
}

TEST_CASE("a thousand communicators with a window each leave nothing behind") {
  const Watchdog watchdog;
  Host host;
  RequireOk(host.Make()->Close(Plenty()));  // its thread has started
  WaitFor([&host] { return host.nccl()->Count().comms == 0; });
  const FakeCudaCounts before = host.Open();
  const std::ptrdiff_t descriptors = EntriesOf("/proc/self/fd");
  const std::ptrdiff_t threads = EntriesOf("/proc/self/task");
  for (int i = 0; i < 1000; ++i) {
    auto communicator = host.Make(/*copy_engines=*/i % 2 == 1);
    // A second window comes and goes.
    for (const bool stays : {false, true}) {
      const auto window = Ok(communicator->RegisterWindow(host.MakeRegions(kMiB), Plenty()));
      RequireOk(communicator->AllGather(
          {.window = window, .byte_offset = 0, .bytes = 1008, .streams = host.streams()},
          Plenty()));
      REQUIRE(host.RunStreams());
      if (!stays) RequireOk(communicator->DeregisterWindow(window, Plenty()));
    }
    // Close the communicator, abort it, or only destroy it.
    if (i % 3 == 0) RequireOk(communicator->Close(Plenty()));
    if (i % 3 == 1) communicator->Abort(absl::InternalError("enough"));
  }
  WaitFor([&host] { return host.communicators()->Describe().empty(); });
  CheckNothingOpen(*host.nccl());
  CHECK(host.nccl()->Count().threads == 1);
  CHECK(host.Open() == before);
  CHECK(EntriesOf("/proc/self/fd") == descriptors);
  CHECK(EntriesOf("/proc/self/task") == threads);
  CHECK(host.told().empty());
}

TEST_CASE("collectives over the same devices in opposite order never wait for each other (P7)") {
  const Watchdog watchdog;
  Host host;
  constexpr int kCalls = 300;
  constexpr int64_t kEach = 64;
  // Each communicator has a thread that issues onto the same two streams.
  struct Side {
    std::vector<int> devices;
    std::unique_ptr<Communicator> communicator{};
    Regions regions{};
    absl::Status status{};
    std::thread thread{};
  };
  std::vector<Side> sides;
  sides.push_back({.devices = {0, 1}});
  sides.push_back({.devices = {1, 0}});
  for (Side& side : sides) {
    side.communicator = Ok(host.communicators()->Create({.devices = side.devices}, Plenty()));
    side.regions = host.MakeRegions(kCalls * kEach);
    Fill(side.regions[static_cast<size_t>(side.devices[0])]->data(), kCalls * kEach,
         static_cast<char>(side.devices[0] + 7));
  }
  for (Side& side : sides) {
    side.thread = std::thread([&side, &host] {
      for (int i = 0; i < kCalls && side.status.ok(); ++i) {
        Communicator::BroadcastCall call;
        for (const int device : side.devices) {
          call.receive.push_back(side.regions[static_cast<size_t>(device)]->data() + i * kEach);
          call.streams.push_back(host.streams()[static_cast<size_t>(device)]);
        }
        call.send = call.receive[0];
        call.bytes = kEach;
        side.status = side.communicator->Broadcast(call, Plenty());
      }
    });
  }
  for (Side& side : sides) side.thread.join();
  for (const Side& side : sides) RequireOk(side.status);
  REQUIRE(host.RunStreams());
  for (const Side& side : sides) {
    CHECK(Filled(side.regions[static_cast<size_t>(side.devices[1])]->data(), kCalls * kEach,
                 static_cast<char>(side.devices[0] + 7)));
    RequireOk(side.communicator->Close(Plenty()));
  }
  CHECK(host.nccl()->Count().threads == 1);
  CheckNothingOpen(*host.nccl());
  CHECK(host.told().empty());
}

#endif

}  // namespace
}  // namespace refitd
