#include <catch2/catch.hpp>

#if defined(REFITD_CUDA)
#include <algorithm>
#include <atomic>
#include <chrono>
#include <cstring>
#include <future>
#include <memory>
#include <random>
#include <string>
#include <thread>
#include <utility>
#include <vector>

#include "transport/base/eventually_testing.h"
#include "transport/cuda/fakes/fake_cuda.h"
#include "transport/cuda/fakes/fake_nccl.h"
#include "transport/cuda/nccl/broadcast.h"
#include "transport/cuda/nccl/nccl.h"
#include "transport/cuda/relay.h"
#endif

namespace refitd {
namespace {

#if !defined(REFITD_CUDA)

TEST_CASE("where CUDA is not compiled in nothing is broadcast by NCCL") { SUCCEED(); }

#else

constexpr uint64_t kSeed = 815;
constexpr int64_t kSlotBytes = 8192;
constexpr int64_t kSourceBytes = 64 << 10;
constexpr int kSlots = 16;

using Random = std::mt19937_64;

int64_t Pick(Random* random, int64_t least, int64_t most) {
  return std::uniform_int_distribution<int64_t>(least, most)(*random);
}

// Devices that each have bytes to broadcast and a pool of slots, and the NcclBroadcasts between the
// devices.
class Rig {
 public:
  explicit Rig(int devices, int64_t piece_bytes,
               std::chrono::milliseconds limit = std::chrono::seconds(60)) {
    cuda.Devices(devices);
    memory = *CudaMemory::Create(FakeCuda::Path());
    const NcclReport found = FindNccl(FakeNccl::Path());
    REQUIRE(found.api != nullptr);
    const auto lost = [this](const absl::Status&) { ++losses; };
    broadcasts = std::make_shared<NcclBroadcasts>(
        found.api, memory,
        NcclBroadcasts::Options{
            .limit = limit, .copy_engines = true, .lost = lost, .piece_bytes = piece_bytes});
    relays = std::make_unique<RelayQueue>(
        memory, dynamic_cast<const CudaContextsOwner&>(*memory).contexts(),
        RelayQueue::Options{.limit = limit, .lost = lost, .nccl = broadcasts});
    memory->WatchPools(this, [this](const DeviceRegion& pool) { broadcasts->LetGo(pool); });
    Random random(kSeed);
    for (int device = 0; device < devices; ++device) {
      sources.push_back(memory->MakePool(device, kSourceBytes)->region);
      char* const data = sources.back()->data();
      std::generate_n(data, kSourceBytes, [&random] { return static_cast<char>(random() | 1); });
      pools.push_back(*memory->MakePool(device, kSlots * kSlotBytes));
    }
  }
  ~Rig() { Stop(); }

  void Stop() {
    if (relays == nullptr) return;
    memory->UnwatchPools(this);
    relays->Stop(std::chrono::steady_clock::now() + kTestDeadline);
    relays = nullptr;
    broadcasts = nullptr;
  }

  FakeCuda cuda;
  FakeNccl nccl;
  std::atomic<int> losses = 0;
  std::shared_ptr<CudaMemory> memory;
  std::shared_ptr<NcclBroadcasts> broadcasts;
  std::unique_ptr<RelayQueue> relays;
  std::vector<std::shared_ptr<const DeviceRegion>> sources;  // have no byte that is 0
  std::vector<DevicePool> pools;
};

// A broadcast into one slot of these devices.
class Bucket {
 public:
  Bucket(Rig* rig, int source, const std::vector<int>& devices, int slot,
         BroadcastMethod method = BroadcastMethod::kNccl)
      : rig_(rig), expected_(static_cast<size_t>(kSlotBytes), 0) {
    relay_.method = method;
    relay_.source = source;
    relay_.slot_bytes = kSlotBytes;
    relay_.chunk_bytes = kSlotBytes;
    for (const int device : devices) {
      const DevicePool& pool = rig->pools[static_cast<size_t>(device)];
      relay_.slots.push_back({device, pool.region->data() + slot * kSlotBytes});
      relay_.keep_alive.push_back(pool.region);
    }
  }

