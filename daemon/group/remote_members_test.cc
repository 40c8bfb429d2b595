#include "daemon/group/remote_members.h"

#include <catch2/catch.hpp>

namespace refitd::coordinator {
namespace {

const NodeId kB(1);
const MemberId kOurs(100);
const MemberId kTheirs(5);

struct Members {
  Members() {
    nodes.Join({kB, "b", "host:1"}, TimePoint());
    members.Attach(kOurs, {kB, kTheirs, true, true});
    members.AddCall(CallId(200), {kB, CallId(9)});
    members.CheckInvariants(nodes);
  }
  JoinedNodes nodes{"a", std::chrono::seconds(1)};
  RemoteMembers members;
};

TEST_CASE("a member has one number on its node and another in the group") {
  const Members m;
  CHECK(m.members.OursOf(kB, kTheirs) == kOurs);
  CHECK(m.members.IdOnNode(kOurs) == kTheirs);
  CHECK(m.members.NodeOf(kOurs) == kB);
  CHECK(m.members.NodeOf(MemberId(5)) == kCoordinatorNode);  // the coordinator's own member 5
  CHECK(m.members.IdOnNode(MemberId(5)) == MemberId(5));
}

TEST_CASE("a member of a lost node stays known until the group releases it") {
  Members m;
  m.nodes.Leave(kB);
  CHECK(m.members.DetachAll(kB) == std::vector{kOurs});
  m.members.CheckInvariants(m.nodes);
  CHECK_FALSE(m.members.OursOf(kB, kTheirs).has_value());
  CHECK(m.members.Find(kOurs) != nullptr);
  CHECK(m.members.Release(kOurs)->id == kTheirs);
  CHECK(m.members.size() == 0);
}

TEST_CASE("a refused member is attached to its node no more") {
  Members m;
  CHECK(m.members.Release(kOurs).has_value());
  CHECK(m.members.CountOn(kB) == 0);
}

TEST_CASE("a call is answered once") {
  Members m;
  CHECK(m.members.CallOf(kB, CallId(9)) == CallId(200));
  CHECK(m.members.TakeCall(CallId(200))->id == CallId(9));
  CHECK_FALSE(m.members.TakeCall(CallId(200)).has_value());
  CHECK(m.members.CallsOf(kB).empty());
}

TEST_CASE("a node with an engine rank that takes part in no catch-up is not reached by catch-ups") {
  Members m;
  CHECK(m.members.CatchUpsReach(kB));
  CHECK_FALSE(m.members.CatchUpsReach(kCoordinatorNode));
  m.members.Attach(MemberId(101), {kB, MemberId(6), true, false});
  CHECK_FALSE(m.members.CatchUpsReach(kB));
}

TEST_CASE("equal layouts of engines share one object") {
  MemberLayouts layouts;
  const auto one = std::make_shared<const Layout>();
  const auto two = std::make_shared<const Layout>();
  CHECK(layouts.Share(one, 7) == one);
  CHECK(layouts.Share(two, 7) == one);
  CHECK(layouts.compared() == 1);
  CHECK(layouts.SharedWith(7) == one);
  CHECK(layouts.SharedWith(8) == nullptr);
  layouts.Set(kOurs, one, 7);
  layouts.CheckInvariants([](MemberId member) { return member == kOurs; });
  CHECK(layouts.DigestOf(kOurs) == 7);
  layouts.Erase(kOurs);
  CHECK(layouts.Find(kOurs) == nullptr);
}

}  // namespace
}  // namespace refitd::coordinator
