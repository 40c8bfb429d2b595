#include "daemon/group/coordinator.h"

#include <catch2/catch.hpp>
#include <functional>
#include <map>
#include <set>
#include <string>
#include <utility>
#include <vector>

#include "daemon/group/group_test_util.h"
#include "transport/sockets/frames.h"

namespace refitd {
namespace {

constexpr NodeId kNode{1};
constexpr NodeId kThird{2};
constexpr NodeId kFourth{3};
constexpr MemberId kTrainer{1};
constexpr MemberId kRemoteEngine{7};
constexpr CommunicatorId kCommunicator{1};

// A coordinator with one joined daemon, and its actions since the last Forget.
class Fixture {
 public:
  explicit Fixture(std::function<absl::Status()> admit_remote = nullptr,
                   const GroupSpec& spec = TestGroup::DefaultSpec(), Duration slow = {})
      : coordinator_(MakeOptions(std::move(admit_remote), spec, slow)) {
    Do(NodeJoined{kNode, "a", "elsewhere"});
  }

  void Do(MachineEvent event) {
    coordinator_.Handle(event, now_, &actions_);
    coordinator_.CheckInvariants();
  }
  void Report(PeerReport report) { Do(ReportReceived{kNode, std::move(report)}); }
  // This daemon has looked at its sources before a binding's first run.
  void AnswerCompare() {
    for (const StartMoves& start : Local<StartMoves>()) {
      if (start.step != MoveStep::kCompare) continue;
      MovesDone done;
      done.update = start.update;
      done.step = start.step;
      Do(PeerEvent(std::move(done)));
    }
  }
  // Every joined daemon sends the report.
  void ReportAll(const PeerReport& report) {
    for (const NodeId node : nodes_) Do(ReportReceived{node, report});
  }
  // Daemon c joins, with an instance of its own.
  void JoinThird() {
    Do(NodeJoined{kThird, "c", "elsewhere"});
    nodes_.push_back(kThird);
  }
  void JoinFourth() {
    Do(NodeJoined{kFourth, "d", "elsewhere"});
    nodes_.push_back(kFourth);
  }

  // Actions of that type on this daemon since the last Forget.
  template <typename Action>
  std::vector<Action> Local() const {
    std::vector<Action> found;
    for (const MachineAction& outer : actions_) {
      std::visit(
          [&found](const auto& inner) {
            std::visit(
                [&found](const auto& a) {
                  if constexpr (std::is_same_v<std::decay_t<decltype(a)>, Action>) {
                    found.push_back(a);
                  }
                },
                inner);
          },
          outer);
    }
    return found;
  }
  template <typename Command>
  std::vector<Command> Sent() const {
    std::vector<Command> found;
    for (const SendCommand& send : Local<SendCommand>()) {
      if (const auto* c = std::get_if<Command>(&send.command)) found.push_back(*c);
    }
    return found;
  }
  void Forget() { actions_.clear(); }
  // Time passes, with every Tick that becomes due.
  void Wait(Duration duration) {
    const TimePoint until = now_ + duration;
    while (coordinator_.NextDeadline().value_or(until) < until) {
      now_ = *coordinator_.NextDeadline();
      Do(GroupEvent(Tick{}));
    }
    now_ = until;
  }

  // Attaches a trainer here and an engine there, and opens an update until data may come.
  void OpenUpdate() {
    Prepare();
    BringUp(kCommunicator, nodes_);
    ReportAll(ReadyEvent{kRemoteEngine, update_});
    REQUIRE(Local<Reply>().size() == 1);
  }
  // Does what OpenUpdate does until the update is assembled: the data plane is not up and no rank
  // is ready.
  void Prepare(Duration duration = {}) {
    Do(GroupEvent(TrainerAttached{kTrainer, {0, 1, 100, {}, ""}}));
    EngineIdentity engine;
    for (const NodeId node : nodes_) {
      engine.instance = node == kNode ? "i" : node == kThird ? "j" : "k";
      Do(ReportReceived{node, PeerAttach{kRemoteEngine, engine}});
    }
    ReportAll(PeerLayout{kRemoteEngine, LayoutOf({Bytes("t", 100), Bytes("u", 100)})});
    BeginEvent begin;
    begin.call = CallId(1);
    begin.member = kTrainer;
    begin.version = Version(1);
    begin.duration = duration;
    Do(GroupEvent(begin));
    update_ = Sent<PeerPrepare>().at(0).update;
  }
  // Pushes both buckets to the first node's instance and commits; returns the answer.
  absl::Status PushAndCommit(CommunicatorId communicator) {
    Push(0, "t");
    GrantWire();
    FinishPart(0, communicator);
    Push(1, "u");
    FinishPart(1, communicator);
    return Commit();
  }
  // Commits after both buckets.
  absl::Status Commit() {
    CommitEvent commit;
    commit.call = CallId(20);
    commit.member = kTrainer;
    commit.version = Version(1);
    commit.bucket_count = 2;
    Forget();
    Do(GroupEvent(commit));
    for (const SendCommand& send : Local<SendCommand>()) {
      if (!std::holds_alternative<VerifyUpdate>(send.command)) continue;
      Do(ReportReceived{send.node, VerifyDone{update_, absl::OkStatus(), {}}});
    }
    const std::vector<Reply> replies = Local<Reply>();
    return replies.size() == 1 ? replies[0].status : absl::UnknownError("not answered");
  }
  // Pushes one bucket, which is packed here and acknowledged there.
  void Push(int64_t seq, const std::string& tensor) {
    BucketDraft draft = TestGroup::MakeBucket(kTrainer, 1, seq, {Bytes(tensor, 100)});
    draft.call = CallId(10 + static_cast<uint64_t>(seq));
    const BucketEvent bucket = draft;
    Forget();
    Do(GroupEvent(bucket));
    const PeerHeader header = Sent<PeerHeader>().at(0);
    const StartTransfer pack = Local<StartTransfer>().at(0);
    CHECK(pack.content->bucket == bucket.bucket);  // no list of tensors was copied on the way
    Do(PeerEvent(TransferDone{pack.update, pack.part, absl::OkStatus(), {}, -1, {42}}));
    ReportAll(PeerHeaderAck{update_, header.part, header.digest, ""});
  }
  // The group gets the wire, so that pushed parts cross it.
  void GrantWire() {
    Report(PeerWireGranted{update_});
    Do(WireGranted{});
    for (const NodeId node : nodes_) {
      if (node != kNode) Do(ReportReceived{node, PeerWireGranted{update_}});
    }
  }
  // This daemon and all of these nodes open and connect the communicator.
  void BringUp(CommunicatorId communicator, const std::vector<NodeId>& nodes) {
    Do(CommunicatorOpened{communicator, absl::OkStatus(), "here"});
    for (const NodeId node : nodes) {
      Do(ReportReceived{node, CommunicatorOpened{communicator, absl::OkStatus(), "there"}});
    }
    Do(CommunicatorUp{communicator, absl::OkStatus()});
    for (const NodeId node : nodes) {
      Do(ReportReceived{node, CommunicatorUp{communicator, absl::OkStatus()}});
    }
  }
  // The first node's instance got the whole part.
  void FinishPart(int64_t part, CommunicatorId communicator = kCommunicator) {
    Do(WireDone{communicator, WireSeq(static_cast<uint64_t>(part)), absl::OkStatus()});
    TransferDone done;
    done.update = update_;
    done.part = PartSeq(part);
    done.bytes_written = {100};
    done.digests = {42};
    Report(done);
  }
  UpdateId update() const { return update_; }
  MachineView View() const { return coordinator_.View(now_); }
  const Coordinator& coordinator() const { return coordinator_; }

 private:
  CoordinatorOptions MakeOptions(std::function<absl::Status()> admit_remote, const GroupSpec& spec,
                                 Duration slow) {
    CoordinatorOptions options;
    options.name = "g";
    options.daemon_id = "b";
    options.incarnation = 7;
    options.spec = spec;
    options.peer_limits.slow = slow;
    options.next_update = [this] { return UpdateId(++updates_); };
    options.next_member = [this] { return MemberId(++members_); };
    options.next_call = [this] { return CallId(++calls_); };
    options.admit_remote = std::move(admit_remote);
    return options;
  }

