// Mappings of members' host memory.
#include <catch2/catch.hpp>
#include <cstring>
#include <memory>
#include <optional>
#include <string>
#include <vector>

#include "daemon/node/member_memory.h"
#include "transport/base/status.h"

namespace refitd {
namespace {

constexpr int64_t kPage = 4096;

struct World {
  static DaemonOptions OptionsOf() {
    DaemonOptions options;
    options.machine_bytes = 8 * kPage;
    options.max_mapped_bytes = 16 * kPage;
    options.per_identity.mapped_bytes = 8 * kPage;
    return options;
  }

  static UniqueFd Memfd(int64_t bytes) { return CreateSealedMemfd("test", bytes).value(); }
  absl::StatusOr<MemorySpan> Map(const UniqueFd& fd, int64_t bytes,
                                 const std::string& identity = "uid:1",
                                 Access access = Access::kReadOnly) {
    return memory.Map(fd, *MemberMemory::OriginOf(fd), bytes, access, identity);
  }

  const std::unique_ptr<ProcessWatch> processes = *ProcessWatch::Create();
  DaemonState state{OptionsOf(), {}, processes.get(), {[](auto&, auto&, auto&) {}, [] {}}};
  MemberMemory memory{&state};
};

TEST_CASE_METHOD(World, "Sparse regions filled the daemon's address space") {
  const UniqueFd huge = Memfd(int64_t{1} << 44);
  const absl::Status one = Map(huge, int64_t{1} << 44).status();
  CHECK(absl::IsResourceExhausted(one));
  CHECK(Message(one) == "bytes: 17592186044416 is more than this machine's memory, 32768");
  std::vector<MemorySpan> held;
  const UniqueFd first = Memfd(8 * kPage);
  held.push_back(*Map(first, 8 * kPage));
  const UniqueFd second = Memfd(kPage);
  CHECK(absl::IsResourceExhausted(Map(second, kPage).status()));  // of this identity
  const UniqueFd third = Memfd(8 * kPage);
  held.push_back(*Map(third, 8 * kPage, "uid:2"));
  CHECK(absl::IsResourceExhausted(Map(second, kPage, "uid:3").status()));  // of all
  held.clear();
  CHECK(state.mapped.held() == 0);
  CHECK(Map(second, kPage).ok());
}

TEST_CASE_METHOD(World, "A memfd is mapped and counted once, however many regions it is") {
  const UniqueFd fd = Memfd(4 * kPage);
  std::optional<MemorySpan> all = *Map(fd, 4 * kPage);
  const MemorySpan again = *Map(fd, 4 * kPage, "uid:2");
  const MemorySpan part = *Map(fd, kPage);
  CHECK(again.data == all->data);
  CHECK(part.data == all->data);
  CHECK(part.bytes == kPage);
  CHECK(state.mapped.held() == 4 * kPage);
  // Reading and writing are mapped apart.
  const MemorySpan written = *Map(fd, 4 * kPage, "uid:1", Access::kReadWrite);
  CHECK(state.mapped.held() == 8 * kPage);
  std::strcpy(written.data, "weights");
  all.reset();
  CHECK(std::string(again.data) == "weights");
}

TEST_CASE_METHOD(World, "A region larger than the mapping of its memfd is mapped anew") {
  const UniqueFd fd = Memfd(4 * kPage);
  const MemorySpan part = *Map(fd, kPage);
  const MemorySpan all = *Map(fd, 4 * kPage);
  CHECK(state.mapped.held() == 5 * kPage);
  CHECK(Map(fd, 2 * kPage)->data == all.data);
}

TEST_CASE_METHOD(World, "What can't be mapped is not counted, and ended mappings leave nothing") {
  CHECK_FALSE(Map(Memfd(kPage), 2 * kPage).ok());
  CHECK(state.mapped.held() == 0);
  for (int i = 0; i < 1000; ++i) CHECK(Map(Memfd(kPage), kPage).ok());
  CHECK(state.mapped.held() == 0);
}

}  // namespace
}  // namespace refitd
