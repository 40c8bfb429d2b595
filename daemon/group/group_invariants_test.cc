// Plants errors in a group's state: CheckInvariants must find each.
#include <catch2/catch.hpp>
#include <functional>

#include "daemon/group/group_impl.h"
#include "daemon/group/group_test_util.h"
#include "tests/aborts.h"

namespace refitd {

struct GroupForTests {
  using Impl = Group::Impl;
  static Impl& Of(Group& group) { return *group.impl_; }
  static auto& Members(Impl& impl) { return impl.members.members_; }
  static auto& Trainers(Impl& impl) { return impl.members.trainers_; }
  static auto& Instances(Impl& impl) { return impl.members.instances_; }
  static auto& Reads(Impl& impl) { return impl.slots.reads_; }
  static auto& Ledger(Impl& impl) { return impl.slots.ledger_; }
  static auto& InFlight(Impl& impl) { return impl.update->push.in_flight_; }
  static auto& NextStart(Impl& impl) { return impl.update->push.next_start_; }
  static auto& Incomplete(Impl& impl) { return impl.update->coverage.incomplete_; }
  static auto& State(Impl& impl) { return impl.updates.state_; }
  static auto& Waiting(Impl& impl) { return impl.requests.waiting_; }
};

namespace {

using Impl = GroupForTests::Impl;

const std::vector<TensorSpec> kModel = {Bytes("a", 1000), Bytes("b", 500)};

// Whether the check finds the error that `plant` makes in a copy of the process.
bool Found(TestGroup& g, const std::function<void(Impl&)>& plant) {
  g.group.CheckInvariants();
  return Aborts([&] {
    plant(GroupForTests::Of(g.group));
    g.group.CheckInvariants();
  });
}

// A trainer, and an engine in an update that is open for data.
struct Updating : TestGroup {
  explicit Updating(bool staged) {
    trainer = AttachTrainer();
    engine = staged ? LoaderRank("i", kModel) : InPlaceRank("i", kModel);
    Open(trainer, 1);
  }
  MemberId trainer;
  MemberId engine;
};

TEST_CASE("the planted errors' test finds nothing where nothing was planted") {
  Updating g(/*staged=*/false);
  CHECK_FALSE(Found(g, [](Impl&) {}));
}

TEST_CASE("CheckInvariants finds members, ranks and instances that do not agree") {
  Updating g(/*staged=*/false);
  CHECK(Found(g, [](Impl& i) { GroupForTests::Instances(i).at("i").ranks.clear(); }));
  CHECK(Found(g, [](Impl& i) { GroupForTests::Instances(i).clear(); }));
  CHECK(Found(g, [](Impl& i) { GroupForTests::Trainers(i).clear(); }));
  CHECK(Found(g, [&](Impl& i) { GroupForTests::Members(i).erase(g.engine); }));
  CHECK(Found(
      g, [&](Impl& i) { GroupForTests::Members(i).at(g.engine).state = MemberState::kLeaving; }));
  CHECK(Found(g, [&](Impl& i) { GroupForTests::Members(i).at(g.engine).layout = nullptr; }));
}

TEST_CASE("CheckInvariants finds a written instance that is not dirty (P2)") {
  Updating g(/*staged=*/false);
  g.Push(g.trainer, 1, 0, kModel);
  CHECK(Found(
      g, [](Impl& i) { GroupForTests::Instances(i).at("i").state = InstanceState::kCleanReady; }));
}

TEST_CASE("CheckInvariants finds an update that its group does not know of (P3)") {
  Updating g(/*staged=*/false);
  CHECK(Found(g, [](Impl& i) { GroupForTests::State(i) = GroupState::kIdle; }));
  CHECK(Found(g, [](Impl& i) { i.versions.Commit(Version(1)); }));
}

TEST_CASE("CheckInvariants finds an update that settles before its trainers committed (P1)") {
  Updating g(/*staged=*/false);
  CHECK(Found(g, [](Impl& i) { i.update->state = UpdateState::kSettling; }));
}

TEST_CASE("CheckInvariants finds a reader that the ledger of slots does not know (P6)") {
  Updating g(/*staged=*/true);
  g.Push(g.trainer, 1, 0, kModel);
  g.FinishAll();
  REQUIRE(g.handed.size() == 1);
  CHECK(
      Found(g, [&](Impl& i) { GroupForTests::Ledger(i).ReaderDone(g.handed[0].slot, g.engine); }));
  CHECK(Found(g, [&](Impl& i) { GroupForTests::Reads(i).clear(); }));
}

TEST_CASE("CheckInvariants finds calls that no request waits with, and counts that are off") {
  Updating g(/*staged=*/false);
  g.Push(g.trainer, 1, 0, kModel);
  CHECK(Found(g,
              [](Impl& i) { GroupForTests::Waiting(i).erase(GroupForTests::Waiting(i).begin()); }));
  CHECK(Found(g, [](Impl& i) {
    GroupForTests::Waiting(i)[CallId(9999)] = std::make_shared<group::Request>();
  }));
  CHECK(Found(g, [](Impl& i) { ++GroupForTests::Incomplete(i); }));
  CHECK(Found(g, [](Impl& i) { GroupForTests::InFlight(i) = 0; }));
  CHECK(Found(g, [](Impl& i) { ++GroupForTests::NextStart(i); }));
}

}  // namespace
}  // namespace refitd
