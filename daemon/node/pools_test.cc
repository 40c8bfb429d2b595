#include "daemon/node/pools.h"

#include <fcntl.h>
#include <sys/mman.h>

#include <catch2/catch.hpp>
#include <cstring>
#include <memory>
#include <utility>
#include <vector>

namespace refitd {
namespace {

constexpr int64_t kSlotBytes = 4096;

// Host memory in place of a GPU's.
Pools::Device OnGpu(std::shared_ptr<std::vector<char>> memory) {
  Pools::Device device;
  device.memory = {memory->data(), static_cast<int64_t>(memory->size()), memory};
  return device;
}
std::shared_ptr<std::vector<char>> Bytes(int64_t bytes) {
  return std::make_shared<std::vector<char>>(static_cast<size_t>(bytes));
}

TEST_CASE("slots in host memory are made once, shared by descriptor, and given up as a whole") {
  Pools pools;
  CHECK(pools.WireSlot(SlotIndex(0), kSlotBytes).status().code() == absl::StatusCode::kInternal);
  CHECK(pools.EnsureHost("g", 0).code() == absl::StatusCode::kUnavailable);
  REQUIRE(pools.EnsureHost("g", 2 * kSlotBytes).ok());
  pools.CheckInvariants();
  CHECK(pools.bytes() == 2 * kSlotBytes);
  const char* const first = pools.WireSlot(SlotIndex(0), kSlotBytes)->data;
  REQUIRE(pools.EnsureHost("g", 2 * kSlotBytes).ok());
  CHECK(pools.WireSlot(SlotIndex(0), kSlotBytes)->data == first);
  CHECK(pools.WireSlot(SlotIndex(1), kSlotBytes)->data == first + kSlotBytes);

  const absl::StatusOr<PoolHandle> shared = pools.Share(std::nullopt, /*read_only=*/false);
  REQUIRE(shared.ok());
  CHECK(shared->bytes == 2 * kSlotBytes);
  void* const mapped =
      mmap(nullptr, 2 * kSlotBytes, PROT_READ | PROT_WRITE, MAP_SHARED, shared->fd.get(), 0);
  REQUIRE(mapped != MAP_FAILED);
  std::memset(pools.WireSlot(SlotIndex(1), kSlotBytes)->data, 'x', 4);
  CHECK(std::memcmp(static_cast<char*>(mapped) + kSlotBytes, "xxxx", 4) == 0);
  munmap(mapped, 2 * kSlotBytes);

  const Pools::Host taken = pools.TakeHost();
  CHECK(taken.memory != nullptr);
  CHECK_FALSE(pools.has_host());
  CHECK(pools.bytes() == 0);
  pools.CheckInvariants();
}

TEST_CASE("an engine's descriptor of the slots can't be mapped for writing") {
  Pools pools;
  REQUIRE(pools.EnsureHost("g", kSlotBytes).ok());
  const absl::StatusOr<PoolHandle> shared = pools.Share(std::nullopt, /*read_only=*/true);
  REQUIRE(shared.ok());
  CHECK(mmap(nullptr, kSlotBytes, PROT_READ | PROT_WRITE, MAP_SHARED, shared->fd.get(), 0) ==
        MAP_FAILED);
  void* const mapped = mmap(nullptr, kSlotBytes, PROT_READ, MAP_SHARED, shared->fd.get(), 0);
  CHECK(mapped != MAP_FAILED);
  munmap(mapped, kSlotBytes);
}

TEST_CASE("slots lie at the same offsets on every GPU, and what crosses daemons in one place") {
  Pools pools;
  const auto first = Bytes(2 * kSlotBytes);
  const auto second = Bytes(2 * kSlotBytes);
  pools.Put(0, OnGpu(first));
  pools.Put(3, OnGpu(second));
  pools.CheckInvariants();
  CHECK(pools.bytes() == 4 * kSlotBytes);
  CHECK(pools.Slot(0, SlotIndex(1), kSlotBytes)->data == first->data() + kSlotBytes);
  CHECK(pools.Slot(0, SlotIndex(1), kSlotBytes)->bytes == kSlotBytes);
  CHECK(pools.Slot(3, SlotIndex(1), kSlotBytes)->data == second->data() + kSlotBytes);
  CHECK(pools.Slot(1, SlotIndex(0), kSlotBytes).status().code() == absl::StatusCode::kInternal);

  pools.SetWire(3);
  CHECK(pools.wire() == 3);
  CHECK(pools.WireSlot(SlotIndex(0), kSlotBytes)->data == second->data());
  CHECK(pools.Slot(std::nullopt, SlotIndex(0), kSlotBytes)->data == second->data());
  pools.Drop(0);
  CHECK_FALSE(pools.Has(0));
  CHECK(first.use_count() == 1);
  pools.ClearWire();
  pools.Drop(3);
  CHECK(second.use_count() == 1);
  pools.CheckInvariants();
}

TEST_CASE("whoever still uses a slot on a GPU holds its memory") {
  Pools pools;
  const auto memory = Bytes(kSlotBytes);
  pools.Put(0, OnGpu(memory));
  absl::StatusOr<MemorySpan> used = pools.Slot(0, SlotIndex(0), kSlotBytes);
  REQUIRE(used.ok());
  pools.Drop(0);
  CHECK(memory.use_count() == 2);
  used = absl::CancelledError("done");
  CHECK(memory.use_count() == 1);
}

}  // namespace
}  // namespace refitd