  uint64_t updates_ = 0;
  uint64_t members_ = 1000;
  uint64_t calls_ = 1000;
  TimePoint now_{std::chrono::hours(1)};
  std::vector<NodeId> nodes_{kNode};
  Coordinator coordinator_;
  MachineActions actions_;
  UpdateId update_;
};

TEST_CASE("the wire is asked for when there is something to send, in daemon-id order") {
  Fixture f;
  f.OpenUpdate();
  CHECK(f.Sent<PeerWireLock>().empty());
  CHECK(f.Local<AcquireWire>().empty());
  f.Push(0, "t");
  CHECK(f.Sent<PeerWireLock>().size() == 1);  // "a" is locked before "b"
  CHECK(f.Local<AcquireWire>().empty());
  f.Report(PeerWireGranted{f.update()});
  CHECK(f.Local<AcquireWire>().size() == 1);
  CHECK(f.Sent<PeerIssue>().empty());
  f.Do(WireGranted{});
  CHECK(f.Sent<PeerIssue>().size() == 1);
  CHECK(f.Local<StartWire>().size() == 1);
}

TEST_CASE("the header tells each daemon which of its loader ranks will be handed the part") {
  Fixture f;
  f.JoinThird();
  constexpr MemberId kHere{2};
  const bool leaves = GENERATE(false, true);
  f.Do(GroupEvent(TrainerAttached{kTrainer, {0, 1, 100, {}, ""}}));
  EngineIdentity staged;
  staged.delivery = DeliveryMode::kLoader;
  staged.instance = "here";
  f.Do(GroupEvent(EngineAttached{kHere, staged}));
  for (const uint64_t id : {7, 8}) {
    staged.instance = "there " + std::to_string(id);
    f.Report(PeerAttach{MemberId(id), staged});
  }
  EngineIdentity registered;
  registered.instance = "third";
  f.Do(ReportReceived{kThird, PeerAttach{kRemoteEngine, registered}});
  f.Do(ReportReceived{kThird, PeerLayout{kRemoteEngine, LayoutOf({Bytes("t", 100)})}});
  BeginEvent begin;
  begin.call = CallId(1);
  begin.member = kTrainer;
  begin.version = Version(1);
  begin.tensor_count = 1;
  f.Do(GroupEvent(begin));
  const UpdateId update = f.Sent<PeerPrepare>().at(0).update;
  f.BringUp(kCommunicator, {kNode, kThird});
  f.Do(GroupEvent(ReadyEvent{kHere, update}));
  for (const uint64_t id : {7, 8}) f.Report(ReadyEvent{MemberId(id), update});
  f.Do(ReportReceived{kThird, ReadyEvent{kRemoteEngine, update}});
  if (leaves) f.Report(MemberLost{MemberId(7), "its process died"});
  BucketDraft bucket = TestGroup::MakeBucket(kTrainer, 1, 0, {Bytes("t", 100)});
  bucket.call = CallId(10);
  f.Do(GroupEvent(BucketEvent(bucket)));

  std::map<NodeId, std::vector<MemberId>> told;
  for (const SendCommand& send : f.Local<SendCommand>()) {
    const auto* header = std::get_if<PeerHeader>(&send.command);
    if (header == nullptr) continue;
    told[send.node] = header->readers;
    CHECK(header->wired);
  }
  CHECK(told ==
        std::map<NodeId, std::vector<MemberId>>{
            {kNode, leaves ? std::vector{MemberId(8)} : std::vector{MemberId(7), MemberId(8)}},
            {kThird, {}}});
  // This daemon packs the part for the wire and for its own rank.
  REQUIRE(f.Local<StartTransfer>().size() == 1);
  CHECK(f.Local<StartTransfer>()[0].wired);
  CHECK(f.Local<StartTransfer>()[0].fill_slot.has_value());
  CHECK(f.Local<StartTransfer>()[0].readers == std::vector{kHere});
}

TEST_CASE("two groups handed the wire to each other without end: it is given back after a turn") {
  Fixture f;
  f.OpenUpdate();
  f.Push(0, "t");
  f.Forget();
  // Another group wants the wire while only some locks are held: they are kept.
  f.Report(PeerWireGranted{f.update()});
  f.Report(PeerWireWanted{f.update()});
  CHECK(f.Sent<PeerWireUnlock>().empty());
  f.Do(WireGranted{});
  CHECK(f.Local<StartWire>().size() == 1);  // the group's turn
  f.Do(WireWanted{});
  CHECK(f.Local<ReleaseWire>().empty());  // the group's collective still runs
  f.Forget();
  f.FinishPart(0);
  CHECK(f.Sent<PeerWireUnlock>().size() == 1);
  CHECK(f.Local<ReleaseWire>().size() == 1);
  CHECK(f.Sent<PeerWireLock>().empty());  // nothing to send now
  f.Push(1, "u");
  CHECK(f.Sent<PeerWireLock>().size() == 1);
}

TEST_CASE(
    "a layout of a joined daemon is answered: taken, or refused while its rank is in an update, or "
    "without room for it") {
  Fixture f;
  const auto layout = LayoutOf({Bytes("t", 100), Bytes("u", 100)});
  const auto last = [&f] { return f.Sent<Reply>().back(); };
  f.Report(PeerLayout{kRemoteEngine, layout, CallId(50)});
  CHECK(last().status.code() == absl::StatusCode::kUnauthenticated);
  f.OpenUpdate();  // registers layouts with call 0
  f.Report(PeerLayout{kRemoteEngine, layout, CallId(51)});
  CHECK(last().call == CallId(51));
  CHECK(last().status.code() == absl::StatusCode::kFailedPrecondition);
  AbortEvent abort;
  abort.call = CallId(2);
  abort.member = kTrainer;
  abort.version = Version(1);
  f.Do(GroupEvent(abort));
  f.Report(PeerLayout{kRemoteEngine, layout, CallId(52)});
  CHECK(last().call == CallId(52));
  CHECK(last().status.ok());
  f.Report(PeerLayout{kRemoteEngine, layout, CallId(53), absl::InvalidArgumentError("overlap")});
  CHECK(last().call == CallId(53));
  CHECK(last().status == absl::InvalidArgumentError("overlap"));
  const absl::Status room = absl::ResourceExhaustedError("limits.held_bytes");
  f.Report(PeerLayout{kRemoteEngine, nullptr, CallId(54), {}, {}, 0, room});
  CHECK(last().call == CallId(54));
  CHECK(last().status == room);
}

TEST_CASE("an update named the digest of a layout that had been refused") {
  Fixture f;
  f.Do(GroupEvent(TrainerAttached{kTrainer, {0, 1, 100, {}, ""}}));
  EngineIdentity engine;
  engine.instance = "i";
  engine.world_size = 2;
  constexpr MemberId kOther{78};
  f.Report(PeerAttach{kRemoteEngine, engine});
  engine.rank = 1;
  f.Report(PeerAttach{kOther, engine});
  const auto layout = LayoutOf({Bytes("t", 100), Bytes("u", 100)});
  for (const MemberId rank : {kRemoteEngine, kOther}) f.Report(PeerLayout{rank, layout});
  PeerLayout wrong{kRemoteEngine, LayoutOf({Bytes("t", 100)}), CallId(50)};
  wrong.shadowed = true;  // where the other rank has no backs
  f.Report(wrong);
  REQUIRE(f.Sent<Reply>().back().status.code() == absl::StatusCode::kInvalidArgument);
  BeginEvent begin;
  begin.call = CallId(1);
  begin.member = kTrainer;
  begin.version = Version(1);
  f.Do(GroupEvent(begin));
  const PeerPrepare prepare = f.Sent<PeerPrepare>().at(0);
  REQUIRE(prepare.layout_digests.size() == 2);
  for (const uint64_t digest : prepare.layout_digests) CHECK(digest == layout->Digest());
}

TEST_CASE("a communicator that was up is closed everywhere when a rank gives its end of it back") {
  Fixture f;
  f.OpenUpdate();
  REQUIRE(f.PushAndCommit(kCommunicator).ok());
  REQUIRE(f.View().communicator == kCommunicator);
  f.Forget();
  f.Do(CommunicatorUp{kCommunicator, absl::CancelledError("its slots are given back")});
  CHECK(f.Sent<CloseCommunicator>().size() == 1);
  CHECK(f.Local<CloseCommunicator>().size() == 1);
  CHECK(!f.View().communicator.has_value());
}

TEST_CASE("a failed wire's error named its ranks only") {
  Fixture f;
  f.OpenUpdate();
  f.Push(0, "t");
  f.Report(PeerWireGranted{f.update()});
  f.Do(WireGranted{});
  TransferDone done;
  done.update = f.update();
  done.part = PartSeq(0);
  done.wire_failed = true;
  // The text decides nothing: it names rank 7, and leaves rank 1 out.
  done.status = AboutRanks(absl::UnavailableError("the connection to rank 7 broke"), {0, 1});
  f.Report(done);
  f.Do(WireDone{kCommunicator, WireSeq(0), absl::OkStatus()});
  const auto ended = f.Sent<PeerUpdateEnded>();
  REQUIRE(ended.size() == 1);
  CHECK_THAT(ended[0].reason, Catch::Contains("(rank 0 is daemon b, rank 1 is daemon a)"));
}

TEST_CASE("a wire that failed was blamed on a daemon that waited itself") {
  Fixture f;
  f.JoinThird();
  f.OpenUpdate();
  f.Push(0, "t");
  f.Report(PeerWireGranted{f.update()});
  f.Do(WireGranted{});
  f.Do(ReportReceived{kThird, PeerWireGranted{f.update()}});
  TransferDone done;
  done.update = f.update();
  done.part = PartSeq(0);
  done.wire_failed = true;
  done.status =
      AboutRanks(absl::DeadlineExceededError("communicator 1: waited 2000 ms for rank 0"), {0});
  f.Report(done);
  CHECK(f.Sent<PeerAbandon>().empty());
  std::string text;
  std::string suspect;
  SECTION("rank 0 has its say in time") {
    f.Do(WireDone{kCommunicator, WireSeq(0),
                  AboutRanks(absl::DeadlineExceededError("waited 2000 ms for rank 2"), {2})});
    CHECK(f.Local<DropNode>().empty());  // rank 2 may have a report of its own
    f.Wait(std::chrono::milliseconds(600));
    CHECK(f.Sent<PeerAbandon>().empty());
    const auto dropped = f.Local<DropNode>();
    REQUIRE(dropped.size() == 1);
    CHECK(dropped[0].node == kThird);
    CHECK_THAT(std::string(dropped[0].status.message()),
               Catch::Contains("for rank 2 (rank 2 is daemon c)"));
    return;
  }
  SECTION("rank 0, which passes on what rank 2 sends, sees that rank 1 closed its connection") {
    f.Do(WireDone{kCommunicator, WireSeq(0),
                  AboutRanks(absl::UnavailableError("the connection to rank 1 broke: it was closed "
                                                    "while this rank waited for rank 2"),
                             {1, 2})});
    f.Wait(std::chrono::milliseconds(600));
    CHECK_FALSE(f.Sent<PeerAbandon>().empty());
    text = "for rank 2 (rank 1 is daemon a, rank 2 is daemon c)";
    suspect = "c";
  }
  SECTION("rank 0 is silent") {
    f.Wait(std::chrono::milliseconds(600));
    CHECK_FALSE(f.Sent<PeerAbandon>().empty());
    f.Do(WireDone{kCommunicator, WireSeq(0), absl::CancelledError("closed")});
    text = "for rank 0 (rank 0 is daemon b)";
    suspect = "b";
  }
  done.status = absl::CancelledError("closed");
  f.Do(ReportReceived{kThird, done});
  const auto ended = f.Sent<PeerUpdateEnded>();
  REQUIRE(ended.size() == 2);
  CHECK_THAT(ended[0].reason, Catch::Contains(text));
  REQUIRE_FALSE(ended[0].failure.suspects.empty());
  CHECK(ended[0].failure.suspects[0].daemon == suspect);
}

TEST_CASE(
    "members and calls of a lost daemon were released and answered here, where nobody knew them") {
  Fixture f;
  f.Report(PeerAttach{MemberId(3), TrainerIdentity{0, 1, 100, {}, ""}});
  BeginEvent begin;
  begin.call = CallId(5);
  begin.member = MemberId(3);
  begin.version = Version(1);
  f.Report(PeerCall{begin});
  SECTION("the daemon is lost") { f.Do(NodeLost{kNode, "gone"}); }
  SECTION("the member is") { f.Report(MemberLost{MemberId(3), "gone"}); }
  CHECK(f.Local<ReleaseMember>().empty());
  CHECK(f.Local<Reply>().empty());
}

TEST_CASE("the death of a daemon's only engine aborted the update for all") {
  Fixture f;
  f.JoinThird();
  f.Prepare();
  f.BringUp(kCommunicator, {kNode, kThird});
  f.Forget();
  f.Do(ReportReceived{kThird, MemberLost{kRemoteEngine, "its process died"}});
  CHECK(f.Sent<PeerAbandon>().size() == 1);  // no member of it is left in the update
  const auto opened = f.Sent<OpenCommunicator>();
  REQUIRE(opened.size() == 1);
  CHECK(opened[0].size == 2);
  const CommunicatorId communicator = opened[0].communicator;
  f.BringUp(communicator, {kNode});
  // The daemon closes its link, having heard of the death before it heard of the update.
  f.Do(NodeLost{kThird, "no member is left"});
  f.Report(ReadyEvent{kRemoteEngine, f.update()});
  REQUIRE(f.Local<Reply>().size() == 1);
  CHECK(f.Local<Reply>()[0].status == absl::OkStatus());
  CHECK(f.PushAndCommit(communicator) == absl::OkStatus());
}

TEST_CASE("a daemon whose only engine died in the data phase serves the data plane to the end") {
  Fixture f;
  f.JoinThird();
  f.OpenUpdate();
  f.Push(0, "t");
  f.GrantWire();
  f.Do(ReportReceived{kThird, MemberLost{kRemoteEngine, "its process died"}});
  CHECK(f.Sent<PeerAbandon>().empty());
  CHECK(f.Sent<CloseCommunicator>().empty());
  TransferDone done;
  done.update = f.update();
  done.part = PartSeq(0);
  done.bytes_written = {0};
  done.digests = {42};
  f.Do(ReportReceived{kThird, done});
  f.FinishPart(0);
  f.Push(1, "u");
  f.FinishPart(1);
  CHECK(f.Commit() == absl::OkStatus());
}

TEST_CASE("a daemon that is left out of an update hears how it ended") {
  Fixture f;
  f.JoinThird();
  f.Prepare();
  f.Do(ReportReceived{kThird, MemberLost{kRemoteEngine, "its process died"}});
  f.BringUp(f.Sent<OpenCommunicator>().back().communicator, {kNode});
  f.Report(ReadyEvent{kRemoteEngine, f.update()});
  CHECK(f.PushAndCommit(CommunicatorId(2)) == absl::OkStatus());
  std::set<NodeId> told;
  for (const SendCommand& send : f.Local<SendCommand>()) {
    const auto* ended = std::get_if<PeerUpdateEnded>(&send.command);
    if (ended == nullptr) continue;
    CHECK(ended->outcome == Outcome::kCommitted);
    told.insert(send.node);
  }
  CHECK(told == std::set<NodeId>{kNode, kThird});
}

TEST_CASE("a daemon that answered pings and never ended its share hung the group") {
  Fixture f;
  constexpr MemberId kHere{2};
  constexpr CallId kOperator{30};
  EngineIdentity engine;
  engine.instance = "here";
  f.Do(GroupEvent(EngineAttached{kHere, engine}));
  f.Do(GroupEvent(LayoutRegistered{kHere, LayoutOf({Bytes("t", 100), Bytes("u", 100)})}));
  f.Prepare();
  f.BringUp(kCommunicator, {kNode});
  f.Do(GroupEvent(ReadyEvent{kHere, f.update()}));
  f.Report(ReadyEvent{kRemoteEngine, f.update()});
  f.Push(0, "t");
  f.Forget();
  f.Do(GroupEvent(OperatorAbort{kOperator, "enough"}));
  CHECK(f.Local<SendAborted>().empty());
  f.Wait(GroupLimits().cleanup_limit + std::chrono::milliseconds(1));
  const auto dropped = f.Local<DropNode>();
  REQUIRE(dropped.size() == 1);
  CHECK(dropped[0].node == kNode);
  CHECK_THAT(std::string(dropped[0].status.message()), Catch::Contains("did not end its share"));
  std::set<MemberId> told;
  for (const SendAborted& aborted : f.Local<SendAborted>()) told.insert(aborted.member);
  CHECK(told == std::set<MemberId>{kTrainer, kHere});
  std::set<CallId> answered;
  for (const Reply& reply : f.Local<Reply>()) answered.insert(reply.call);
  CHECK(answered.contains(kOperator));
  CHECK(answered.contains(CallId(10)));  // the bucket
  BeginEvent again;
  again.call = CallId(31);
  again.member = kTrainer;
  again.version = Version(2);
  f.Forget();
  f.Do(GroupEvent(again));
  CHECK(f.Local<UpdateAssembled>().size() == 1);  // of the instance here
}

// A group with daemons b (the coordinator's, with the trainer), a and c, before a communicator is
// open.
struct BrokenDataPlane : Fixture {
  BrokenDataPlane() {
    JoinThird();
    Prepare(std::chrono::seconds(8));
    Forget();
  }
  void Open() {
    Do(CommunicatorOpened{kCommunicator, absl::OkStatus(), "here"});
    ReportAll(CommunicatorOpened{kCommunicator, absl::OkStatus(), "there"});
  }
  // The update commits with a's instance; c's is told that it keeps its version.
  void CheckGoesOnWithoutThird() {
    std::vector<SendCommand> told = Local<SendCommand>();
    std::erase_if(told, [](const SendCommand& send) {
      const auto* action = std::get_if<MemberAction>(&send.command);
      return action == nullptr || !std::holds_alternative<SendAborted>(*action);
    });
    REQUIRE(told.size() == 1);
    CHECK(told[0].node == kThird);
    CHECK_FALSE(std::get<SendAborted>(std::get<MemberAction>(told[0].command)).dirty);
    REQUIRE(Sent<OpenCommunicator>().back().communicator == CommunicatorId(2));
    CHECK(Sent<OpenCommunicator>().back().size == 2);
    CHECK(Local<Reply>().empty());
    Report(ReadyEvent{kRemoteEngine, update()});
    CHECK(Local<Reply>().empty());  // not before the data plane is up
    BringUp(CommunicatorId(2), {kNode});
    REQUIRE(Local<Reply>().size() == 1);
    CHECK(Local<Reply>()[0].status == absl::OkStatus());
    CHECK(PushAndCommit(CommunicatorId(2)) == absl::OkStatus());
    const std::vector<NodeView> nodes = View().nodes;
    REQUIRE(nodes.size() == 3);
    CHECK(nodes[0].kept_out.empty());
    CHECK(nodes[1].kept_out.empty());
    CHECK_THAT(nodes[2].kept_out, Catch::Contains("daemon c is kept out until it attaches anew"));
  }
  // The nodes that get Prepare in the update to that version.
  std::set<NodeId> Prepared(int64_t version) {
    BeginEvent begin;
    begin.call = CallId(100 + static_cast<uint64_t>(version));
    begin.member = kTrainer;
    begin.version = Version(version);
    Forget();
    Do(GroupEvent(begin));
    std::set<NodeId> prepared;
    for (const SendCommand& send : Local<SendCommand>()) {
      const auto* prepare = std::get_if<PeerPrepare>(&send.command);
      if (prepare != nullptr && !prepare->engines.empty()) prepared.insert(send.node);
    }
    return prepared;
  }
};

TEST_CASE("a daemon with a broken data plane starved every instance") {
  BrokenDataPlane f;
  const auto late = [](const std::string& whom) {
    return absl::DeadlineExceededError("communicator 1: waited 4000 ms for " + whom +
                                       " to connect");
  };
  SECTION("it never opens") {
    f.Do(CommunicatorOpened{kCommunicator, absl::OkStatus(), "here"});
    f.Report(CommunicatorOpened{kCommunicator, absl::OkStatus(), "there"});
    f.Wait(std::chrono::milliseconds(4100));
  }
  SECTION("it can't open") {
    f.Do(ReportReceived{kThird,
                        CommunicatorOpened{kCommunicator, absl::UnavailableError("no NCCL"), ""}});
  }
  SECTION("nobody reaches it, and it reaches nobody") {
    f.Open();
    f.Do(CommunicatorUp{kCommunicator, late("rank 2")});
    f.Report(CommunicatorUp{kCommunicator, late("rank 2")});
    f.Do(ReportReceived{kThird, CommunicatorUp{kCommunicator, late("rank 0, rank 1")}});
  }
  SECTION("one other daemon can't reach it") {
    f.Open();
    f.Do(CommunicatorUp{kCommunicator, late("rank 2")});
    f.Do(ReportReceived{kThird, CommunicatorUp{kCommunicator, late("rank 0")}});
    f.Wait(std::chrono::milliseconds(600));  // the third daemon could report, and does not
  }
  SECTION("it comes up for the others only") {
    f.Open();
    f.Do(CommunicatorUp{kCommunicator, absl::OkStatus()});
    f.Report(CommunicatorUp{kCommunicator, absl::OkStatus()});
    const bool says = GENERATE(false, true);
    if (says) f.Do(ReportReceived{kThird, CommunicatorUp{kCommunicator, late("rank 0")}});
    // The attempt takes half of the remaining time, and a little more.
    if (!says) f.Wait(std::chrono::milliseconds(3100));
    if (!says) f.Wait(std::chrono::milliseconds(1500));
  }
  f.CheckGoesOnWithoutThird();
  // The node stays kept out until it attaches anew.
  CHECK(f.Prepared(2) == std::set<NodeId>{kNode});
  f.Do(GroupEvent(OperatorAbort{CallId(40), "enough"}));
  f.Do(ReportReceived{kThird, MemberLost{kRemoteEngine, "it was started anew"}});
  f.Do(NodeLost{kThird, "no member is left"});
  constexpr NodeId kAnew{3};
  EngineIdentity engine;
  engine.instance = "j";
  f.Do(NodeJoined{kAnew, "c", "elsewhere"});
  f.Do(ReportReceived{kAnew, PeerAttach{kRemoteEngine, engine}});
  f.Do(ReportReceived{kAnew, PeerLayout{kRemoteEngine, LayoutOf({Bytes("t", 100)}), CallId(60)}});
  CHECK(f.Prepared(3) == std::set<NodeId>{kNode, kAnew});
}

// An address of the wire over sockets under TLS, which rank 0 or 1 gives.
std::string EncryptedAddress(uint32_t rank) {
  SocketAddress address;
  address.rank = rank;
  address.size = 2;
  address.host.family = AF_INET;
  address.host.ip = {10, 0, 0, 1};
  address.port = 1;
  address.tls = true;
  address.identity = "spiffe://prod/refitd/a";
  return EncodeSocketAddress(address);
}

TEST_CASE("a group that demands encryption connects no daemon whose data plane is in the clear") {
  GroupSpec demanding = TestGroup::DefaultSpec();
  demanding.encrypted_data = true;
  Fixture f(nullptr, demanding);
  f.Prepare();
  f.Do(CommunicatorOpened{kCommunicator, absl::OkStatus(), EncryptedAddress(0)});
  SECTION("all daemons encrypt") {
    f.Report(CommunicatorOpened{kCommunicator, absl::OkStatus(), EncryptedAddress(1)});
    CHECK(f.Sent<PeerCommunicatorConnect>().size() == 1);
  }
  SECTION("a joined daemon does not") {
    f.Report(CommunicatorOpened{kCommunicator, absl::OkStatus(), "there"});
    CHECK(f.Sent<PeerCommunicatorConnect>().empty());
    const std::vector<Reply> replies = f.Local<Reply>();
    REQUIRE(replies.size() == 1);
    CHECK_THAT(std::string(replies[0].status.message()),
               Catch::Contains("spec.encrypted_data: the group demands it, and the data plane of "
                               "daemon a is in the clear"));
  }
}

TEST_CASE("a data plane that fails for the trainer's daemon keeps nobody out") {
  BrokenDataPlane f;
  f.Open();
  const absl::Status waited =
      AboutRanks(absl::DeadlineExceededError("communicator 1: waited 4000 ms for rank 0"), {0});
  f.ReportAll(CommunicatorUp{kCommunicator, waited});
  f.Do(CommunicatorUp{kCommunicator, AboutRanks(absl::DeadlineExceededError(
                                                    "communicator 1: waited for rank 1, rank 2"),
                                                {1, 2})});
  const std::vector<Reply> replies = f.Local<Reply>();
  REQUIRE(replies.size() == 1);
  CHECK(replies[0].status.code() == absl::StatusCode::kAborted);
  CHECK_THAT(std::string(replies[0].status.message()),
             Catch::Contains("the data plane did not come up on"));
  CHECK(f.Prepared(2) == std::set<NodeId>{kNode, kThird});
}

TEST_CASE("a data plane that had no time to come up keeps nobody out") {
  Fixture f;
  f.JoinThird();
  f.Prepare(std::chrono::milliseconds(100));
  f.Do(CommunicatorOpened{kCommunicator, absl::OkStatus(), "here"});
  f.Wait(std::chrono::milliseconds(60));
  const std::vector<Reply> replies = f.Local<Reply>();
  REQUIRE(replies.size() == 1);
  CHECK_THAT(std::string(replies[0].status.message()),
             Catch::Contains("waited for daemon a, daemon c"));
  for (const NodeView& node : f.View().nodes) CHECK(node.kept_out.empty());
}

TEST_CASE("a data plane that fails for the last instance's daemon keeps nobody out") {
  Fixture f;
  f.Prepare();
  f.Do(CommunicatorOpened{kCommunicator, absl::OkStatus(), "here"});
  f.Report(CommunicatorOpened{kCommunicator, absl::UnavailableError("no device"), ""});
  const std::vector<Reply> replies = f.Local<Reply>();
  REQUIRE(replies.size() == 1);
  CHECK_THAT(std::string(replies[0].status.message()),
             Catch::Contains("the data plane did not open on daemon a: no device"));
  CHECK(f.View().nodes[1].kept_out.empty());
}

// A group with the trainer on the coordinator's daemon and an instance on each of the other
// daemons, or over several of them, whose data plane names nobody when it fails, as NCCL's does.
class Nameless {
 public:
  explicit Nameless(uint64_t daemons, std::set<NodeId> broken, uint64_t per_instance = 1)
      : Nameless(InRow(daemons, per_instance), std::move(broken)) {}
  // `instances`: the daemons of the ranks of each.
  Nameless(std::vector<std::vector<NodeId>> instances, std::set<NodeId> broken)
      : instances_(std::move(instances)), broken_(std::move(broken)), coordinator_(MakeOptions()) {
    Do(GroupEvent(TrainerAttached{kTrainer, {0, 1, 100, {}, ""}}));
    for (const std::vector<NodeId>& ranks : instances_) daemons_.insert(ranks.begin(), ranks.end());
    for (const NodeId node : daemons_) {
      Do(NodeJoined{node, fmt::format("d{:02}", node.value()), "elsewhere"});
    }
    for (size_t i = 0; i < instances_.size(); ++i) Attach(i);
  }
  // Runs an update until its data plane is up or the update is given up. Returns the daemons that
  // were in the communicator that came up; empty: none did.
  std::set<NodeId> Update() {
    BeginEvent begin;
    begin.call = CallId(++calls_);
    begin.member = kTrainer;
    begin.version = Version(++version_);
    begin.duration = std::chrono::seconds(600);
    opened_.clear();
    ended_ = false;
    Do(GroupEvent(begin));
    CHECK(prepared_.size() == daemons_.size() - KeptOut().size());  // all but those found broken
    std::set<NodeId> up;
    if (opened_.empty() && !ended_) up = up_;  // the communicator before serves again
    for (int communicators = 0; !opened_.empty() && !ended_ && up.empty(); ++communicators) {
      REQUIRE(communicators < 40);
      up = Connect();
    }
    if (!ended_) Do(GroupEvent(OperatorAbort{CallId(++calls_), "enough"}));
    up_ = up;
    return up;
  }
  std::set<NodeId> KeptOut() const {
    std::set<NodeId> out;
    for (const NodeView& node : coordinator_.View(now_).nodes) {
      if (!node.kept_out.empty()) out.insert(node.node);
    }
    return out;
  }

