#include "daemon/group/worker_index.h"

#include <catch2/catch.hpp>
#include <variant>

namespace refitd::worker {
namespace {

const MemberId kMember(3);

struct Cache {
  std::shared_ptr<const DestinationIndex> Prepare(uint64_t digest) {
    PeerPrepare command;
    command.update = UpdateId(1);
    command.destinations = {kMember};
    command.layout_digests = {digest};
    const auto index = cache.Prepare(command, {nullptr, &reports});
    cache.CheckInvariants();
    return index;
  }
  std::shared_ptr<const Layout> layout = std::make_shared<const Layout>();
  std::vector<PeerReport> reports;
  IndexCache cache{[this](MemberId) { return layout; }, [](MemberId) -> uint64_t { return 7; }};
};

TEST_CASE("an index is made once while the layouts stay the same") {
  Cache c;
  const auto index = c.Prepare(7);
  CHECK(c.Prepare(7) == index);
  CHECK(c.cache.made() == 1);
  c.layout = std::make_shared<const Layout>();
  CHECK(c.Prepare(7) != index);
  CHECK(c.cache.made() == 2);
  CHECK(c.reports.empty());
}

TEST_CASE("a destination whose layout the coordinator does not know takes no part") {
  Cache c;
  c.Prepare(8);
  REQUIRE(c.reports.size() == 1);
  CHECK(std::get<EngineFailed>(c.reports[0]).member == kMember);
}

TEST_CASE("the layout of a member that was lost counts for one more update") {
  Cache c;
  const auto lost = c.layout;
  c.cache.MemberLost(kMember, lost);
  c.layout = nullptr;
  CHECK(c.Prepare(lost->Digest())->destinations()[0] == lost);
  CHECK(c.reports.empty());
  CHECK(c.Prepare(0)->destinations()[0] == nullptr);
}

}  // namespace
}  // namespace refitd::worker
