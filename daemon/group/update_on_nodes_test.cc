// An update over nodes b and c, and its machines, without a Group. The coordinator's own node has
// the trainer; b and c have a rank each that the update writes.
#include "daemon/group/update_on_nodes.h"

#include <catch2/catch.hpp>
#include <memory>
#include <utility>

#include "daemon/group/left_out.h"
#include "transport/base/status.h"

namespace refitd::coordinator {
namespace {

const NodeId kSelf = kCoordinatorNode;
const NodeId kB(1);
const NodeId kC(2);
const UpdateId kUpdate(5);
const PartSeq kPart(0);
const MemberId kTrainer(10);
const MemberId kRankOfB(20);
const MemberId kRankOfC(30);

template <typename What>
std::vector<const What*> Find(const Steps& steps) {
  std::vector<const What*> found;
  for (const Step& step : steps) {
    if constexpr (kIsOneOf<What, Step>) {
      if (const auto* what = std::get_if<What>(&step)) found.push_back(what);
    } else if constexpr (kIsOneOf<What, GroupEvent>) {
      const auto* event = std::get_if<GroupEvent>(&step);
      const auto* what = event == nullptr ? nullptr : std::get_if<What>(event);
      if (what != nullptr) found.push_back(what);
    } else {
      const auto* sent = std::get_if<SendCommand>(&step);
      const auto* what = sent == nullptr ? nullptr : std::get_if<What>(&sent->command);
      if (what != nullptr) found.push_back(what);
    }
  }
  return found;
}

std::shared_ptr<const RefitPlan> Plan() {
  auto plan = std::make_shared<RefitPlan>();
  plan->routes.nodes = 3;
  plan->routes.wire_bytes = 64;
  plan->routes.links.node_sends = {64, 0, 0};
  plan->routes.links.node_forwards = {0, 0, 0};
  plan->routes.links.node_receives = {0, 32, 32};
  plan->routes.links.matrix = {0, 24, 40, 0, 0, 0, 0, 0, 0};
  return plan;
}

class OverNodes {
 public:
  explicit OverNodes(bool with_program = false) {
    nodes.Join({kB, "b", "host:1"}, now);
    nodes.Join({kC, "c", "host:2"}, now);
    members.Attach(kRankOfB, {kB, MemberId(1), true, true});
    members.Attach(kRankOfC, {kC, MemberId(1), true, true});
    Connect();
    update.emplace(Record(kUpdate, with_program), GroupSpec(), Around());
    update->Announce(Around());
    Check();
  }
  std::shared_ptr<UpdateRecord> Record(UpdateId id, bool with_program) const {
    auto record = std::make_shared<UpdateRecord>(id, Version(3));
    record->deadline = now + std::chrono::seconds(60);
    record->nodes = {kSelf, kB, kC};
    record->destinations.Add(kB, kRankOfB);
    record->destinations.Add(kC, kRankOfC);
    if (with_program) {
      record->use = ProgramUse{ProgramId(9), Plan(), {kSelf, kB, kC}, {kTrainer}, false};
    }
    return record;
  }
  coordinator::Around Around() {
    return {.now = now,
            .nodes = nodes,
            .members = members,
            .layouts = layouts,
            .communicator = communicator.has_value() ? &*communicator : nullptr,
            .plans = &plans,
            .needed = [](NodeId node) { return node == kSelf; },
            .limits = limits,
            .slot_bytes = 4096,
            .steps = &steps};
  }
  // All ranks of the communicator of the nodes that are left are up.
  void Connect() {
    std::vector<NodeId> ranks = {kSelf};
    for (const NodeId node : {kB, kC}) {
      if (nodes.contains(node)) ranks.push_back(node);
    }
    communicator.emplace(CommunicatorId(next_communicator++), ranks, limits.wire, now);
    for (const NodeId node : ranks) communicator->Opened(node, "at");
    communicator->Connect(limits.wire, now);
    for (const NodeId node : ranks) communicator->Answered(node, absl::OkStatus(), now);
  }
  void Push() {
    auto content = std::make_shared<PartContent>();
    content->bucket = std::make_shared<const CheckedBucket>();
    MovePart move;
    move.update = kUpdate;
    move.part = kPart;
    move.trainer = kTrainer;
    move.content = std::move(content);
    move.touched = {0, 1};
    move.verification = Verification::kReadback;
    update->Start(std::move(move), Around());
    Check();
  }
  template <typename Report>
  void Tell(NodeId node, const Report& report) {
    update->On(node, report, Around());
    Check();
  }
  void Acknowledge(NodeId node) {
    Tell(node, PeerHeaderAck{kUpdate, kPart, Find<PeerHeader>(steps).front()->digest, ""});
  }
  void Lock() {
    for (const NodeId node : {kSelf, kB, kC}) Tell(node, PeerWireGranted{kUpdate});
  }
  void Issue() {
    for (const NodeId node : {kSelf, kB, kC}) Acknowledge(node);
    Lock();
    update->IssueAndYield(Around());
    Check();
  }
  void End(NodeId node, int64_t bytes, absl::Status status = absl::OkStatus()) {
    TransferDone done;
    done.update = kUpdate;
    done.part = kPart;
    done.status = std::move(status);
    done.wire_failed = !done.status.ok();
    if (bytes > 0) done.bytes_written = {bytes};
    Tell(node, done);
  }
  void Lose(NodeId node) {
    nodes.Leave(node);
    members.DetachAll(node);
    update->Remove(node);
    update->GoOnWithout(node, "gone", Failure(), Around());
    Connect();
    update->ShowWire(false, Around());
    update->LoseNode(node, absl::UnavailableError("gone"), Around());
    Check();
  }
  void Check() const { update->CheckInvariants(nodes); }