 private:
  static std::vector<std::vector<NodeId>> InRow(uint64_t daemons, uint64_t per_instance) {
    std::vector<std::vector<NodeId>> instances(daemons / per_instance);
    for (uint64_t n = 0; n < daemons; ++n) instances[n / per_instance].push_back(NodeId(n + 1));
    return instances;
  }
  void Attach(size_t instance) {
    EngineIdentity engine;
    engine.instance = fmt::format("i{}", instance);
    engine.world_size = static_cast<int>(instances_[instance].size());
    for (const NodeId node : instances_[instance]) {
      const MemberId member(instance + 1);
      Do(ReportReceived{node, PeerAttach{member, engine}});
      Do(ReportReceived{node,
                        PeerLayout{member, LayoutOf({Bytes("t", 100)}), CallId(instance + 1)}});
      ++engine.rank;
    }
  }
  // The newest communicator comes up, or fails for all if a broken daemon is in it.
  std::set<NodeId> Connect() {
    const auto ranks = std::exchange(opened_, {});
    const CommunicatorId communicator = communicator_;
    const bool fails = std::any_of(ranks.begin(), ranks.end(),
                                   [this](NodeId node) { return broken_.contains(node); });
    const absl::Status status =
        fails ? absl::DeadlineExceededError("ncclCommInitRank took longer than 30 s")
              : absl::OkStatus();
    Do(CommunicatorOpened{communicator, absl::OkStatus(), "here"});
    for (const NodeId node : ranks) {
      Do(ReportReceived{node, CommunicatorOpened{communicator, absl::OkStatus(), "there"}});
    }
    Do(CommunicatorUp{communicator, status});
    for (const NodeId node : ranks) Do(ReportReceived{node, CommunicatorUp{communicator, status}});
    return fails ? std::set<NodeId>() : ranks;
  }
  void Do(MachineEvent event) {
    MachineActions actions;
    coordinator_.Handle(event, now_, &actions);
    for (const MachineAction& outer : actions) {
      if (const auto* group = std::get_if<GroupAction>(&outer)) {
        ended_ |= std::holds_alternative<UpdateEnded>(*group);
        if (std::holds_alternative<UpdateAssembled>(*group)) prepared_.clear();
        continue;
      }
      const auto* send = std::get_if<SendCommand>(&std::get<PeerAction>(outer));
      if (send == nullptr) continue;
      if (const auto* prepare = std::get_if<PeerPrepare>(&send->command)) {
        if (!prepare->engines.empty()) prepared_.insert(send->node);
      } else if (const auto* open = std::get_if<OpenCommunicator>(&send->command)) {
        if (open->communicator != communicator_) opened_.clear();
        communicator_ = open->communicator;
        opened_.insert(send->node);
      }
    }
  }
  CoordinatorOptions MakeOptions() {
    CoordinatorOptions options;
    options.name = "g";
    options.daemon_id = "b";
    options.incarnation = 7;
    options.spec = TestGroup::DefaultSpec();
    // The update takes as many instances as there are: an instance that is left out for a try must
    // not hold up assembling.
    const auto sound = std::count_if(instances_.begin(), instances_.end(), [this](auto& ranks) {
      return std::none_of(ranks.begin(), ranks.end(),
                          [this](NodeId node) { return broken_.contains(node); });
    });
    options.spec.min_instances = std::max(1, static_cast<int>(sound));
    options.limits.max_duration = std::chrono::seconds(600);
    options.next_update = [this] { return UpdateId(++updates_); };
    options.next_member = [this] { return MemberId(++members_); };
    options.next_call = [this] { return CallId(++remote_calls_); };
    return options;
  }

