#include "transport/host/two_sided.h"

#include <sys/mman.h>

#include <catch2/catch.hpp>
#include <csignal>
#include <cstring>
#include <string>
#include <utility>

#include "tests/aborts.h"
#include "transport/host/memory.h"

namespace refitd {
namespace {

std::unique_ptr<TwoSided> Make(int64_t bytes) {
  auto made = MakeHostTwoSided(bytes);
  REQUIRE(made.ok());
  return *std::move(made);
}

std::shared_ptr<HostRegion> MapSide(const TwoSided& memory, bool back) {
  auto fd = memory.Share(back);
  REQUIRE(fd.ok());
  auto region = HostRegion::Map(*fd, memory.bytes(), Access::kReadWrite, false);
  REQUIRE(region.ok());
  return *std::move(region);
}

TEST_CASE("a flip shows at the same address what was written to the other side") {
  // Pages, a page table and more than that.
  const int64_t bytes = GENERATE(1, 4096, 10'000, int64_t{2} << 20, (int64_t{5} << 20) + 4096);
  const auto memory = Make(bytes);
  char* const data = memory->data();
  const auto first = MapSide(*memory, false);
  const auto second = MapSide(*memory, true);
  std::memset(first->data(), 1, static_cast<size_t>(bytes));
  for (int round = 2; round < 9; ++round) {
    const auto& back = round % 2 == 0 ? second : first;
    std::memset(back->data(), round, static_cast<size_t>(bytes));
    CHECK(data[0] == round - 1);
    REQUIRE(memory->Flip().ok());
    CHECK(memory->data() == data);
    CHECK(data[0] == round);
    CHECK(data[bytes - 1] == round);
  }
}

TEST_CASE("the other side is read at an address of its own before and after flips") {
  const auto memory = Make(10'000);
  const auto first = MapSide(*memory, false);
  const auto second = MapSide(*memory, true);
  for (int round = 1; round < 6; ++round) {
    const auto& back = round % 2 == 1 ? second : first;
    std::memset(back->data(), round, 10'000);
    const auto mapped = memory->MapBack();
    REQUIRE(mapped.ok());
    CHECK(*mapped != memory->data());
    CHECK((*mapped)[9'999] == round);
    CHECK(absl::IsFailedPrecondition(memory->MapBack().status()));
    memory->UnmapBack();
    REQUIRE(memory->Flip().ok());
  }
  memory->UnmapBack();  // nothing is mapped
}

TEST_CASE("what the process writes goes to the side that is mapped") {
  const auto memory = Make(8192);
  const auto first = MapSide(*memory, false);
  const auto second = MapSide(*memory, true);
  memory->data()[5000] = 'a';
  CHECK(first->data()[5000] == 'a');
  REQUIRE(memory->Flip().ok());
  memory->data()[5000] = 'b';
  CHECK(first->data()[5000] == 'a');
  CHECK(second->data()[5000] == 'b');
  // The side that is shared as the front is the mapped one.
  CHECK(MapSide(*memory, false)->data()[5000] == 'b');
  CHECK(MapSide(*memory, true)->data()[5000] == 'a');
}

TEST_CASE("the back can be made equal to the front") {
  const auto memory = Make(100'000);
  for (int64_t i = 0; i < memory->bytes(); ++i) memory->data()[i] = static_cast<char>(i * 7);
  REQUIRE(memory->CopyToBack().ok());
  const std::string before(memory->data(), static_cast<size_t>(memory->bytes()));
  REQUIRE(memory->Flip().ok());
  CHECK(before == std::string(memory->data(), static_cast<size_t>(memory->bytes())));
}

std::unique_ptr<TwoSided> Open(const TwoSided& memory) {
  auto opened = OpenHostTwoSided({*memory.Share(false), *memory.Share(true), memory.bytes()});
  REQUIRE(opened.ok());
  return *std::move(opened);
}

TEST_CASE("memory that another process made is opened as it is, and flips for itself") {
  std::unique_ptr<TwoSided> made = Make(8192);
  made->data()[5000] = 'a';
  REQUIRE(made->Flip().ok());
  made->data()[5000] = 'b';
  const auto opened = Open(*made);
  made.reset();
  CHECK(opened->bytes() == 8192);
  CHECK(opened->data()[5000] == 'b');
  REQUIRE(opened->AllowWrites().ok());
  opened->data()[5001] = 'c';
  REQUIRE(opened->Flip().ok());
  CHECK(opened->data()[5000] == 'a');
  opened->data()[5001] = 'd';
  REQUIRE(opened->Flip().ok());
  CHECK(opened->data()[5001] == 'c');
}

TEST_CASE("memory that was opened can't be written before that is allowed; its back can") {
  const auto made = Make(8192);
  made->data()[0] = 'a';
  const auto opened = Open(*made);
  CHECK(EndsBy(SIGSEGV, [&] { opened->data()[0] = 'x'; }));
  REQUIRE(opened->CopyToBack().ok());
  CHECK(MapSide(*made, true)->data()[0] == 'a');
  CHECK_FALSE(EndsBy(SIGSEGV, [&] {
    (void)opened->AllowWrites();
    opened->data()[0] = 'x';
  }));
}

TEST_CASE("sides that are no sealed memory of that size are not opened") {
  const auto made = Make(4096);
  const auto refused = [](UniqueFd front, UniqueFd back, int64_t bytes) {
    return absl::IsInvalidArgument(
        OpenHostTwoSided({std::move(front), std::move(back), bytes}).status());
  };
  CHECK(refused(*made->Share(false), *made->Share(true), 4097));
  CHECK(refused(*made->Share(false), *made->Share(true), 0));
  const auto unsealed = [] { return UniqueFd(memfd_create("test", MFD_CLOEXEC)); };
  CHECK(refused(unsealed(), *made->Share(true), 4096));
  CHECK(refused(*made->Share(false), unsealed(), 4096));
}

TEST_CASE("two-sided memory of no bytes, or of too many, is refused") {
  CHECK_FALSE(MakeHostTwoSided(0).ok());
  CHECK_FALSE(MakeHostTwoSided(-1).ok());
  CHECK_FALSE(MakeHostTwoSided(kMaxRegionBytes + 1).ok());
}

}  // namespace
}  // namespace refitd