  TimePoint now{std::chrono::seconds(1)};
  JoinedNodes nodes{"a", std::chrono::seconds(10)};
  RemoteMembers members;
  MemberLayouts layouts;
  std::map<NodeId, ProgramId> plans;
  PeerLimits limits;
  uint64_t next_communicator = 1;
  std::optional<Communicator> communicator;
  std::optional<UpdateOnNodes> update;
  Steps steps;
};

absl::Status WaitedFor(int rank) {
  return AboutRanks(absl::DeadlineExceededError("waited"), {rank});
}

// ---- parts ----

TEST_CASE("P5: a part is issued when every node has agreed to its header, and the wire is free") {
  OverNodes o;
  o.Push();
  CHECK(Find<PeerHeader>(o.steps).size() == 3);
  o.Acknowledge(kSelf);
  o.Acknowledge(kB);
  o.Lock();
  o.update->IssueAndYield(o.Around());
  CHECK(Find<PeerIssue>(o.steps).empty());
  o.Acknowledge(kC);
  o.update->IssueAndYield(o.Around());
  CHECK(Find<PeerIssue>(o.steps).size() == 3);
}

TEST_CASE("a node that does not agree to a part fails the update, and the tensor is named") {
  OverNodes o;
  o.Push();
  o.Tell(kB, PeerHeaderAck{kUpdate, kPart, 1, "its shape differs", "w"});
  const auto failed = Find<FailUpdate>(o.steps);
  REQUIRE(failed.size() == 1);
  CHECK(failed[0]->reason == "daemon b does not agree about part 0: its shape differs");
  CHECK(failed[0]->failure.tensor == "w");
}

TEST_CASE("P1: a part is done when every node has ended, with what each wrote") {
  OverNodes o;
  o.Push();
  o.Issue();
  o.End(kSelf, 0);
  o.End(kC, 7);
  CHECK(Find<TransferDone>(o.steps).empty());
  o.End(kB, 5);
  const auto done = Find<TransferDone>(o.steps);
  REQUIRE(done.size() == 1);
  CHECK(done[0]->status.ok());
  CHECK(done[0]->bytes_written == std::vector<int64_t>{5, 7});
}

TEST_CASE("P7: a part that was cut by a lost node is sent again to those that lack it") {
  OverNodes o;
  o.Push();
  o.Issue();
  o.Lose(kC);
  CHECK(Find<DataPlaneState>(o.steps).size() == 1);
  o.End(kSelf, 0);
  o.steps.clear();
  o.End(kB, 0, absl::UnavailableError("cut"));
  const auto again = Find<PeerHeader>(o.steps);
  REQUIRE(again.size() == 2);  // the root, and b
  CHECK(again[0]->again);
  CHECK(again[0]->communicator == o.communicator->id());
  CHECK(Find<TransferDone>(o.steps).empty());
}

TEST_CASE("a part that no remaining node lacks is done although its wire was cut") {
  OverNodes o;
  o.Push();
  o.Issue();
  o.End(kB, 5);
  o.Lose(kC);
  o.End(kSelf, 0, absl::UnavailableError("cut"));
  REQUIRE(Find<TransferDone>(o.steps).size() == 1);
  CHECK(Find<TransferDone>(o.steps)[0]->status.ok());
}

TEST_CASE("a part without a communicator is answered at once") {
  OverNodes o;
  o.communicator.reset();
  o.Push();
  REQUIRE(Find<TransferDone>(o.steps).size() == 1);
  CHECK(Find<TransferDone>(o.steps)[0]->status.code() == absl::StatusCode::kUnavailable);
}

// ---- a wire that fails ----

TEST_CASE("a node that the others waited for is dropped, and the update goes on without it") {
  OverNodes o;
  o.Push();
  o.Issue();
  o.End(kSelf, 0, WaitedFor(2));
  o.now = *o.update->due();
  o.update->Tick(o.Around());
  const auto dropped = Find<DropSuspect>(o.steps);
  REQUIRE(dropped.size() == 1);
  CHECK(dropped[0]->node == kC);
  CHECK(Find<FailUpdate>(o.steps).empty());
}

TEST_CASE("a failure of the wire that names nobody fails the update once its time is over") {
  OverNodes o;
  o.Push();
  o.Issue();
  o.End(kB, 0, absl::UnavailableError("broken"));
  CHECK(Find<FailUpdate>(o.steps).empty());
  o.now = *o.update->due();
  o.update->Tick(o.Around());
  CHECK(Find<FailUpdate>(o.steps).size() == 1);
  CHECK(Find<WireBroken>(o.steps).size() == 1);
}

// ---- the program ----

PeerProgramBuilt BuiltWith(int64_t rounds, std::vector<PeerStream> streams = {}) {
  return {kUpdate, absl::OkStatus(), rounds, std::move(streams)};
}

void BuildAll(OverNodes* o) {
  o->Tell(kSelf, BuiltWith(4, {{1, 7, 0}, {2, 8, 0}}));
  o->Tell(kB, BuiltWith(4, {{0, 0, 7}}));
  o->Tell(kC, BuiltWith(4, {{0, 0, 8}}));
}

StartRefit RunIt() {
  StartRefit run;
  run.update = kUpdate;
  run.part = kPart;
  return run;
}

TEST_CASE("P5: a program runs when all nodes have built it and agree about its streams") {
  OverNodes o(true);
  CHECK(Find<PeerProgram>(o.steps).size() == 3);
  o.update->Run(RunIt(), o.Around());
  o.Tell(kSelf, BuiltWith(4, {{1, 7, 0}, {2, 8, 0}}));
  o.Tell(kB, BuiltWith(4, {{0, 0, 7}}));
  CHECK(Find<StartRefit>(o.steps).empty());
  o.Tell(kC, BuiltWith(4, {{0, 0, 8}}));
  CHECK(Find<StartRefit>(o.steps).size() == 3);
  CHECK(Find<FailUpdate>(o.steps).empty());
}

TEST_CASE("P5: a program whose streams two nodes derived differently never runs") {
  OverNodes o(true);
  o.update->Run(RunIt(), o.Around());
  o.Tell(kSelf, BuiltWith(4, {{1, 7, 0}}));
  o.Tell(kB, BuiltWith(4, {{0, 0, 6}}));
  o.Tell(kC, BuiltWith(4));
  CHECK(Find<StartRefit>(o.steps).empty());
  REQUIRE(Find<FailUpdate>(o.steps).size() == 1);
  CHECK(Find<FailUpdate>(o.steps)[0]->reason ==
        "daemon a and daemon b do not agree about what the program sends between them");
  CHECK(o.plans.empty());  // the next update sends the plan anew
}

TEST_CASE("the second update with the same program sends no plan") {
  OverNodes o(true);
  CHECK(Find<PeerProgram>(o.steps)[1]->whole != nullptr);
  o.steps.clear();
  o.update.emplace(o.Record(UpdateId(6), true), GroupSpec(), o.Around());
  o.update->Announce(o.Around());
  CHECK(Find<PeerProgram>(o.steps)[1]->whole == nullptr);
}

TEST_CASE("a program goes on from the first round that a remaining node lacks") {
  OverNodes o(true);
  o.update->Run(RunIt(), o.Around());
  BuildAll(&o);
  o.Lose(kC);
  o.steps.clear();
  RefitDone done;
  done.update = kUpdate;
  done.status = absl::UnavailableError("cut");
  done.wire_failed = true;
  done.lacks = 3;
  o.Tell(kSelf, done);
  done.lacks = 2;
  o.Tell(kB, done);
  const auto runs = Find<StartRefit>(o.steps);
  REQUIRE(runs.size() == 2);
  CHECK(runs[0]->attempt == 1);
  CHECK(runs[0]->resume == 2);
  CHECK(Find<RefitDone>(o.steps).empty());
}

TEST_CASE("P1: a program whose receiver got other bytes than were sent fails") {
  OverNodes o(true);
  o.update->Run(RunIt(), o.Around());
  BuildAll(&o);
  RefitDone done;
  done.update = kUpdate;
  done.streams = {{1, 70, 0}};
  o.Tell(kSelf, done);
  done.streams = {{0, 0, 71}};
  o.Tell(kB, done);
  done.streams = {};
  o.Tell(kC, done);
  REQUIRE(Find<RefitDone>(o.steps).size() == 1);
  CHECK(Find<RefitDone>(o.steps)[0]->status.code() == absl::StatusCode::kDataLoss);
  CHECK_FALSE(Find<ProgramEnded>(o.steps)[0]->ok);
}

// ---- the read-back ----

TEST_CASE("a read-back that comes before the program was sent waits for it") {
  OverNodes o(true);
  o.update->ReadBack({kUpdate, {}}, o.Around());
  CHECK(Find<VerifyUpdate>(o.steps).empty());
  o.update->Run(RunIt(), o.Around());
  BuildAll(&o);
  CHECK(Find<VerifyUpdate>(o.steps).size() == 2);
}

TEST_CASE("a read-back has one result, in the group's numbers") {
  OverNodes o;
  o.update->ReadBack({kUpdate, {}}, o.Around());
  o.Tell(kB, VerifyDone{kUpdate, absl::OkStatus(), {}, {77}});
  CHECK(Find<VerifyDone>(o.steps).empty());
  o.Tell(kC, VerifyDone{kUpdate, absl::DataLossError("bad"), {0}, {}});
  REQUIRE(Find<VerifyDone>(o.steps).size() == 1);
  const VerifyDone& done = *Find<VerifyDone>(o.steps)[0];
  CHECK(done.status.message() == "daemon c: bad");
  CHECK(done.failed_destinations == std::vector<uint32_t>{1});
  CHECK(done.content == std::vector<uint64_t>{77, 0});
}

TEST_CASE("a read-back of which nothing is left is done at once") {
  OverNodes o;
  o.update->ReadBack({kUpdate, {true, true}}, o.Around());
  CHECK(Find<VerifyUpdate>(o.steps).empty());
  CHECK(Find<VerifyDone>(o.steps).size() == 1);
}

TEST_CASE("P1: a node that read back before its parts had ended has verified nothing") {
  OverNodes o;
  o.Push();
  o.Issue();
  o.update->ReadBack({kUpdate, {false, true}}, o.Around());
  o.Tell(kB, VerifyDone{kUpdate, absl::OkStatus(), {}, {77}});
  REQUIRE(Find<VerifyDone>(o.steps).size() == 1);
  CHECK(Find<VerifyDone>(o.steps)[0]->failed_destinations == std::vector<uint32_t>{0});
}

// ---- giving up ----

TEST_CASE(
    "P4: a program that was asked for and never began is answered when the update is given up") {
  OverNodes o(true);
  o.update->Run(RunIt(), o.Around());
  o.update->Abandon(o.Around());
  o.Check();
  REQUIRE(Find<RefitDone>(o.steps).size() == 1);
  CHECK(Find<RefitDone>(o.steps)[0]->status.code() == absl::StatusCode::kCancelled);
  CHECK(Find<PeerAbandon>(o.steps).size() == 3);
}

TEST_CASE("a node that left before the data phase gets the update's end and is no rank any more") {
  OverNodes o;
  CHECK(o.update->LeaveOut(kC, o.Around()));
  CHECK(o.update->Ranks() == std::vector{kSelf, kB});
  o.steps.clear();
  o.update->End(UpdateEnded{}, o.Around());
  CHECK(Find<PeerUpdateEnded>(o.steps).size() == 3);
}

// ---- what outlives an update ----

TEST_CASE("status shows what each node sent in the last run, the most bytes first") {
  const OverNodes o;
  LastRun run;
  run.Set({ProgramId(9), Plan(), {kSelf, kB, kC}, {}, false},
          {{kSelf, std::chrono::milliseconds(3)}});
  NodeView view;
  run.Show(kSelf, o.nodes, &view);
  REQUIRE(view.sends.size() == 2);
  CHECK(view.sends[0].to == "c");
  CHECK(view.bytes_sent == 64);
  NodeView other;
  run.Show(kB, o.nodes, &other);  // it did not end its share
  CHECK(other.bytes_received == 0);
}

// An instance over nodes b and c, and another that is on b alone.
GroupView Sharing(OverNodes* o) {
  const MemberId other(40);
  o->members.Attach(other, {kB, MemberId(2), true, true});
  GroupView view;
  for (const MemberId id : {kRankOfB, kRankOfC, other}) {
    MemberView& member = view.members.emplace_back();
    member.id = id;
    member.engine = true;
    member.instance = id == other ? "on b" : "over both";
  }
  for (const char* const name : {"on b", "over both"}) {
    InstanceView& instance = view.instances.emplace_back();
    instance.name = name;
    instance.preparing = true;
  }
  return view;
}

TEST_CASE("an instance is left out with any of its nodes, and another on one of them is not") {
  OverNodes o;
  const CommunicatorSearch::Instances instances = DispensableOfInstances(Sharing(&o), o.Around());
  CHECK(instances == CommunicatorSearch::Instances{{kB}, {kB, kC}});
  CHECK(AnyWithout({kC}, instances));
  CHECK_FALSE(AnyWithout({kB}, instances));
}

TEST_CASE(
    "an instance waited for catch-ups where another shared its node and had one on a slow one") {
  OverNodes o;
  const GroupView view = Sharing(&o);
  LeftOut left_out{std::chrono::seconds(1)};
  constexpr int64_t kBytes = 50'000'000;
  left_out.Judge({true,
                  {{kSelf, kB, kBytes, std::chrono::milliseconds(500)},
                   {kSelf, kC, kBytes, std::chrono::milliseconds(2000)}},
                  {}},
                 *o.update, o.Around());
  REQUIRE(left_out.any_slow());
  left_out.LeaveOutSlow(view, &*o.update, o.Around());
  REQUIRE(Find<KeepNodesOut>(o.steps).size() == 1);
  const std::map<NodeId, std::string>& left = Find<KeepNodesOut>(o.steps)[0]->nodes;
  CHECK(left.size() == 1);
  CHECK(left.contains(kC));
}

TEST_CASE("a communicator that fails and names nobody leaves some nodes out of this update only") {
  OverNodes o;
  LeftOut left_out{Duration(0)};
  left_out.SearchOn({kB, kC}, {"it did not come up", GiveUpClass::kTransfer, {}}, GroupView(),
                    &*o.update, o.Around());
  REQUIRE(Find<KeepNodesOut>(o.steps).size() == 1);
  CHECK(Find<KeepNodesOut>(o.steps)[0]->for_now);
  CHECK(o.update->Ranks().size() == 2);
  CHECK(left_out.searching());
  left_out.Forget(kB);
  left_out.Forget(kC);
  CHECK_FALSE(left_out.searching());
}

}  // namespace
}  // namespace refitd::coordinator