  const std::vector<std::vector<NodeId>> instances_;
  const std::set<NodeId> broken_;
  std::set<NodeId> daemons_;
  uint64_t updates_ = 0;
  uint64_t members_ = 1000;
  uint64_t calls_ = 0;
  uint64_t remote_calls_ = 1000;
  int64_t version_ = 0;
  TimePoint now_{std::chrono::hours(1)};
  Coordinator coordinator_;
  std::set<NodeId> prepared_;
  std::set<NodeId> opened_;  // ranks of the newest communicator, but the coordinator
  CommunicatorId communicator_;
  std::set<NodeId> up_;  // ranks of the last communicator that came up, but the coordinator
  bool ended_ = false;
};

TEST_CASE("a data plane that names nobody failed for ever where two daemons could be left out") {
  SECTION("the broken one of two, the other in the communicator that comes up") {
    Nameless g(2, {NodeId(2)});
    CHECK(g.Update() == std::set{NodeId(1)});
    CHECK(g.KeptOut() == std::set{NodeId(2)});
    CHECK(g.Update() == std::set{NodeId(1)});
  }
  SECTION("the broken one of two, tried first") {
    Nameless g(2, {NodeId(1)});
    CHECK(g.Update().empty());  // no instance is left
    CHECK(g.KeptOut().empty());
    CHECK(g.Update() == std::set{NodeId(2)});
    CHECK(g.Update() == std::set{NodeId(2)});
    CHECK(g.KeptOut() == std::set{NodeId(1)});
  }
  SECTION("one of sixteen, whichever: every update after the first serves half at least") {
    const uint64_t broken = GENERATE(1, 2, 7, 8, 9, 15, 16);
    Nameless g(16, {NodeId(broken)});
    for (int i = 0; i < 10 && g.KeptOut().empty(); ++i) {
      const std::set<NodeId> up = g.Update();
      CHECK((i == 0 || up.size() >= 8));
      CHECK_FALSE(up.contains(NodeId(broken)));
    }
    CHECK(g.KeptOut() == std::set{NodeId(broken)});
    CHECK(g.Update().size() == 15);  // innocent daemons are back
  }
  SECTION("an instance over two daemons stands and falls with both") {
    Nameless g(8, {NodeId(4)}, 2);
    for (int i = 0; i < 6 && g.KeptOut().empty(); ++i) g.Update();
    CHECK(g.KeptOut() == std::set{NodeId(3), NodeId(4)});
    CHECK(g.Update().size() == 6);
  }
  SECTION("another instance is on one of the two: the broken one alone is kept out") {
    Nameless g({{NodeId(1)}, {NodeId(1), NodeId(2)}}, {NodeId(2)});
    for (int i = 0; i < 3; ++i) CHECK(g.Update() == std::set{NodeId(1)});
    CHECK(g.KeptOut() == std::set{NodeId(2)});
  }
  SECTION("two others are on one of the two each: so also for the broken one tried first") {
    Nameless g({{NodeId(1)}, {NodeId(1), NodeId(2)}, {NodeId(2)}}, {NodeId(1)});
    CHECK(g.Update().empty());  // no instance is left
    for (int i = 0; i < 3; ++i) CHECK(g.Update() == std::set{NodeId(2)});
    CHECK(g.KeptOut() == std::set{NodeId(1)});
  }
  SECTION("the only instance is over both: no update can do without it, and nobody is kept out") {
    Nameless g(2, {NodeId(2)}, 2);
    for (int i = 0; i < 3; ++i) CHECK(g.Update().empty());
    CHECK(g.KeptOut().empty());
  }
  SECTION("three of sixteen") {
    const std::set<NodeId> broken = {NodeId(3), NodeId(4), NodeId(12)};
    Nameless g(16, broken);
    for (int i = 0; i < 20 && g.KeptOut() != broken; ++i) g.Update();
    CHECK(g.KeptOut() == broken);
    CHECK(g.Update().size() == 13);
  }
}

TEST_CASE("a report about a communicator of which its daemon is no rank ended the coordinator") {
  Fixture f;
  f.Prepare();
  f.Do(NodeJoined{kThird, "c", "elsewhere"});
  PeerReport report = CommunicatorOpened{kCommunicator, absl::OkStatus(), "nowhere"};
  SECTION("while it opens") {}
  SECTION("while it connects") {
    f.Do(CommunicatorOpened{kCommunicator, absl::OkStatus(), "here"});
    f.Report(CommunicatorOpened{kCommunicator, absl::OkStatus(), "there"});
    report = CommunicatorUp{kCommunicator, absl::OkStatus()};
  }
  f.Do(ReportReceived{kThird, report});
  const auto dropped = f.Local<DropNode>();
  REQUIRE(dropped.size() == 1);
  CHECK(dropped[0].node == kThird);
  CHECK_THAT(std::string(dropped[0].status.message()),
             Catch::Contains("daemon c") && Catch::Contains("of which it is no rank"));
  // The update goes on.
  if (std::holds_alternative<CommunicatorOpened>(report)) {
    f.BringUp(kCommunicator, {kNode});
  } else {
    f.Do(CommunicatorUp{kCommunicator, absl::OkStatus()});
    f.Report(CommunicatorUp{kCommunicator, absl::OkStatus()});
  }
  f.Report(ReadyEvent{kRemoteEngine, f.update()});
  CHECK(f.PushAndCommit(kCommunicator) == absl::OkStatus());
}

TEST_CASE("A group takes as many daemons as the wire can join, and refuses the next by name") {
  Fixture f;
  const Coordinator& group = f.coordinator();
  // The coordinator itself and "a" are two of the daemons.
  for (uint32_t n = 2; n < kMaxGroupDaemons; ++n) {
    const std::string id = fmt::format("d{}", n);
    REQUIRE(group.CanJoin(id, "boot", "there").ok());
    f.Do(NodeJoined{NodeId(n), id, "there", kProtocol, "boot"});
  }
  const absl::Status refused = group.CanJoin("one more", "boot", "there");
  CHECK(refused.code() == absl::StatusCode::kResourceExhausted);
  CHECK_THAT(Message(refused), Catch::Contains("'one more' would be daemon 257") &&
                                   Catch::Contains("'g', which can have 256"));
  CHECK(group.CanJoin("d2", "boot", "there").ok());  // replaces its own earlier link
}

TEST_CASE("A daemon id is one process's while its link lives: the same process replaces its link") {
  Fixture f;
  f.Do(NodeJoined{kThird, "c", "10.0.0.3:1", kProtocol, "first"});
  CHECK(f.coordinator().CanJoin("c", "first", "10.0.0.3:2").ok());
  const absl::Status refused = f.coordinator().CanJoin("c", "second", "10.0.0.4:1");
  CHECK(refused.code() == absl::StatusCode::kAlreadyExists);
  CHECK_THAT(Message(refused), Catch::Contains("'c'") && Catch::Contains("10.0.0.3:1") &&
                                   Catch::Contains("10.0.0.4:1") && Catch::Contains("try again"));
  f.Do(NodeLost{kThird, "its process was killed"});
  CHECK(f.coordinator().CanJoin("c", "second", "10.0.0.4:1").ok());
}

TEST_CASE("A daemon let its member in before it knew that the member owns the group (P9)") {
  Fixture f;
  TrainerIdentity trainer;
  trainer.identity = "uid:20001";
  f.Report(PeerAttach{MemberId(1), trainer});
  const std::vector<SendCommand> sent = f.Local<SendCommand>();
  const auto at = [&sent](auto is) { return std::find_if(sent.begin(), sent.end(), is); };
  const auto owner = at([](const SendCommand& each) {
    const auto* const command = std::get_if<PeerOwner>(&each.command);
    return command != nullptr && command->owner == "uid:20001";
  });
  const auto welcome =
      at([](const SendCommand& each) { return std::holds_alternative<PeerWelcome>(each.command); });
  REQUIRE(welcome != sent.end());
  CHECK(owner < welcome);
}

TEST_CASE("A member of another daemon for which there is no room is refused with the reason") {
  absl::Status room = absl::OkStatus();
  Fixture f([&room] { return room; });
  EngineIdentity engine;
  engine.instance = "i";
  f.Report(PeerAttach{MemberId(1), engine});
  CHECK(f.Sent<PeerWelcome>().size() == 1);
  room = absl::ResourceExhaustedError("limits.max_members");
  engine.instance = "j";
  f.Report(PeerAttach{MemberId(2), engine});
  REQUIRE(f.Sent<RefuseMember>().size() == 1);
  CHECK(f.Sent<RefuseMember>()[0].member == MemberId(2));
  CHECK(f.Sent<RefuseMember>()[0].status == room);
  room = absl::OkStatus();
  f.Report(PeerAttach{MemberId(3), engine, absl::ResourceExhaustedError("limits.held_bytes")});
  REQUIRE(f.Sent<RefuseMember>().size() == 2);
  CHECK(f.coordinator().remote_members() == 1);
}

// The readiness that a daemon knows after all these messages.
ReadinessBook BookOf(const std::vector<PeerReadiness>& told) {
  ReadinessBook book;
  for (const PeerReadiness& each : told) book.Take(each);
  return book;
}

TEST_CASE("a daemon that joins is sent the readiness of all instances, and then each change") {
  Fixture f;
  REQUIRE(f.Sent<PeerReadiness>().size() == 1);
  CHECK(f.Sent<PeerReadiness>()[0].anew);
  EngineIdentity engine;
  engine.instance = "i";
  f.Report(PeerAttach{kRemoteEngine, engine});
  CHECK_FALSE(BookOf(f.Sent<PeerReadiness>()).Of("i", 0)->ready);
  f.Report(PeerLayout{kRemoteEngine, LayoutOf({Bytes("t", 100)})});
  CHECK(BookOf(f.Sent<PeerReadiness>()).Of("i", 0)->ready);
  CHECK(f.coordinator().readiness()->Of("i", 0)->ready);
  const size_t told = f.Sent<PeerReadiness>().size();
  f.Report(PeerPong{1});  // nothing changes
  CHECK(f.Sent<PeerReadiness>().size() == told);
  f.Forget();
  f.JoinThird();
  REQUIRE(f.Sent<PeerReadiness>().size() == 1);
  CHECK(BookOf(f.Sent<PeerReadiness>()).Of("i", 0)->ready);
  f.Report(MemberLost{kRemoteEngine, "killed"});
  CHECK(f.Sent<PeerReadiness>().size() == 3);  // two daemons
  CHECK_FALSE(BookOf(f.Sent<PeerReadiness>()).Of("i", 0).has_value());
}

// The example of what a version of the protocol adds (proto/protocol.h).
TEST_CASE("a daemon of the protocol version before gets no message that the version added") {
  Fixture f;
  f.Forget();
  f.Do(NodeJoined{kThird, "c", "elsewhere", Protocol::kV0});
  CHECK(f.Sent<PeerReadiness>().empty());
}

TEST_CASE("an instance is ready until its first byte is written, and again from the commit on") {
  Fixture f;
  const auto ready = [&f] { return f.coordinator().readiness()->Of("i", 0)->ready; };
  f.OpenUpdate();
  CHECK(ready());
  CHECK(f.coordinator().readiness()->instances().at("i").standing == Standing::kUpdating);
  f.Push(0, "t");
  CHECK_FALSE(ready());
  f.GrantWire();
  f.FinishPart(0);
  f.Push(1, "u");
  f.FinishPart(1);
  REQUIRE(f.Commit().ok());
  CHECK(ready());
  CHECK(f.coordinator().readiness()->Of("i", 0)->lag == 0);
  EngineIdentity late;
  late.instance = "late";
  late.delivery = DeliveryMode::kLoader;
  f.Report(PeerAttach{MemberId(9), late});
  CHECK_FALSE(f.coordinator().readiness()->Of("late", 5)->ready);
}

// A push to the instances of daemons a, c and d, of 100 bytes a bucket.
struct RunningPush : Fixture {
  RunningPush() {
    JoinThird();
    JoinFourth();
    OpenUpdate();
  }
  // The daemon's share of a part has ended: it has the part, or the closing of the communicator cut
  // it.
  void End(NodeId node, int64_t part, bool whole, uint64_t digest = 42) {
    TransferDone done;
    done.update = update();
    done.part = PartSeq(part);
    done.bytes_written = {whole ? 100 : 0};
    if (whole) {
      done.digests = {digest};
    } else {
      done.status = absl::CancelledError("closed");
      done.wire_failed = true;
    }
    Do(ReportReceived{node, done});
  }
  // This daemon's collective has ended.
  void EndHere(CommunicatorId communicator, uint64_t seq, absl::Status status) {
    Do(WireDone{communicator, WireSeq(seq), std::move(status)});
  }
  // The headers that were sent since the last Forget, by daemon.
  std::map<NodeId, std::vector<PeerHeader>> Headers() const {
    std::map<NodeId, std::vector<PeerHeader>> headers;
    for (const SendCommand& send : Local<SendCommand>()) {
      const auto* header = std::get_if<PeerHeader>(&send.command);
      if (header != nullptr) headers[send.node].push_back(*header);
    }
    return headers;
  }
  // All daemons to which headers were sent since the last Forget agree to them.
  void Acknowledge() {
    for (const auto& [node, headers] : Headers()) {
      for (const PeerHeader& header : headers) {
        Do(ReportReceived{node, PeerHeaderAck{update(), header.part, header.digest, ""}});
      }
    }
  }
  std::vector<PartSeq> Issued(NodeId to) const {
    std::vector<PartSeq> issued;
    for (const SendCommand& send : Local<SendCommand>()) {
      const auto* issue = std::get_if<PeerIssue>(&send.command);
      if (issue != nullptr && send.node == to) issued.push_back(issue->part);
    }
    return issued;
  }
  // Pushes the second bucket to the daemons `in` and commits.
  absl::Status PushRestAndCommit(CommunicatorId communicator, uint64_t seq,
                                 const std::vector<NodeId>& in) {
    Push(1, "u");
    EndHere(communicator, seq, absl::OkStatus());
    for (const NodeId node : in) End(node, 1, true);
    return Commit();
  }
};

TEST_CASE("a part under way when a daemon is lost is sent again, only to those that lack it") {
  RunningPush f;
  f.Push(0, "t");
  f.GrantWire();
  f.Forget();
  const bool before = GENERATE(false, true);
  if (before) f.End(kNode, 0, true);
  f.Do(NodeLost{kThird, "it died"});
  CHECK(f.Sent<OpenCommunicator>().size() == 2);
  if (!before) f.End(kNode, 0, true);
  const bool up_first = GENERATE(false, true);
  if (up_first) f.BringUp(CommunicatorId(2), {kNode, kFourth});
  f.End(kFourth, 0, false);
  // This daemon, too, may still send over the communicator before.
  CHECK(f.Sent<PeerHeader>().empty());
  f.EndHere(kCommunicator, 0, absl::CancelledError("closed"));
  if (!up_first) {
    CHECK(f.Sent<PeerHeader>().empty());
    f.BringUp(CommunicatorId(2), {kNode, kFourth});
  }

  const auto headers = f.Headers();
  REQUIRE(headers.size() == 1);
  REQUIRE(headers.begin()->first == kFourth);
  const PeerHeader& again = headers.begin()->second.at(0);
  CHECK(again.again);
  CHECK(again.communicator == CommunicatorId(2));
  CHECK(again.wire_seq == WireSeq(0));
  CHECK(again.ranks == std::vector<uint32_t>{0, 2});
  CHECK(again.digest == HeaderDigest(again));
  CHECK(f.Local<StartTransfer>().empty());  // the part is packed here already
  CHECK(f.Sent<PeerIssue>().empty());
  f.Acknowledge();  // P5
  CHECK(f.Issued(kFourth) == std::vector{PartSeq(0)});
  CHECK(f.Issued(kNode).empty());
  REQUIRE(f.Local<StartWire>().size() == 1);
  CHECK(f.Local<StartWire>()[0].ranks == again.ranks);
  f.EndHere(CommunicatorId(2), 0, absl::OkStatus());
  CHECK(f.Local<Reply>().empty());
  f.End(kFourth, 0, true);
  REQUIRE(f.Local<Reply>().size() == 1);
  CHECK(f.Local<Reply>()[0].status == absl::OkStatus());
  CHECK(f.PushRestAndCommit(CommunicatorId(2), 1, {kNode, kFourth}) == absl::OkStatus());
}

TEST_CASE("a part that is not issued when a daemon is lost goes over the next communicator") {
  RunningPush f;
  f.Push(0, "t");
  f.Forget();
  f.Do(NodeLost{kThird, "it died"});
  f.End(kNode, 0, false);
  f.End(kFourth, 0, false);
  f.BringUp(CommunicatorId(2), {kNode, kFourth});
  const auto headers = f.Headers();
  REQUIRE(headers.size() == 2);
  CHECK(headers.at(kNode).at(0).ranks == std::vector<uint32_t>{0, 1, 2});
  f.GrantWire();
  CHECK(f.Sent<PeerIssue>().empty());
  f.Acknowledge();
  CHECK(f.Sent<PeerIssue>().size() == 2);
  f.EndHere(CommunicatorId(2), 0, absl::OkStatus());
  f.End(kNode, 0, true);
  f.End(kFourth, 0, true);
  CHECK(f.PushRestAndCommit(CommunicatorId(2), 1, {kNode, kFourth}) == absl::OkStatus());
}

TEST_CASE("buckets that come while a part waits to be sent again go after it") {
  RunningPush f;
  f.Push(0, "t");
  f.GrantWire();
  f.Do(NodeLost{kThird, "it died"});
  f.End(kNode, 0, true);
  f.EndHere(kCommunicator, 0, absl::CancelledError("closed"));
  BucketDraft next = TestGroup::MakeBucket(kTrainer, 1, 1, {Bytes("u", 100)});
  next.call = CallId(11);
  f.Forget();
  f.Do(GroupEvent(BucketEvent(next)));
  const bool up_first = GENERATE(false, true);
  if (up_first) f.BringUp(CommunicatorId(2), {kNode, kFourth});
  CHECK(f.Sent<PeerHeader>().empty());
  f.End(kFourth, 0, false);
  if (!up_first) f.BringUp(CommunicatorId(2), {kNode, kFourth});
  const std::vector<PeerHeader> told = f.Headers().at(kFourth);
  REQUIRE(told.size() == 2);
  CHECK(told[0].part == PartSeq(0));
  CHECK(told[0].wire_seq == WireSeq(0));
  CHECK(told[1].part == PartSeq(1));
  CHECK(told[1].wire_seq == WireSeq(1));
  CHECK_FALSE(told[1].again);
  const StartTransfer pack = f.Local<StartTransfer>().at(0);
  CHECK(pack.part == PartSeq(1));
  f.Do(PeerEvent(TransferDone{pack.update, pack.part, absl::OkStatus(), {}, -1, {42}}));
  f.Acknowledge();
  CHECK(f.Issued(kFourth) == std::vector{PartSeq(0), PartSeq(1)});
  CHECK(f.Issued(kNode) == std::vector{PartSeq(1)});
  f.EndHere(CommunicatorId(2), 0, absl::OkStatus());
  f.EndHere(CommunicatorId(2), 1, absl::OkStatus());
  f.End(kNode, 1, true);
  f.End(kFourth, 1, true);
  CHECK(f.Local<Reply>().size() == 1);  // to the second bucket; the first lacks daemon d
  f.End(kFourth, 0, true);
  CHECK(f.Commit() == absl::OkStatus());
}

TEST_CASE("a part that every remaining daemon has is not sent again") {
  RunningPush f;
  f.Push(0, "t");
  f.GrantWire();
  f.End(kNode, 0, true);
  f.End(kFourth, 0, true);
  f.Forget();
  f.Do(NodeLost{kThird, "it died"});
  f.EndHere(kCommunicator, 0, absl::CancelledError("closed"));
  REQUIRE(f.Local<Reply>().size() == 1);
  CHECK(f.Local<Reply>()[0].status == absl::OkStatus());
  f.BringUp(CommunicatorId(2), {kNode, kFourth});
  CHECK(f.Sent<PeerHeader>().empty());
  CHECK(f.PushRestAndCommit(CommunicatorId(2), 0, {kNode, kFourth}) == absl::OkStatus());
}

TEST_CASE("a push goes on after a second loss, whenever it comes") {
  RunningPush f;
  f.Push(0, "t");
  f.GrantWire();
  f.Forget();
  f.Do(NodeLost{kThird, "it died"});
  const CommunicatorId last(3);
  SECTION("before the shares have ended") {
    f.Do(NodeLost{kFourth, "it died, too"});
    f.EndHere(kCommunicator, 0, absl::CancelledError("closed"));
    f.End(kNode, 0, false);
  }
  SECTION("while the new communicator is formed") {
    f.EndHere(kCommunicator, 0, absl::CancelledError("closed"));
    f.End(kNode, 0, false);
    f.End(kFourth, 0, false);
    f.Do(NodeLost{kFourth, "it died, too"});
  }
  SECTION("while the part is sent again") {
    f.EndHere(kCommunicator, 0, absl::CancelledError("closed"));
    f.End(kNode, 0, false);
    f.End(kFourth, 0, false);
    f.BringUp(CommunicatorId(2), {kNode, kFourth});
    const bool issued = GENERATE(false, true);
    if (issued) f.Acknowledge();
    f.Do(NodeLost{kFourth, "it died, too"});
    if (issued) f.EndHere(CommunicatorId(2), 0, absl::CancelledError("closed"));
    f.End(kNode, 0, false);
  }
  f.Forget();
  f.BringUp(last, {kNode});
  REQUIRE(f.Headers().size() == 1);
  CHECK(f.Headers().at(kNode).at(0).ranks == std::vector<uint32_t>{0, 1});
  CHECK(f.Headers().at(kNode).at(0).communicator == last);
  f.Acknowledge();
  f.EndHere(last, 0, absl::OkStatus());
  f.End(kNode, 0, true);
  CHECK(f.PushRestAndCommit(last, 1, {kNode}) == absl::OkStatus());
}

// P1: what daemons stored before the loss counts as well.
TEST_CASE("a daemon that received other bytes than were sent fails a push that went on") {
  RunningPush f;
  f.Push(0, "t");
  f.GrantWire();
  const bool early = GENERATE(false, true);
  f.End(kNode, 0, true, early ? 43 : 42);
  f.Do(NodeLost{kThird, "it died"});
  f.EndHere(kCommunicator, 0, absl::CancelledError("closed"));
  f.End(kFourth, 0, false);
  f.BringUp(CommunicatorId(2), {kNode, kFourth});
  f.Acknowledge();
  f.EndHere(CommunicatorId(2), 0, absl::OkStatus());
  CHECK(f.Sent<PeerUpdateEnded>().empty());
  f.End(kFourth, 0, true, early ? 42 : 43);
  const auto ended = f.Sent<PeerUpdateEnded>();
  REQUIRE(ended.size() == 2);
  CHECK_THAT(ended[0].reason, Catch::Contains(early ? "what daemon a received is not what daemon b"
                                                    : "what daemon d received is not what daemon"));
}

TEST_CASE("of the daemons of a push, the one that the others wait for is dropped") {
  RunningPush f;
  f.Push(0, "t");
  f.GrantWire();
  f.Forget();
  TransferDone cut;
  cut.update = f.update();
  cut.part = PartSeq(0);
  cut.wire_failed = true;
  cut.status = AboutRanks(absl::DeadlineExceededError("waited 2000 ms for rank 2"), {2});
  f.Do(ReportReceived{kNode, cut});
  f.Do(ReportReceived{kFourth, cut});
  CHECK(f.Local<DropNode>().empty());
  const bool last = GENERATE(false, true);
  if (last) {
    // All nodes have reported.
    f.EndHere(kCommunicator, 0,
              AboutRanks(absl::UnavailableError("the connection to rank 1 broke"), {1}));
    f.End(kThird, 0, true);
  } else {
    f.Wait(std::chrono::milliseconds(600));
    f.EndHere(kCommunicator, 0, absl::CancelledError("closed"));
  }
  const auto dropped = f.Local<DropNode>();
  REQUIRE(dropped.size() == 1);
  CHECK(dropped[0].node == kThird);
  f.BringUp(CommunicatorId(2), {kNode, kFourth});
  CHECK(f.Headers().size() == 2);
  CHECK(f.Sent<PeerUpdateEnded>().empty());
}

TEST_CASE("a push that is given up while a part waits to be sent again ends at once") {
  RunningPush f;
  f.Push(0, "t");
  f.GrantWire();
  f.Do(NodeLost{kThird, "it died"});
  f.End(kNode, 0, false);
  const bool ended = GENERATE(false, true);
  if (ended) {
    f.End(kFourth, 0, false);
    f.EndHere(kCommunicator, 0, absl::CancelledError("closed"));
  }
  f.Do(GroupEvent(OperatorAbort{CallId(40), "enough"}));
  CHECK(f.Sent<PeerUpdateEnded>().empty() == !ended);
  if (!ended) {
    f.End(kFourth, 0, false);
    f.EndHere(kCommunicator, 0, absl::CancelledError("closed"));
  }
  REQUIRE(f.Sent<PeerUpdateEnded>().size() == 2);
  CHECK(f.Sent<PeerUpdateEnded>()[0].outcome == Outcome::kAborted);
}

// When the last other daemon dies, the data plane stops being needed before that daemon's last
// members are evicted.
TEST_CASE("a bucket that waits for the data plane when the last other daemon dies stays here") {
  constexpr MemberId kHere{2};
  Fixture f;
  f.JoinThird();
  EngineIdentity engine;
  engine.instance = "here";
  f.Do(GroupEvent(EngineAttached{kHere, engine}));
  f.Do(GroupEvent(LayoutRegistered{kHere, LayoutOf({Bytes("t", 100), Bytes("u", 100)})}));
  f.Prepare();
  f.BringUp(kCommunicator, {kNode, kThird});
  f.Do(GroupEvent(ReadyEvent{kHere, f.update()}));
  f.ReportAll(ReadyEvent{kRemoteEngine, f.update()});
  f.Do(NodeLost{kThird, "it died"});
  BucketDraft bucket = TestGroup::MakeBucket(kTrainer, 1, 0, {Bytes("t", 100)});
  bucket.call = CallId(10);
  f.Forget();
  f.Do(GroupEvent(BucketEvent(bucket)));
  CHECK(f.Local<StartTransfer>().empty());
  f.Do(NodeLost{kNode, "it died, too"});
  CHECK(f.Local<SendAborted>().empty());
  REQUIRE(f.Local<StartTransfer>().size() == 1);
  const StartTransfer copy = f.Local<StartTransfer>()[0];
  CHECK_FALSE(copy.wired);
  f.Do(PeerEvent(TransferDone{copy.update, copy.part, absl::OkStatus(), {100}}));
  REQUIRE(f.Local<Reply>().size() == 1);
  CHECK(f.Local<Reply>()[0].status == absl::OkStatus());
}

// A refit to the instances of daemons a, c and d while its program runs, which has ten rounds and
// moves nothing here.
struct RunningRefit : Fixture {
  const std::vector<NodeId> daemons = {kNode, kThird, kFourth};