  // Adds a run of the source's bytes from `from` on.
  void Add(int64_t from, int64_t offset, int64_t bytes) {
    char* const data = rig_->sources[static_cast<size_t>(relay_.source)]->data() + from;
    relay_.runs.push_back({data, offset, bytes});
    std::memcpy(&expected_[static_cast<size_t>(offset)], data, static_cast<size_t>(bytes));
  }
  // Adds random runs, some of them with gaps between them.
  void AddRandomly(Random* random) {
    int64_t offset = Pick(random, 0, 3) == 0 ? Pick(random, 1, 1500) : 0;
    while (offset < kSlotBytes && (relay_.runs.empty() || Pick(random, 0, 15) > 0)) {
      const int64_t bytes =
          std::min(Pick(random, 1, Pick(random, 0, 4) == 0 ? 3000 : 300), kSlotBytes - offset);
      Add(Pick(random, 0, kSourceBytes - bytes), offset, bytes);
      offset += bytes + (Pick(random, 0, 1) == 0 ? 0 : Pick(random, 1, 200));
    }
  }

  void SlotBytes(int64_t bytes) { relay_.slot_bytes = bytes; }
  void Submit() {
    rig_->relays->Submit(
        relay_,
        {.issued = [](const auto&) {},
         .ended = [ended = ended_](const absl::Status& status) { ended->set_value(status); }});
  }
  absl::Status Wait() {
    REQUIRE(future_.wait_for(kTestDeadline) == std::future_status::ready);
    return future_.get();
  }
  // Checks that every slot has the added bytes, and zeros elsewhere.
  bool Arrived() const {
    return std::all_of(relay_.slots.begin(), relay_.slots.end(), [this](const auto& slot) {
      return std::memcmp(slot.data, expected_.data(), expected_.size()) == 0;
    });
  }

