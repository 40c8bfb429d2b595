#include "daemon/group/membership.h"

#include <catch2/catch.hpp>

#include "daemon/group/versions.h"

namespace refitd::group {
namespace {

constexpr uint64_t kIncarnation = 11;

// A group for one trainer rank, whose engines register layouts.
struct Attached {
  Attached() { out.Open(TimePoint(std::chrono::seconds(10)), &actions); }

  bool Trainer(const std::string& identity, uint64_t id = 1) {
    TrainerAttached e{MemberId(id), {}};
    e.identity.identity = identity;
    if (!members.CheckTrainer(e.identity).ok()) return false;
    members.EnterTrainer(MemberOf(e), false);
    return true;
  }
  // One rank of an instance of `world_size`, which holds the version of an earlier incarnation.
  void Engine(const std::string& instance, uint64_t id, int rank = 0, int world_size = 1,
              int64_t version = -1, NodeId node = NodeId()) {
    EngineAttached e{MemberId(id), {}};
    e.identity.instance = instance;
    e.identity.rank = rank;
    e.identity.world_size = world_size;
    e.identity.node = node;
    if (version >= 0) {
      e.identity.held_version = Version(version);
      e.identity.held_origin = kIncarnation - 1;
    }
    CHECK(members.CheckEngine(e.identity, versions.CheckHeld(e.identity)).ok());
    Member member = MemberOf(e);
    versions.Bring(e.identity, &member);
    members.EnterEngine(std::move(member), e.identity, false);
    LayoutRegistered layout{MemberId(id), std::make_shared<Layout>()};
    members.Register(members.Find(MemberId(id)), layout);
    Check();
  }
  void Lose(uint64_t id) {
    members.Lose(members.Find(MemberId(id)));
    members.ReleaseIfQuiet(MemberId(id));
  }
  void Check() const {
    members.CheckInvariants();
    versions.CheckInvariants();
  }
  InstanceState State(const std::string& instance) { return members.FindInstance(instance)->state; }
  Standing StandingOf(const std::string& instance) {
    for (const InstanceStanding& standing : versions.TakeStandings()) {
      standings[standing.instance] = standing.standing;
    }
    return standings[instance];
  }

  GroupActions actions;
  Outbox out;
  Requests requests{&out};
  Membership members{"g", GroupSpec(), nullptr, &out, &requests};
  Versions versions{"g", kIncarnation, &members, &out};
  std::map<std::string, Standing> standings;
};

TEST_CASE("an instance is available when all its ranks are here, until one is lost") {
  Attached a;
  a.Engine("i", 1, 0, 2);
  CHECK(a.State("i") == InstanceState::kForming);
  const uint64_t before = a.members.changes();
  a.Engine("i", 2, 1, 2);
  CHECK(a.State("i") == InstanceState::kClean);
  CHECK(a.members.changes() > before);
  CHECK(a.members.AvailableInstances() == 1);
  a.Lose(2);
  CHECK(a.State("i") == InstanceState::kForming);
  CHECK(a.members.AvailableInstances() == 0);
  a.Lose(1);
  CHECK(a.members.FindInstance("i") == nullptr);
  a.Check();
}

TEST_CASE("a member that was lost is released when no copy touches its memory any more (P6)") {
  Attached a;
  a.Engine("i", 1);
  a.members.Touch(MemberId(1), 1);
  a.Lose(1);
  a.Check();
  CHECK(a.members.Find(MemberId(1)) != nullptr);
  a.members.Touch(MemberId(1), -1);
  CHECK(a.members.Find(MemberId(1)) == nullptr);
  CHECK(std::get<ReleaseMember>(a.actions.back()).member == MemberId(1));
}

TEST_CASE("where no engine ever attached, the one that is missing is a suspect without a name") {
  Attached a;
  const auto suspects = [&a] {
    Failure failure;
    a.members.SuspectMissing([](int) { return true; }, &failure);
    return failure.suspects;
  };
  REQUIRE(suspects().size() == 1);
  CHECK(suspects()[0] == Suspect{SuspectRole::kEngine, "", "", std::nullopt, 0});
  a.Engine("i", 1, 0, 2);  // its other rank is missing now
  REQUIRE(suspects().size() == 1);
  CHECK(suspects()[0] == Suspect{SuspectRole::kEngine, "", "i", 1, 0});
  a.Engine("i", 2, 1, 2);
  CHECK(suspects().empty());
}

TEST_CASE("a node that is kept out is let in again when its last member left") {
  Attached a;
  a.Engine("i", 1, 0, 1, -1, NodeId(3));
  a.members.KeepOut(NodeId(3), "its data plane is down");
  CHECK(a.members.WhyKeptOut(NodeId(3)) == "its data plane is down");
  CHECK(a.members.AvailableInstances() == 0);
  a.Lose(1);
  CHECK(a.members.WhyKeptOut(NodeId(3)).empty());
}

TEST_CASE("no trainer enters a group that another identity owns (P9)") {
  Attached a;
  CHECK(a.Trainer("user:1"));
  CHECK(a.members.owner() == "user:1");
  a.Lose(1);
  CHECK_FALSE(a.Trainer("user:2"));
  CHECK(a.Trainer("user:1"));
}

TEST_CASE("versions grow within an incarnation (P3), and instances without one are empty") {
  Attached a;
  a.Engine("i", 1);
  CHECK(a.versions.CheckGreater(Version(1)).ok());
  a.versions.Commit(Version(4));
  CHECK(a.versions.CheckGreater(Version(4)).code() == absl::StatusCode::kFailedPrecondition);
  CHECK_FALSE(a.versions.IsCurrent(*a.members.FindInstance("i")));
  a.versions.Install(a.members.Find(MemberId(1)), 0);
  CHECK(a.versions.IsCurrent(*a.members.FindInstance("i")));
  a.versions.Replace(kIncarnation + 1);
  a.members.Replace("");
  CHECK(a.versions.CheckGreater(Version(1)).ok());
  CHECK(a.State("i") == InstanceState::kDirty);
  a.Check();
}

TEST_CASE("of the versions that instances bring, the one that most of them hold is ready") {
  Attached a;
  a.Engine("i", 1, 0, 1, 5);
  a.Engine("j", 2, 0, 1, 7);
  a.Engine("k", 3, 0, 1, 5);
  a.Engine("l", 4);
  CHECK(a.StandingOf("i") == Standing::kClean);
  CHECK(a.StandingOf("j") == Standing::kStray);
  CHECK(a.StandingOf("l") == Standing::kEmpty);
}

}  // namespace
}  // namespace refitd::group