  explicit RunningRefit(Duration slow = {}, bool catch_up = true)
      : Fixture(nullptr, TestGroup::DefaultSpec(), slow) {
    const std::vector<TensorSpec> model = {Bytes("t", 100)};
    Do(NodeJoined{kThird, "c", "elsewhere"});
    Do(NodeJoined{kFourth, "d", "elsewhere"});
    Do(GroupEvent(TrainerAttached{kTrainer, {0, 1, 100, {}, ""}}));
    Do(GroupEvent(LayoutRegistered{kTrainer, LayoutOf(model)}));
    for (const NodeId node : daemons) {
      EngineIdentity engine;
      engine.catch_up = catch_up;
      engine.instance = fmt::format("i{}", node);
      Do(ReportReceived{node, PeerAttach{kRemoteEngine, engine}});
    }
    ToAll(PeerLayout{kRemoteEngine, LayoutOf(model)});
    RefitEvent refit;
    refit.call = CallId(1);
    refit.member = kTrainer;
    refit.version = Version(1);
    Do(GroupEvent(refit));
    Compile();
    id = Sent<PeerPrepare>().at(0).update;
    const BuildProgram build = Local<BuildProgram>().at(0);
    auto made = std::make_shared<NodeProgram>();
    made->sources = build.sources;
    made->rounds = 10;
    Do(ProgramBuilt{build.program, build.build, absl::OkStatus(), made});
    ToAll(PeerProgramBuilt{id, absl::OkStatus(), 10, {}});
    BringUp(CommunicatorId(1), daemons);
    ToAll(ReadyEvent{kRemoteEngine, id});
    AnswerCompare();
    REQUIRE(Sent<StartRefit>().size() == 3);
    CHECK_FALSE(Sent<StartRefit>()[0].resume.has_value());
    Forget();
  }
  // Answers the request to compile a program since the last Forget.
  void Compile() {
    const PlanRefit compile = Local<PlanRefit>().at(0);
    auto plan = std::make_shared<RefitPlan>();
    plan->routes.tensors = {Bytes("t", 100)};
    plan->content = ContentOf(compile.sources, compile.destinations, compile.options);
    plan->routes.wire_bytes = 300;
    Do(GroupEvent(RefitPlanned{compile.program, absl::OkStatus(), plan}));
  }
  void ToAll(const PeerReport& report) {
    for (const NodeId node : daemons) Do(ReportReceived{node, report});
  }
  // A daemon's run was cut, and it lacks that step.
  void Cut(NodeId node, std::optional<int64_t> lacks, uint32_t attempt = 0,
           absl::Status why = absl::CancelledError("closed")) {
    RefitDone done;
    done.update = id;
    done.status = std::move(why);
    done.wire_failed = true;
    done.bytes_written = {40};
    done.attempt = attempt;
    done.lacks = lacks;
    Do(ReportReceived{node, done});
    if (reads_back) {
      Do(ReportReceived{node, VerifyDone{id, absl::CancelledError("its run was cut"), {}}});
    }
  }
  bool reads_back = true;  // daemons answer for their read-back at once
  UpdateId id;
};

TEST_CASE("a refit that runs shows what nodes have reported of it") {
  RunningRefit f;
  const auto moved = [&f] { return f.View().group.update->bytes; };
  CHECK(f.View().group.update->total_bytes == 100);
  CHECK(moved() == 0);
  RefitDone done;
  done.update = f.id;
  done.bytes_written = {100};
  int64_t before = 0;
  for (const NodeId node : {f.daemons[0], f.daemons[1]}) {
    f.Do(ReportReceived{node, done});
    CHECK(moved() > before);
    CHECK(moved() < 100);
    before = moved();
  }
  CHECK(before == 66);  // of three instances of 100 bytes, two have all
}

TEST_CASE("a refit goes on from the first step that a survivor lacks") {
  RunningRefit f;
  f.Do(NodeLost{kThird, "it died"});
  f.Cut(kNode, 6);
  CHECK(f.Sent<StartRefit>().empty());
  f.Cut(kFourth, 4);
  const std::vector<StartRefit> runs = f.Sent<StartRefit>();
  REQUIRE(runs.size() == 2);
  CHECK(runs[0].attempt == 1);
  CHECK(runs[0].resume == 4);
}

TEST_CASE("a refit runs from its beginning where a survivor can't say what it lacks") {
  RunningRefit f;
  f.Do(NodeLost{kThird, "it died"});
  f.Cut(kNode, 6);
  f.Cut(kFourth, std::nullopt);
  const std::vector<StartRefit> runs = f.Sent<StartRefit>();
  REQUIRE(runs.size() == 2);
  CHECK(runs[0].attempt == 1);
  CHECK_FALSE(runs[0].resume.has_value());
}

TEST_CASE("a second daemon that dies while the loss of the first is handled costs only itself") {
  RunningRefit f;
  f.Do(NodeLost{kThird, "it died"});
  f.Cut(kNode, 6);
  SECTION("before its run has ended") {}
  SECTION("after its run has ended, in the next attempt") { f.Cut(kFourth, 4); }
  SECTION("after its run has ended, before its read-back has") {
    f.reads_back = false;
    f.Cut(kFourth, 4);
    f.reads_back = true;
  }
  f.Forget();
  f.Do(NodeLost{kFourth, "it died, too"});
  f.Cut(kNode, 6, 1);  // counts only if attempt 1 had begun; else it is ignored
  CHECK(f.Sent<PeerUpdateEnded>().empty());
  const std::vector<StartRefit> runs = f.Sent<StartRefit>();
  REQUIRE_FALSE(runs.empty());
  CHECK(runs.back().resume == 6);
  CHECK(f.Sent<OpenCommunicator>().back().size == 2);
}

TEST_CASE("a daemon that read back before a refit went on reads back again before the commit") {
  RunningRefit f;
  f.reads_back = false;
  f.Do(NodeLost{kThird, "it died"});
  f.Cut(kNode, 10);
  f.Do(ReportReceived{kNode, VerifyDone{f.id, absl::OkStatus(), {}}});
  f.Forget();
  f.Cut(kFourth, 4);
  f.Do(ReportReceived{kFourth, VerifyDone{f.id, absl::CancelledError("cut"), {}}});
  CHECK(f.Sent<VerifyUpdate>().size() == 2);
  const std::vector<NodeId> survivors = {kNode, kFourth};
  f.BringUp(CommunicatorId(2), survivors);
  // This daemon's own share, which is without moves, ends when it is issued.
  f.Do(ReportReceived{kNode, PeerWireGranted{f.id}});
  f.Do(WireGranted{});
  f.Do(ReportReceived{kFourth, PeerWireGranted{f.id}});
  for (const NodeId node : survivors) {
    RefitDone done;
    done.update = f.id;
    done.bytes_written = {100};
    done.attempt = 1;
    done.lacks = 10;
    f.Do(ReportReceived{node, done});
  }
  f.Do(ReportReceived{kFourth, VerifyDone{f.id, absl::OkStatus(), {}}});
  CHECK(f.Sent<PeerUpdateEnded>().empty());
  f.Do(ReportReceived{kNode, VerifyDone{f.id, absl::OkStatus(), {}}});
  REQUIRE_FALSE(f.Sent<PeerUpdateEnded>().empty());
  CHECK(f.Sent<PeerUpdateEnded>()[0].outcome == Outcome::kCommitted);
}

TEST_CASE("of two daemons whose wire fails, the one that more others name is dropped") {
  RunningRefit f;
  const NodeId culprit = GENERATE(kNode, kThird);
  const NodeId other = culprit == kNode ? kThird : kNode;
  // Here ranks of the communicator are the numbers of nodes.
  const auto waited = [](NodeId rank) {
    return AboutRanks(absl::DeadlineExceededError(fmt::format("waited 2000 ms for rank {}", rank)),
                      {static_cast<int>(rank.value())});
  };
  f.Cut(other, 3, 0, waited(culprit));
  f.Cut(kFourth, 4, 0, waited(culprit));
  f.Cut(culprit, 5, 0, waited(other));
  f.Wait(std::chrono::milliseconds(600));
  const auto dropped = f.Local<DropNode>();
  REQUIRE(dropped.size() == 1);
  CHECK(dropped[0].node == culprit);
  CHECK_THAT(std::string(dropped[0].status.message()),
             Catch::Contains(culprit == kNode ? "rank 1 is daemon a" : "rank 2 is daemon c"));
  CHECK(f.Sent<PeerUpdateEnded>().empty());
  // This daemon has ended its run, too, once the communicator is closed.
  const std::vector<StartRefit> runs = f.Sent<StartRefit>();
  REQUIRE(runs.size() == 2);
  CHECK(runs[0].resume == 3);
}

// Commits the running refit to the daemons `in`. By their reports, the links between them were busy
// for 1 s, but those to daemon c for 4 s if `slow`.
void EndRefit(RunningRefit* f, const std::vector<NodeId>& in, bool slow) {
  f->AnswerCompare();
  f->Forget();
  for (const NodeId node : in) {
    f->Do(ReportReceived{node, PeerWireGranted{f->id}});
    if (node == kNode) f->Do(WireGranted{});
  }
  for (const NodeId node : in) {
    RefitDone done;
    done.update = f->id;
    done.bytes_written = {100};
    done.lacks = 10;
    for (const NodeId to : in) {
      const bool slowed = slow && to == kThird;
      if (to == node) continue;
      done.links.push_back(
          {static_cast<uint32_t>(to.value()), 40'000'000, std::chrono::seconds(slowed ? 4 : 1)});
    }
    f->Do(ReportReceived{node, done});
  }
  for (const NodeId node : in) f->Do(ReportReceived{node, VerifyDone{f->id, absl::OkStatus(), {}}});
  REQUIRE_FALSE(f->Sent<PeerUpdateEnded>().empty());
  CHECK(f->Sent<PeerUpdateEnded>()[0].outcome == Outcome::kCommitted);
  f->Forget();
}

void BeginRefit(RunningRefit* f, int64_t version) {
  RefitEvent refit;
  refit.call = CallId(static_cast<uint64_t>(version));
  refit.member = kTrainer;
  refit.version = Version(version);
  f->Forget();
  f->Do(GroupEvent(refit));
  if (!f->Local<PlanRefit>().empty()) f->Compile();
  f->id = f->Sent<PeerPrepare>().at(0).update;
}

std::string WhySlow(const RunningRefit& f) {
  for (const NodeView& node : f.View().nodes) {
    if (node.daemon_id == "c") return node.slow;
    CHECK(node.slow.empty());
  }
  return "no daemon c";
}

TEST_CASE("a daemon that held a refit back is left out of the next, and its instance catches up") {
  const bool slow = GENERATE(true, false);
  // Without catch-ups nothing would bring the slow daemon the version.
  const bool catch_up = GENERATE(true, false);
  RunningRefit f(std::chrono::seconds(2), catch_up);
  EndRefit(&f, f.daemons, slow);
  if (!slow || !catch_up) {
    CHECK(WhySlow(f).empty());
    BeginRefit(&f, 2);
    CHECK(f.Sent<PeerAbandon>().empty());
    return;
  }
  CHECK_THAT(WhySlow(f),
             Catch::Contains("held the others back by 3 s (peers.relay_slow_ms 2000)") &&
                 Catch::Contains("10.0 MB/s, the others 40.0 MB/s"));
  BeginRefit(&f, 2);
  CHECK(f.Sent<PeerAbandon>().size() == 1);
  REQUIRE(f.Sent<OpenCommunicator>().size() == 2);  // to daemons a and d
  const std::vector<NodeId> others = {kNode, kFourth};
  for (const NodeId node : others) {
    f.Do(ReportReceived{node, PeerProgramBuilt{f.id, absl::OkStatus(), 10, {}}});
  }
  f.BringUp(f.Local<OpenCommunicator>().at(0).communicator, others);
  for (const NodeId node : others) f.Do(ReportReceived{node, ReadyEvent{kRemoteEngine, f.id}});
  EndRefit(&f, others, false);
  CHECK_FALSE(WhySlow(f).empty());
  f.Wait(std::chrono::seconds(5));
  CHECK(f.Local<PlanRefit>().size() == 1);
  f.Do(NodeLost{kThird, "it died"});
  CHECK(WhySlow(f) == "no daemon c");
}

TEST_CASE("the only instance of a refit is not left out, however slow its daemon is") {
  RunningRefit f(std::chrono::seconds(2));
  EndRefit(&f, f.daemons, true);
  f.Do(NodeLost{kNode, "it died"});
  f.Do(NodeLost{kFourth, "it died"});
  REQUIRE_FALSE(WhySlow(f).empty());
  BeginRefit(&f, 2);
  CHECK(f.Sent<PeerPrepare>().size() == 1);
  CHECK(f.Sent<PeerAbandon>().empty());
}

}  // namespace
}  // namespace refitd