 private:
  Rig* const rig_;
  Relay relay_;
  std::vector<char> expected_;
  std::shared_ptr<std::promise<absl::Status>> ended_ =
      std::make_shared<std::promise<absl::Status>>();
  std::future<absl::Status> future_ = ended_->get_future();
};

using Buckets = std::vector<std::unique_ptr<Bucket>>;

void CheckNothingOpen(const Rig& rig) {
  const FakeCudaCounts counts = rig.cuda.Count();
  CHECK(counts.allocations == 0);
  CHECK(counts.streams == 0);
  CHECK(counts.events == 0);
  CHECK(rig.nccl.Count().comms == 0);
  CHECK(rig.nccl.Count().lost_windows == 0);
}

// ---- packing ----

TEST_CASE("random buckets in many pieces come to every slot, and nothing else does (P9)") {
  Random random(kSeed);
  for (int round = 0; round < 20; ++round) {
    INFO("seed " << kSeed << ", round " << round);
    const int devices = 2 + round % 3;
    Rig rig(devices, round % 2 == 0 ? 1000 : 1 << 20);
    Buckets buckets;
    for (int slot = 0; slot < kSlots; ++slot) {
      const auto source = static_cast<int>(Pick(&random, 0, devices - 1));
      std::vector<int> slots_on;
      for (int device = 0; device < devices; ++device) {
        if (device != source || Pick(&random, 0, 1) == 0) slots_on.push_back(device);
      }
      buckets.push_back(std::make_unique<Bucket>(&rig, source, slots_on, slot));
      buckets.back()->AddRandomly(&random);
      buckets.back()->Submit();
    }
    for (const auto& bucket : buckets) {
      const absl::Status status = bucket->Wait();
      INFO(status.ToString());
      REQUIRE(status.ok());
    }
    for (const auto& bucket : buckets) CHECK(bucket->Arrived());
    CHECK(rig.losses == 0);
    rig.Stop();
    CheckNothingOpen(rig);
  }
}

// Three runs with gaps between them.
std::unique_ptr<Bucket> ThreeRuns(Rig* rig, int slot) {
  auto bucket = std::make_unique<Bucket>(rig, 0, std::vector<int>{1}, slot);
  for (int i = 0; i < 3; ++i) bucket->Add(slot * 2000 + i * 500, i * 700, 400);
  return bucket;
}

TEST_CASE("a bucket is packed while the one before is broadcast, and no more than that one") {
  Rig rig(2, kSlotBytes);
  const auto first = ThreeRuns(&rig, 0);
  first->Submit();
  REQUIRE(first->Wait().ok());
  const int packed = rig.cuda.Count().engine_copies;
  const int broadcast = rig.nccl.Count().broadcasts;
  // The receiver's device is stopped, so it takes nothing.
  rig.cuda.Hold(1U << 1);
  Buckets buckets;
  for (int slot = 1; slot <= 4; ++slot) {
    buckets.push_back(ThreeRuns(&rig, slot));
    buckets.back()->Submit();
  }
  REQUIRE(Eventually([&] { return rig.nccl.Count().broadcasts == broadcast + 4; }));
  CHECK(Eventually([&] { return rig.cuda.Count().engine_copies == packed + 6; }));
  CHECK(rig.cuda.Count().engine_copies == packed + 6);
  rig.cuda.Hold(0);
  for (const auto& bucket : buckets) {
    REQUIRE(bucket->Wait().ok());
    CHECK(bucket->Arrived());
  }
  CHECK(rig.cuda.Count().engine_copies == packed + 12);
}

TEST_CASE("pieces that lie as in a slot are not packed") {
  Rig rig(2, 1000);
  Bucket whole(&rig, 0, {1}, 0);
  whole.Add(17, 0, kSlotBytes);
  whole.Submit();
  REQUIRE(whole.Wait().ok());
  CHECK(whole.Arrived());
  const int broadcast = rig.nccl.Count().broadcasts;
  CHECK(rig.cuda.Count().allocations == 0);
  CHECK(rig.cuda.Count().engine_copies == 0);

  Bucket mixed(&rig, 0, {1}, 1);
  mixed.Add(0, 0, 2500);
  mixed.Add(5000, 2600, 200);
  mixed.Add(6000, 2900, 100);
  mixed.Submit();
  REQUIRE(mixed.Wait().ok());
  CHECK(mixed.Arrived());
  CHECK(rig.nccl.Count().broadcasts == broadcast + 3);
  CHECK(rig.cuda.Count().allocations == 1);
  CHECK(rig.cuda.Count().engine_copies == 3);
}

TEST_CASE("while a bucket's calls fail, others on their way arrive or are said not to have (P1)") {
  int failed = 0;
  for (const char* call : {"cuMemcpyBatchAsync", "cuMemsetD8Async", "cuMemAlloc", "cuEventRecord",
                           "cuStreamWaitEvent", "cuCtxPushCurrent", "ncclBroadcast"}) {
    for (int nth = 1; nth <= 8; ++nth) {
      INFO(call << ", " << nth);
      Rig rig(2, kSlotBytes);
      auto first = std::make_unique<Bucket>(&rig, 0, std::vector<int>{1}, 0);
      first->Add(0, 0, 100);
      first->Submit();
      REQUIRE(first->Wait().ok());
      const int broadcast = rig.nccl.Count().broadcasts;
      rig.cuda.Hold(1U << 1);
      const auto fail_at = [&](int number) {
        if (std::string(call).substr(0, 2) == "cu") {
          rig.cuda.FailAt(call, number, 2);
        } else {
          rig.nccl.FailAt(call, number, 1);
        }
      };
      fail_at(nth);
      Buckets buckets;
      for (int slot = 1; slot <= 5; ++slot) {
        buckets.push_back(ThreeRuns(&rig, slot));
        buckets.back()->Submit();
      }
      // Another broadcast may be issued when the first of them has ended.
      REQUIRE(Eventually([&] {
        return rig.losses > 0 || rig.nccl.Count().aborts > 0 ||
               rig.nccl.Count().broadcasts >= broadcast + 4;
      }));
      rig.cuda.Hold(0);
      for (const auto& bucket : buckets) {
        if (bucket->Wait().ok()) {
          CHECK(bucket->Arrived());
        } else {
          ++failed;
        }
      }
      if (rig.losses > 0) continue;  // nobody could know its end
      fail_at(1 << 20);
      const auto last = ThreeRuns(&rig, 6);
      last->Submit();
      CHECK(last->Wait().ok());
      CHECK(last->Arrived());
      rig.Stop();
      CheckNothingOpen(rig);
    }
  }
  CHECK(failed > 20);
}

// ---- pools that go ----

TEST_CASE(
    "a window that NCCL does not let go of holds its pool, and who gives that back waits not") {
  Rig rig(3, kSlotBytes);
  const auto buckets = [&rig] {
    Bucket bucket(&rig, 0, {1, 2}, 0, BroadcastMethod::kSymmetric);
    bucket.Add(0, 0, kSlotBytes);
    bucket.Submit();
    REQUIRE(bucket.Wait().ok());
    CHECK(bucket.Arrived());
  };
  buckets();
  REQUIRE(rig.nccl.Count().windows == 2);
  rig.sources.clear();
  const int pools = rig.cuda.Count().created;
  rig.nccl.Block("ncclCommWindowDeregister");
  std::atomic<bool> given_back = false;
  std::thread giver([&] {
    for (DevicePool& pool : rig.pools) rig.memory->GiveBack(std::move(pool));
    given_back = true;
  });
  CHECK(Eventually([&] { return given_back.load(); }));
  REQUIRE(Eventually([&] { return rig.nccl.Count().blocked_calls == 1; }));
  CHECK(rig.cuda.Count().created == pools - 1);  // the source's: no window is over that
  rig.nccl.Block("");
  giver.join();
  CHECK(Eventually([&] { return rig.cuda.Count().created == 0; }));
  CHECK(rig.nccl.Count().windows == 0);
  CHECK(rig.losses == 0);
  rig.Stop();
  CHECK(rig.nccl.Count().lost_windows == 0);
}

TEST_CASE("a broadcast does not wait for smaller scratch that is given back") {
  Rig rig(2, kSlotBytes);
  // A bucket in smaller slots is packed in smaller halves.
  Bucket small(&rig, 0, {1}, 0);
  small.SlotBytes(kSlotBytes / 4);
  small.Add(100, 0, 10);
  small.Add(200, 20, 10);
  small.Submit();
  REQUIRE(small.Wait().ok());
  CHECK(small.Arrived());
  CHECK(rig.cuda.Count().allocations == 1);
  // The call hangs as it would behind another group's collective.
  rig.cuda.Block("cuMemFree");
  const auto next = ThreeRuns(&rig, 1);
  next->Submit();
  CHECK(next->Wait().ok());
  CHECK(next->Arrived());
  CHECK(Eventually([&] { return rig.cuda.Count().blocked_calls == 1; }));
  rig.cuda.Block("");
  rig.Stop();
  CheckNothingOpen(rig);
  CHECK(rig.losses == 0);
}

TEST_CASE("who gives a pool back does not wait for broadcasts of others") {
  // A call may take longer than this test has patience.
  Rig rig(3, kSlotBytes, 8 * kTestDeadline);
  const auto first = ThreeRuns(&rig, 0);
  first->Submit();
  REQUIRE(first->Wait().ok());
  rig.nccl.Block("ncclBroadcast");
  const auto second = ThreeRuns(&rig, 1);
  second->Submit();
  REQUIRE(Eventually([&] { return rig.nccl.Count().blocked_calls == 1; }));
  std::atomic<bool> given_back = false;
  std::thread giver([&] {
    rig.memory->GiveBack(std::move(rig.pools[2]));
    given_back = true;
  });
  CHECK(Eventually([&] { return given_back.load(); }));
  rig.nccl.Block("");
  giver.join();
  CHECK(second->Wait().ok());
  CHECK(second->Arrived());
}

#endif

}  // namespace
}  // namespace refitd
