#include "daemon/group/follower.h"

#include <malloc.h>

#include <catch2/catch.hpp>
#include <optional>
#include <utility>
#include <vector>

#include "daemon/group/group_test_util.h"
#include "transport/base/status.h"

namespace refitd {
namespace {

using Catch::Contains;

constexpr MemberId kEngine{7};
constexpr CallId kCall{3};

// A daemon that joined, with one in-place engine rank, and its actions since it was made.
class Fixture {
 public:
  Fixture() : follower_(MakeOptions()) {
    EngineIdentity engine;
    engine.instance = "i";
    Do(GroupEvent(EngineAttached{kEngine, engine}));
    Join();
    Do(CommandReceived{PeerWelcome{kEngine, std::nullopt}});
  }
  // A daemon without members that has not joined.
  explicit Fixture(std::nullopt_t /*nobody*/) : follower_(MakeOptions()) {}

  void Join() { Do(LinkUp{7, TestGroup::DefaultSpec(), std::nullopt, "a"}); }
  // Attaches a loader rank on a GPU.
  void AttachLoader(MemberId member) {
    EngineAttached attached{member, {}};
    attached.identity.instance = "loader";
    attached.identity.delivery = DeliveryMode::kLoader;
    attached.awaits_slots = true;
    Do(GroupEvent(attached));
  }

  void Forget() { actions_.clear(); }
  void Do(MachineEvent event) {
    follower_.Handle(event, now_, &actions_);
    follower_.CheckInvariants();
  }
  void Command(PeerCommand command) { Do(CommandReceived{std::move(command)}); }
  void Register(CallId call, const std::string& tensor = "t") {
    Do(GroupEvent(LayoutRegistered{kEngine, LayoutOf({Bytes(tensor, 100)}), call}));
  }

  template <typename Report>
  std::vector<Report> Sent() const {
    std::vector<Report> found;
    for (const SendReport& send : Peers<SendReport>()) {
      if (const auto* r = std::get_if<Report>(&send.report)) found.push_back(*r);
    }
    return found;
  }
  template <typename Action>
  std::vector<Action> Own() const {
    std::vector<Action> found;
    for (const MachineAction& action : actions_) {
      const auto* own = std::get_if<GroupAction>(&action);
      const auto* a = own == nullptr ? nullptr : std::get_if<Action>(own);
      if (a != nullptr) found.push_back(*a);
    }
    return found;
  }
  template <typename Action>
  std::vector<Action> Peers() const {
    std::vector<Action> found;
    for (const MachineAction& action : actions_) {
      const auto* peer = std::get_if<PeerAction>(&action);
      const auto* a = peer == nullptr ? nullptr : std::get_if<Action>(peer);
      if (a != nullptr) found.push_back(*a);
    }
    return found;
  }
  std::vector<Reply> Replies() const { return Own<Reply>(); }
  // The digest of the layout in force; 0: there is none.
  uint64_t Digest() const {
    const std::vector<MemberView> members = follower_.View(now_).group.members;
    return members.empty() ? 0 : members[0].layout_digest;
  }
  const Follower& follower() const { return follower_; }
  TimePoint now() const { return now_; }
  // A second passes, or less if something is due before.
  void TickWhenDue() {
    now_ = std::min(now_ + std::chrono::seconds(1), follower_.NextDeadline().value_or(now_));
    Do(GroupEvent(Tick{}));
  }

 private:
  FollowerOptions MakeOptions() {
    FollowerOptions options;
    options.name = "g";
    options.coordinator_address = "elsewhere";
    options.next_update = [this] { return UpdateId(++updates_); };
    return options;
  }

  uint64_t updates_ = 0;
  TimePoint now_{std::chrono::hours(1)};
  Follower follower_;
  MachineActions actions_;
};

TEST_CASE("a joined daemon takes up how many trainer ranks there are now") {
  Fixture f;
  f.Command(PeerWelcome{MemberId(99), std::nullopt, 3});
  // The welcome of a member that is gone has no effect.
  CHECK(f.follower().spec().trainer_ranks == 1);
  f.Command(PeerWelcome{kEngine, std::nullopt, 3});
  CHECK(f.follower().spec().trainer_ranks == 3);
  PeerPrepare prepare;
  prepare.update = UpdateId(5);
  prepare.trainer_ranks = 4;
  f.Command(prepare);
  CHECK(f.follower().spec().trainer_ranks == 4);
}

TEST_CASE("a joined daemon sends its trainers' rollbacks on, and refuses an operator's") {
  Fixture f;
  constexpr MemberId kTrainer{8};
  f.Do(GroupEvent(TrainerAttached{kTrainer, {}}));
  f.Command(PeerWelcome{kTrainer, Version(3), 1, Version(1)});
  CHECK(f.follower().version() == Version(3));
  CHECK(f.follower().content() == Version(1));
  f.Do(GroupEvent(RollbackEvent{.call = CallId(4), .member = kTrainer, .request_id = "r"}));
  f.Do(GroupEvent(ReleasePreviousEvent{CallId(5), kTrainer}));
  CHECK(f.Sent<PeerCall>().size() == 2);
  CHECK(f.Replies().empty());
  CommitReply done{Version(5), {}, 0, {}, {}, {}};
  done.content = Version(3);
  f.Command(Reply{CallId(4), absl::OkStatus(), done});
  REQUIRE(f.Replies().size() == 1);
  CHECK(std::get<CommitReply>(f.Replies()[0].payload).content == Version(3));
  f.Command(Reply{CallId(5), absl::OkStatus(), EmptyReply{}});
  f.Forget();
  f.Do(GroupEvent(RollbackEvent{.call = CallId(6), .member = {}, .request_id = ""}));
  f.Do(GroupEvent(ReleasePreviousEvent{CallId(7), {}}));
  CHECK(f.Sent<PeerCall>().empty());
  REQUIRE(f.Replies().size() == 2);
  for (const Reply& reply : f.Replies()) {
    CHECK_THAT(std::string(reply.status.message()), Contains("elsewhere"));
  }
  // A trainer gets the new number, and the rollback is no update that GetUpdate knows.
  f.Command(MemberAction(SendCommitted{kTrainer, Version(5), 0, "", 0, Version(3)}));
  CHECK(f.follower().version() == Version(5));
  CHECK(f.follower().content() == Version(3));
  f.Command(MemberAction(SendCommitted{kTrainer, Version(6)}));
  CHECK(f.follower().content() == std::nullopt);
}

TEST_CASE("RegisterLayout was answered before the coordinator had the layout") {
  Fixture f;
  f.Register(kCall);
  REQUIRE(f.Sent<PeerLayout>().size() == 1);
  CHECK(f.Sent<PeerLayout>()[0].call == kCall);
  CHECK(f.Replies().empty());
  CHECK(f.Digest() == 0);
  f.Command(Reply{kCall, absl::OkStatus(), EmptyReply{}});
  REQUIRE(f.Replies().size() == 1);
  CHECK(f.Replies()[0].call == kCall);
  CHECK(f.Replies()[0].status.ok());
  CHECK(f.Digest() == LayoutOf({Bytes("t", 100)})->Digest());
}

TEST_CASE("a layout that the coordinator refuses leaves the one before in force") {
  Fixture f;
  f.Register(kCall);
  f.Command(Reply{kCall, absl::OkStatus(), EmptyReply{}});
  f.Register(CallId(4), "u");
  f.Command(Reply{CallId(4), absl::FailedPreconditionError("an update runs"), EmptyReply{}});
  REQUIRE(f.Replies().size() == 2);
  CHECK(f.Replies()[1].status == absl::FailedPreconditionError("an update runs"));
  CHECK(f.Digest() == LayoutOf({Bytes("t", 100)})->Digest());
}

TEST_CASE("a layout that is on its way is answered when the coordinator or the member is lost") {
  Fixture f;
  f.Register(kCall);
  absl::StatusCode code{};
  SECTION("the coordinator") {
    f.Do(LinkLost{absl::UnavailableError("gone")});
    code = absl::StatusCode::kUnavailable;
  }
  SECTION("the member") {
    f.Do(GroupEvent(MemberLost{kEngine, "its process died"}));
    code = absl::StatusCode::kUnauthenticated;
  }
  SECTION("its attachment is refused") {
    f.Command(RefuseMember{kEngine, absl::AbortedError("attach again")});
    code = absl::StatusCode::kAborted;
  }
  REQUIRE(f.Replies().size() == 1);
  CHECK(f.Replies()[0].call == kCall);
  CHECK(f.Replies()[0].status.code() == code);
  // A late answer has no effect.
  f.Command(Reply{kCall, absl::OkStatus(), EmptyReply{}});
  CHECK(f.Replies().size() == 1);
  CHECK(f.follower().finished());
}

TEST_CASE("a trainer's layout that is on its way was forgotten when the group was replaced") {
  Fixture f;
  constexpr MemberId kTrainer{8};
  f.Do(GroupEvent(TrainerAttached{kTrainer, TrainerIdentity{}}));
  f.Command(PeerWelcome{kTrainer, std::nullopt});
  f.Do(GroupEvent(LayoutRegistered{kTrainer, LayoutOf({Bytes("t", 100)}), kCall}));
  REQUIRE(f.Sent<PeerLayout>().size() == 1);
  f.Command(PeerIncarnation{9});
  REQUIRE(f.Replies().size() == 1);
  CHECK(f.Replies()[0].call == kCall);
  CHECK(f.Replies()[0].status.code() == absl::StatusCode::kAborted);
}

// A trainer has a call under way while no other member is left.
void LeaveWithCall(Fixture* f, const MachineEvent& goes) {
  constexpr MemberId kTrainer{8};
  f->Do(GroupEvent(TrainerAttached{kTrainer, TrainerIdentity{}}));
  f->Command(PeerWelcome{kTrainer, std::nullopt});
  f->Do(GroupEvent(MemberLost{kEngine, "its process died"}));
  BucketEvent bucket;
  bucket.call = kCall;
  bucket.member = kTrainer;
  f->Do(GroupEvent(bucket));
  f->Do(goes);
}

TEST_CASE("a daemon whose last member went with a call unanswered leaves with the answer") {
  Fixture f;
  SECTION("it died") { LeaveWithCall(&f, GroupEvent(MemberLost{MemberId(8), "its process died"})); }
  SECTION("the group was replaced") { LeaveWithCall(&f, CommandReceived{PeerIncarnation{9}}); }
  CHECK_FALSE(f.follower().has_members());
  CHECK(f.Peers<CloseLink>().empty());
  CHECK_FALSE(f.follower().finished());
  f.Command(Reply{kCall, absl::AbortedError("its trainer is gone"), EmptyReply{}});
  CHECK(f.Replies().size() == 1);
  CHECK(f.Peers<CloseLink>().size() == 1);
  CHECK(f.follower().finished());
}

TEST_CASE("a daemon that has joined and waits for its first member stays") {
  Fixture f{std::nullopt};
  f.Join();
  f.Command(PeerPing{1});
  CHECK(f.Peers<CloseLink>().empty());
  CHECK_FALSE(f.follower().finished());
}

TEST_CASE("a rank that takes part in an update registers nothing") {
  Fixture f;
  PeerPrepare prepare;
  prepare.update = UpdateId(1);
  prepare.version = Version(1);
  prepare.engines = {kEngine};
  f.Command(prepare);
  f.Register(kCall);
  CHECK(f.Sent<PeerLayout>().empty());
  REQUIRE(f.Replies().size() == 1);
  CHECK_THAT(Message(f.Replies()[0].status), Contains("takes part in the running update"));
}

constexpr MemberId kStaged{8};
constexpr MemberId kOther{9};

TEST_CASE("a loader rank on a GPU is made known once it has slots, whose size the join brings") {
  Fixture f{std::nullopt};
  f.AttachLoader(kStaged);
  CHECK(f.Peers<MakeSlots>().empty());
  f.Join();
  REQUIRE(f.Peers<MakeSlots>().size() == 1);
  CHECK(f.Peers<MakeSlots>()[0].member == kStaged);
  CHECK(f.Sent<PeerAttach>().empty());
  SECTION("they are there") {
    f.Do(SlotsMade{kStaged, absl::OkStatus()});
    REQUIRE(f.Sent<PeerAttach>().size() == 1);
    CHECK(f.Sent<PeerAttach>()[0].member == kStaged);
    f.Do(SlotsMade{kStaged, absl::OkStatus()});
    CHECK(f.Sent<PeerAttach>().size() == 1);
    // The next rank attaches after the daemon has joined.
    f.AttachLoader(kOther);
    REQUIRE(f.Peers<MakeSlots>().size() == 2);
    f.Do(SlotsMade{kOther, absl::OkStatus()});
    CHECK(f.Sent<PeerAttach>().size() == 2);
  }
  SECTION("there is no room: nobody is left, and the daemon leaves") {
    f.Do(SlotsMade{kStaged, absl::ResourceExhaustedError("no room")});
    REQUIRE(f.Own<RefuseMember>().size() == 1);
    CHECK(f.Own<RefuseMember>()[0].status == absl::ResourceExhaustedError("no room"));
    CHECK(f.Peers<CloseLink>().size() == 1);
    CHECK(f.follower().finished());
  }
  SECTION("the rank is lost meanwhile") {
    f.Do(GroupEvent(MemberLost{kStaged, "its process died"}));
    f.Do(SlotsMade{kStaged, absl::OkStatus()});
    CHECK(f.Own<RefuseMember>().empty());
    CHECK(f.follower().finished());
  }
  SECTION("the coordinator is lost meanwhile") {
    f.Do(LinkLost{absl::UnavailableError("gone")});
    REQUIRE(f.Own<RefuseMember>().size() == 1);
    CHECK(f.Own<RefuseMember>()[0].status.code() == absl::StatusCode::kUnavailable);
    f.Do(SlotsMade{kStaged, absl::OkStatus()});
    CHECK(f.follower().finished());
  }
  CHECK(f.Sent<PeerAttach>().size() == (f.follower().finished() ? 0 : 2));
}

// One part that crosses to this daemon for its loader ranks.
PeerHeader Crossing(Verification verification, std::vector<MemberId> readers) {
  const SlotGrant slot{SlotIndex(2), GrantId(5)};
  BucketDraft bucket = TestGroup::MakeBucket(MemberId(), 1, 0, {Bytes("t", 100)});
  bucket.LieIn(slot, {0});
  PeerHeader header;
  header.update = UpdateId(1);
  header.version = Version(1);
  header.content = std::make_shared<const PartContent>(WholeBucket(BucketEvent(bucket).bucket));
  header.slot = slot;
  header.verification = verification;
  header.digest = HeaderDigest(header);
  header.wired = true;
  header.communicator = CommunicatorId(1);
  header.ranks = {0, 1};
  header.readers = std::move(readers);
  return header;
}

TEST_CASE(
    "what crossed is packed for the loader ranks that the header names, and handed to these") {
  Fixture f;
  for (const MemberId member : {kStaged, kOther}) {
    f.AttachLoader(member);
    f.Do(SlotsMade{member, absl::OkStatus()});
    f.Command(PeerWelcome{member, std::nullopt});
  }
  PeerPrepare prepare;
  prepare.update = UpdateId(1);
  prepare.version = Version(1);
  prepare.engines = {kStaged, kOther};
  f.Command(prepare);
  f.Command(OpenCommunicator{CommunicatorId(1), 1, 2});
  const auto verification = GENERATE(Verification::kOff, Verification::kTransfer);
  const bool dies = GENERATE(false, true);
  f.Command(Crossing(verification, dies ? std::vector{kStaged, kOther} : std::vector{kStaged}));
  REQUIRE(f.Sent<PeerHeaderAck>().size() == 1);
  CHECK(f.Sent<PeerHeaderAck>()[0].mismatch.empty());
  f.Command(PeerIssue{UpdateId(1), PartSeq(0)});
  CHECK(f.Peers<StartTransfer>().empty());
  if (dies) f.Do(GroupEvent(MemberLost{kOther, "its process died"}));
  f.Do(WireDone{CommunicatorId(1), WireSeq(0), absl::OkStatus()});

  // The part is copied even if nothing is verified.
  REQUIRE(f.Peers<StartTransfer>().size() == 1);
  const StartTransfer start = f.Peers<StartTransfer>()[0];
  CHECK(start.readers == std::vector{kStaged});
  REQUIRE(start.source_slot.has_value());
  CHECK(start.source_slot->slot == SlotIndex(2));
  CHECK_FALSE(start.fill_slot.has_value());
  CHECK_FALSE(start.wired);
  CHECK(f.Sent<TransferDone>().empty());
  f.Do(PeerEvent(TransferDone{start.update, start.part, absl::OkStatus(), {}, -1, {42}}));
  REQUIRE(f.Sent<TransferDone>().size() == 1);
  CHECK(f.Sent<TransferDone>()[0].status.ok());

  f.Command(SendPart{kStaged, UpdateId(1), Version(1), PartSeq(0), {}, {}});
  REQUIRE(f.Own<SendPart>().size() == 1);
  CHECK(f.Own<SendPart>()[0].member == kStaged);
  CHECK(f.Own<SendPart>()[0].slot.slot == SlotIndex(2));
  CHECK(f.Own<SendPart>()[0].content->tensor(0).name == "t");
  CHECK(f.Sent<EngineFailed>().empty());
  // No slot was filled for these ranks (P1).
  f.Command(SendPart{kOther, UpdateId(1), Version(1), PartSeq(0), {}, {}});
  f.Command(SendPart{kStaged, UpdateId(1), Version(1), PartSeq(1), {}, {}});
  CHECK(f.Own<SendPart>().size() == 1);
  REQUIRE(f.Sent<EngineFailed>().size() == (dies ? 1 : 2));
  CHECK(f.Sent<EngineFailed>()[0].member == (dies ? kStaged : kOther));
  CHECK_THAT(f.Sent<EngineFailed>()[0].reason,
             Contains(dies ? "no slot of it is known" : "header did not say"));
}

// A program of update 1 without moves, whose one destination is this rank.
PeerProgram MovesTo(MemberId engine) {
  PeerProgram program;
  program.update = UpdateId(1);
  program.program = ProgramId(1);
  program.destinations = {{0, engine}};
  program.plan = std::make_shared<RoutePlan>();
  program.replicas = std::make_shared<std::vector<ReplicaShare>>();
  return program;
}

// Prepare of update 1, whose one destination is kEngine with a layout of that digest.
PeerPrepare PrepareEngine(uint64_t digest) {
  PeerPrepare prepare;
  prepare.update = UpdateId(1);
  prepare.version = Version(1);
  prepare.engines = prepare.destinations = {kEngine};
  prepare.layout_digests = {digest};
  return prepare;
}

// The coordinator's Prepare and the report of the loss may cross; until the report arrives, the
// coordinator counts on the rank.
TEST_CASE("a rank that died just before Prepare came is planned with what it had") {
  Fixture f;
  f.AttachLoader(kStaged);  // without it the daemon would leave with its last member
  f.Do(SlotsMade{kStaged, absl::OkStatus()});
  f.Register(kCall);
  f.Command(Reply{kCall, absl::OkStatus(), EmptyReply{}});
  PeerPrepare prepare = PrepareEngine(f.Digest());
  f.Do(GroupEvent(MemberLost{kEngine, "its process died"}));
  f.Command(prepare);
  f.Command(MovesTo(kEngine));
  REQUIRE(f.Peers<BuildProgram>().size() == 1);
  const BuildProgram build = f.Peers<BuildProgram>()[0];
  REQUIRE(build.destinations.size() == 1);
  REQUIRE(build.destinations[0].layout != nullptr);
  CHECK(build.destinations[0].layout->Digest() == prepare.layout_digests[0]);
}

// An engine that was evicted while the program was made may register any layout: the plan uses the
// layout of Prepare.
TEST_CASE("a program was bound to what an evicted engine registered after Prepare") {
  Fixture f;
  f.Register(kCall);
  f.Command(Reply{kCall, absl::OkStatus(), EmptyReply{}});
  const uint64_t digest = f.Digest();
  const PeerPrepare prepare = PrepareEngine(digest);
  f.Command(prepare);
  const bool built_before = GENERATE(false, true);
  if (built_before) f.Command(MovesTo(kEngine));
  f.Command(SendAborted{kEngine, Version(1), "evicted", false});
  f.Register(CallId(4), "another");
  f.Command(Reply{CallId(4), absl::OkStatus(), EmptyReply{}});
  CHECK(f.Digest() != digest);
  if (!built_before) f.Command(MovesTo(kEngine));
  REQUIRE(f.Peers<BuildProgram>().size() == 1);
  const BuildProgram build = f.Peers<BuildProgram>()[0];
  REQUIRE(build.destinations.size() == 1);
  REQUIRE(build.destinations[0].layout != nullptr);
  CHECK(build.destinations[0].layout->Digest() == digest);
  auto made = std::make_shared<NodeProgram>();
  made->destinations = build.destinations;
  f.Do(ProgramBuilt{build.program, build.build, absl::OkStatus(), made});
  CHECK(f.Peers<BuildProgram>().size() == 1);
  REQUIRE(f.Sent<PeerProgramBuilt>().size() == 1);
  CHECK(f.Sent<PeerProgramBuilt>()[0].status == absl::OkStatus());
}

// If it went on, a long plan would keep the planner from other groups.
TEST_CASE("a program was built on after its update had ended") {
  Fixture f;
  f.Register(kCall);
  f.Command(Reply{kCall, absl::OkStatus(), EmptyReply{}});
  PeerPrepare prepare = PrepareEngine(f.Digest());
  f.Command(prepare);
  f.Command(MovesTo(kEngine));
  REQUIRE(f.Peers<BuildProgram>().size() == 1);
  const BuildProgram build = f.Peers<BuildProgram>()[0];
  REQUIRE(build.options.cancelled != nullptr);
  CHECK_FALSE(*build.options.cancelled);
  PeerUpdateEnded ended;
  ended.update = UpdateId(1);
  f.Command(ended);
  CHECK(*build.options.cancelled);

  // The next update runs the same program: it asks for a build of its own.
  prepare.update = UpdateId(2);
  prepare.version = Version(2);
  f.Command(prepare);
  PeerProgram program = MovesTo(kEngine);
  program.update = UpdateId(2);
  program.plan = nullptr;
  program.replicas = nullptr;
  f.Command(program);
  f.Do(ProgramBuilt{build.program, build.build, absl::CancelledError("cancelled"), nullptr});
  REQUIRE(f.Peers<BuildProgram>().size() == 2);
  const BuildProgram again = f.Peers<BuildProgram>()[1];
  CHECK_FALSE(*again.options.cancelled);
  auto made = std::make_shared<NodeProgram>();
  made->destinations = again.destinations;
  f.Do(ProgramBuilt{again.program, again.build, absl::OkStatus(), made});
  REQUIRE(f.Sent<PeerProgramBuilt>().size() == 1);
  CHECK(f.Sent<PeerProgramBuilt>()[0].update == UpdateId(2));
  CHECK(f.Sent<PeerProgramBuilt>()[0].status == absl::OkStatus());
}

// An update whose program receives four rounds of 64 bytes. Its run is cut on the wire in the
// second round.
struct CutRun : Fixture {
  explicit CutRun(absl::Status unpacked = absl::OkStatus()) {
    Register(kCall);
    Command(Reply{kCall, absl::OkStatus(), EmptyReply{}});
    Command(PrepareEngine(Digest()));
    PeerProgram program = MovesTo(kEngine);
    program.node = 1;
    Command(program);
    const BuildProgram build = Peers<BuildProgram>().at(0);
    auto made = std::make_shared<NodeProgram>();
    made->node = 1;
    made->destinations = build.destinations;
    made->rounds = 4;
    // Bytes that rank 0 was sent before this run do not count.
    const std::vector<WireUse> before = {{7000, std::chrono::seconds(9)}, {}};
    const std::vector<WireUse> after = {{7100, std::chrono::seconds(10)}, {}};
    Stream stream;
    stream.bytes = 256;
    stream.step = 64;
    made->incoming = {stream};
    Do(ProgramBuilt{build.program, build.build, absl::OkStatus(), made});
    Run(CommunicatorId(1), 0, std::nullopt);
    REQUIRE(Peers<StartExchange>().size() == 1);
    Do(WireDone{CommunicatorId(1), WireSeq(0), absl::OkStatus(), before});
    REQUIRE(Peers<StartMoves>().size() == 1);
    MovesDone moved;
    moved.update = Peers<StartMoves>()[0].update;
    moved.step = MoveStep::kUnpack;
    moved.bytes_written = {64};
    moved.status = std::move(unpacked);
    const bool stored = moved.status.ok();
    Do(moved);
    if (stored) Do(WireDone{CommunicatorId(1), WireSeq(1), absl::CancelledError("closed"), after});
    REQUIRE(Sent<RefitDone>().size() == 1);
    first = Sent<RefitDone>()[0];
    Forget();
  }
  void Run(CommunicatorId communicator, uint32_t attempt, std::optional<int64_t> resume) {
    Command(OpenCommunicator{communicator, 1, 2});
    StartRefit run;
    run.update = UpdateId(1);
    run.part = PartSeq(0);
    run.wired = true;
    run.communicator = communicator;
    run.wire_seq = WireSeq(0);
    run.ranks = {0, 1};
    run.slots.resize(2);
    run.skip = {false};
    run.attempt = attempt;
    run.resume = resume;
    Command(run);
    Command(PeerIssue{UpdateId(1), PartSeq(0)});
  }
  RefitDone first;  // what the run that was cut reported
};

TEST_CASE("a daemon goes on from the step that it lacks, or from an earlier step") {
  CutRun f;
  CHECK(f.first.wire_failed);
  CHECK(f.first.lacks == 1);
  REQUIRE(f.first.links.size() == 1);
  CHECK(f.first.links[0].peer == 0);
  CHECK(f.first.links[0].bytes == 100);
  CHECK(f.first.links[0].busy == std::chrono::seconds(1));
  const int64_t resume = GENERATE(0, 1);
  f.Run(CommunicatorId(2), 1, resume);
  CHECK(f.Sent<RefitDone>().empty());
  CHECK(f.Peers<StartExchange>().size() == 1);
  f.Forget();
  f.Do(WireDone{CommunicatorId(2), WireSeq(0), absl::OkStatus()});
  // The step that the daemon has stored is received again, and not stored again.
  const std::vector<StartMoves> moves = f.Peers<StartMoves>();
  CHECK(moves.size() == (resume == 1 ? 1 : 0));
  for (const StartMoves& move : moves) CHECK(move.round == 1);
}

TEST_CASE("a daemon refuses to go on from a step that would leave a gap") {
  CutRun f;
  const int64_t resume = GENERATE(-1, 2, 4);
  f.Run(CommunicatorId(2), 1, resume);
  CHECK(f.Peers<StartExchange>().empty());
  REQUIRE(f.Sent<RefitDone>().size() == 1);
  const RefitDone done = f.Sent<RefitDone>()[0];
  CHECK(done.status.code() == absl::StatusCode::kFailedPrecondition);
  CHECK_THAT(
      std::string(done.status.message()),
      Contains(fmt::format("can't go on from round {}", resume)) && Contains("lacks round 1"));
  CHECK_FALSE(done.lacks.has_value());
}

TEST_CASE("a daemon whose move failed runs a program from its beginning only") {
  CutRun f(absl::DataLossError("a region is gone"));
  CHECK_FALSE(f.first.lacks.has_value());
  const bool whole = GENERATE(false, true);
  f.Run(CommunicatorId(2), 1, whole ? std::nullopt : std::optional<int64_t>(0));
  CHECK(f.Sent<RefitDone>().empty() == whole);
  CHECK(f.Peers<StartExchange>().empty() == !whole);
  if (whole) return;
  CHECK_THAT(std::string(f.Sent<RefitDone>().at(0).status.message()), Contains("its moves failed"));
}

// P1: a read-back in between would answer for memory that the next run writes.
TEST_CASE("a daemon whose run was cut reads nothing back until the run that goes on has ended") {
  CutRun f;
  f.Command(VerifyUpdate{UpdateId(1), {false}});
  CHECK(f.Peers<StartVerify>().empty());
  REQUIRE(f.Sent<VerifyDone>().size() == 1);
  CHECK(absl::IsCancelled(f.Sent<VerifyDone>()[0].status));
  f.Forget();

  f.Run(CommunicatorId(2), 1, 1);
  f.Command(VerifyUpdate{UpdateId(1), {false}});
  for (const int64_t round : {1, 2, 3}) {
    CHECK(f.Peers<StartVerify>().empty());
    f.Do(WireDone{CommunicatorId(2), WireSeq(static_cast<uint64_t>(round - 1)), absl::OkStatus()});
    MovesDone moved;
    moved.update = f.Peers<StartMoves>().back().update;
    moved.step = MoveStep::kUnpack;
    moved.round = round;
    moved.bytes_written = {64};
    f.Do(moved);
  }
  REQUIRE(f.Sent<RefitDone>().size() == 1);
  CHECK(f.Sent<RefitDone>()[0].status.ok());
  CHECK(f.Peers<StartVerify>().size() == 1);
  CHECK(f.Sent<VerifyDone>().empty());
}

// A daemon with an in-place rank, and the header of a part that crosses to the rank.
struct CutPart : Fixture {
  explicit CutPart(bool root = false) {
    Register(kCall);
    Command(Reply{kCall, absl::OkStatus(), EmptyReply{}});
    if (root) {
      Do(GroupEvent(TrainerAttached{kTrainer, TrainerIdentity{}}));
      Command(PeerWelcome{kTrainer, std::nullopt});
    }
    Command(PrepareEngine(Digest()));
    Command(OpenCommunicator{CommunicatorId(1), root ? 0 : 1, 2});
    header = Crossing(Verification::kTransfer, {});
    if (root) {
      BucketDraft bucket = TestGroup::MakeBucket(kTrainer, 1, 0, {Bytes("t", 100)});
      bucket.call = CallId(5);
      Do(GroupEvent(BucketEvent(bucket)));
      header.is_root = header.fill_slot = true;
      header.bucket_call = bucket.call;
      header.trainer = kTrainer;
      header.bucket_ranges = {0};
    }
    Forget();
    Command(header);
  }
  // The header comes again, over the second communicator.
  void Again() {
    Forget();
    Command(OpenCommunicator{CommunicatorId(2), header.is_root ? 0 : 1, 2});
    header.again = true;
    header.communicator = CommunicatorId(2);
    Command(header);
  }
  void EndTransfer(const StartTransfer& start) {
    Do(PeerEvent(TransferDone{start.update, start.part, absl::OkStatus(), {100}, -1, {42}}));
  }

  static constexpr MemberId kTrainer{9};
  PeerHeader header;
};

TEST_CASE("a part that was cut is stored when it comes again, and not a second time") {
  CutPart f;
  const bool issued = GENERATE(false, true);
  if (issued) f.Command(PeerIssue{UpdateId(1), PartSeq(0)});
  f.Command(CloseCommunicator{CommunicatorId(1)});
  if (issued) f.Do(WireDone{CommunicatorId(1), WireSeq(0), absl::CancelledError("closed")});
  REQUIRE(f.Sent<TransferDone>().size() == 1);
  CHECK(f.Sent<TransferDone>()[0].wire_failed);
  CHECK(f.Sent<TransferDone>()[0].bytes_written == std::vector<int64_t>{0});
  // P1: nothing is read back while a part is owed.
  f.Command(VerifyUpdate{UpdateId(1), {false}});
  CHECK(f.Peers<StartVerify>().empty());
  CHECK(f.Sent<VerifyDone>().empty());

  f.Again();
  REQUIRE(f.Sent<PeerHeaderAck>().size() == 1);
  CHECK(f.Sent<PeerHeaderAck>()[0].mismatch.empty());
  f.Command(PeerIssue{UpdateId(1), PartSeq(0)});
  CHECK(f.Peers<StartWire>().size() == 1);
  f.Do(WireDone{CommunicatorId(2), WireSeq(0), absl::OkStatus()});
  REQUIRE(f.Peers<StartTransfer>().size() == 1);
  CHECK(f.Peers<StartVerify>().empty());
  f.EndTransfer(f.Peers<StartTransfer>()[0]);
  REQUIRE(f.Sent<TransferDone>().size() == 1);
  CHECK(f.Sent<TransferDone>()[0].status.ok());
  CHECK(f.Sent<TransferDone>()[0].bytes_written == std::vector<int64_t>{100});
  CHECK(f.Peers<StartVerify>().size() == 1);

  f.Again();
  REQUIRE(f.Sent<PeerHeaderAck>().size() == 1);
  CHECK(f.Sent<PeerHeaderAck>()[0].mismatch == "the part is stored here already");
  f.Command(PeerIssue{UpdateId(1), PartSeq(0)});
  CHECK(f.Peers<StartWire>().empty());
  REQUIRE(f.Sent<TransferDone>().size() == 1);
  CHECK_FALSE(f.Sent<TransferDone>()[0].status.ok());
}

TEST_CASE("a part that is being stored when its communicator is closed is stored") {
  CutPart f;
  f.Command(PeerIssue{UpdateId(1), PartSeq(0)});
  f.Do(WireDone{CommunicatorId(1), WireSeq(0), absl::OkStatus()});
  f.Command(CloseCommunicator{CommunicatorId(1)});
  CHECK(f.Sent<TransferDone>().empty());
  f.EndTransfer(f.Peers<StartTransfer>().at(0));
  REQUIRE(f.Sent<TransferDone>().size() == 1);
  CHECK(f.Sent<TransferDone>()[0].status.ok());
}

TEST_CASE("a part comes again only with the header that it had, and after its share has ended") {
  CutPart f;
  std::string mismatch;
  SECTION("its share has not ended") {
    f.Again();
    mismatch = "this daemon's share of the part has not ended";
  }
  SECTION("it had another slot") {
    f.Command(CloseCommunicator{CommunicatorId(1)});
    f.header.slot->grant = GrantId(6);
    f.header.digest = HeaderDigest(f.header);
    f.Again();
    mismatch = "the part was announced with another header before";
  }
  SECTION("it is not known") {
    f.Command(CloseCommunicator{CommunicatorId(1)});
    f.header.part = PartSeq(1);
    f.header.digest = HeaderDigest(f.header);
    f.Again();
    mismatch = "the part was not announced here before";
  }
  REQUIRE(f.Sent<PeerHeaderAck>().size() == 1);
  CHECK(f.Sent<PeerHeaderAck>()[0].mismatch == mismatch);
  f.Command(PeerIssue{UpdateId(1), f.header.part});
  CHECK(f.Peers<StartWire>().empty());
}

TEST_CASE("the root of a part that was cut sends what it has packed, and packs nothing again") {
  CutPart f(true);
  REQUIRE(f.Peers<StartTransfer>().size() == 1);
  const StartTransfer pack = f.Peers<StartTransfer>()[0];
  // The part is being packed, waits for Issue, or is on the wire.
  const int when = GENERATE(0, 1, 2);
  if (when == 0) {
    f.Command(CloseCommunicator{CommunicatorId(1)});
    CHECK(f.Sent<TransferDone>().empty());
  }
  f.EndTransfer(pack);
  if (when == 1) f.Command(CloseCommunicator{CommunicatorId(1)});
  if (when == 2) {
    f.Command(PeerIssue{UpdateId(1), PartSeq(0)});
    f.Command(CloseCommunicator{CommunicatorId(1)});
    f.Do(WireDone{CommunicatorId(1), WireSeq(0), absl::CancelledError("closed")});
  }
  REQUIRE(f.Sent<TransferDone>().size() == 1);
  CHECK(f.Sent<TransferDone>()[0].wire_failed);
  CHECK(f.Sent<TransferDone>()[0].bytes_written == std::vector<int64_t>{100});  // the own rank
  CHECK(f.Sent<TransferDone>()[0].digests == std::vector<uint64_t>{42});

  f.Again();
  CHECK(f.Peers<StartTransfer>().empty());
  REQUIRE(f.Sent<PeerHeaderAck>().size() == 1);
  CHECK(f.Sent<PeerHeaderAck>()[0].mismatch.empty());
  CHECK(f.Peers<StartWire>().empty());
  f.Command(PeerIssue{UpdateId(1), PartSeq(0)});
  REQUIRE(f.Peers<StartWire>().size() == 1);
  CHECK(f.Peers<StartWire>()[0].communicator == CommunicatorId(2));
  f.Do(WireDone{CommunicatorId(2), WireSeq(0), absl::OkStatus()});
  REQUIRE(f.Sent<TransferDone>().size() == 1);
  CHECK(f.Sent<TransferDone>()[0].status.ok());
  CHECK(f.Sent<TransferDone>()[0].bytes_written == std::vector<int64_t>{0});  // counted before
  CHECK(f.Sent<TransferDone>()[0].digests == std::vector<uint64_t>{42});
}

TEST_CASE("a daemon whose last member went with a part under way leaves when that has ended") {
  Fixture f;
  PeerPrepare prepare;
  prepare.update = UpdateId(1);
  prepare.version = Version(1);
  prepare.engines = {kEngine};
  f.Command(prepare);
  f.Command(OpenCommunicator{CommunicatorId(1), 1, 2});
  f.Command(Crossing(Verification::kTransfer, {kEngine}));
  f.Command(PeerIssue{UpdateId(1), PartSeq(0)});
  REQUIRE(f.Peers<StartWire>().size() == 1);
  f.Do(GroupEvent(MemberLost{kEngine, "its process died"}));
  CHECK(f.Peers<CloseLink>().empty());
  f.Command(PeerUpdateEnded{UpdateId(1), Version(1), Outcome::kAborted, "lost"});
  CHECK(f.Peers<CloseLink>().empty());
  f.Do(WireDone{CommunicatorId(1), WireSeq(0), absl::CancelledError("the communicator is closed")});
  CHECK(f.Peers<CloseLink>().size() == 1);
  CHECK(f.follower().finished());
}

TEST_CASE("a daemon whose only engine died left the update that it took part in") {
  Fixture f;
  PeerPrepare prepare;
  prepare.update = UpdateId(5);
  prepare.remaining = std::chrono::seconds(10);
  prepare.engines = {kEngine};
  f.Command(prepare);
  f.Do(GroupEvent(MemberLost{kEngine, "its process died"}));
  CHECK(f.Sent<MemberLost>().size() == 1);
  CHECK(f.Peers<CloseLink>().empty());
  // The daemon still serves the update's data plane.
  f.Command(OpenCommunicator{CommunicatorId(1), 1, 2});
  CHECK(f.Peers<OpenCommunicator>().size() == 1);
  f.Command(PeerUpdateEnded{UpdateId(5), Version(1), Outcome::kCommitted, ""});
  CHECK(f.Peers<CloseLink>().size() == 1);
  CHECK(f.follower().finished());
}

TEST_CASE("a coordinator that pinged and sent no outcome kept an engine paused for ever") {
  Fixture f;
  PeerPrepare prepare;
  prepare.update = UpdateId(5);
  prepare.remaining = std::chrono::seconds(10);
  prepare.engines = {kEngine};
  f.Command(prepare);
  const TimePoint since = f.now();
  while (f.follower().View(f.now()).group.state == "joined" &&
         f.now() < since + std::chrono::minutes(10)) {
    f.TickWhenDue();
    f.Command(PeerPing{1});
  }
  CHECK(f.now() - since <= prepare.remaining + PeerLimits().peer + std::chrono::seconds(1));
  REQUIRE(f.Own<RefuseMember>().size() == 1);
  CHECK(f.Own<RefuseMember>()[0].status.code() == absl::StatusCode::kUnavailable);
  CHECK_THAT(std::string(f.Own<RefuseMember>()[0].status.message()),
             Contains("told no outcome of an update"));
}

TEST_CASE("an answer of another kind than its call left the call unanswered") {
  Fixture f;
  constexpr MemberId kTrainer{8};
  f.Do(GroupEvent(TrainerAttached{kTrainer, {0, 1, 100, {}, ""}}));
  const ReplyPayload kinds[] = {EmptyReply{}, BeginReply{}, LeaseSlotReply{}, BucketReply{},
                                CommitReply{}};
  const size_t wrong = GENERATE(0, 2, 3, 4);
  SECTION("to a Begin") {
    BeginEvent begin;
    begin.call = kCall;
    begin.member = kTrainer;
    begin.version = Version(1);
    f.Do(GroupEvent(begin));
    f.Command(Reply{kCall, absl::OkStatus(), kinds[wrong]});
  }
  SECTION("to a layout") {
    f.Register(kCall);
    f.Command(Reply{kCall, absl::OkStatus(), kinds[wrong == 0 ? 1 : wrong]});
    CHECK(f.Digest() == 0);
  }
  REQUIRE(f.Replies().size() == 1);
  CHECK(f.Replies()[0].status.code() == absl::StatusCode::kUnavailable);
  CHECK_THAT(std::string(f.Replies()[0].status.message()),
             Contains("the coordinator at elsewhere") && Contains("not of the kind of the call"));
  CHECK(f.Peers<CloseLink>().size() == 1);
}

TEST_CASE("Members that came and went leave nothing behind") {
  Fixture f;
  const auto come_and_go = [&f](uint64_t first, uint64_t count) {
    EngineIdentity engine;
    engine.instance = "guest";
    for (uint64_t id = first; id < first + count; ++id) {
      f.Do(GroupEvent(EngineAttached{MemberId(id), engine}));
      f.Command(PeerWelcome{MemberId(id), std::nullopt});
      f.Do(GroupEvent(MemberLost{MemberId(id), "it left"}));
      f.Forget();
    }
  };
  come_and_go(100, 1'000);  // the first rounds leave memory that later ones reuse
  const size_t before = mallinfo2().uordblks;
  come_and_go(10'000, 20'000);
  constexpr size_t kBytesAMember = 4;  // less than any record of a member takes
  CHECK(mallinfo2().uordblks < before + 20'000 * kBytesAMember);
}

// Tells the follower that instance i is clean at the group's version 3.
void SendClean(Fixture* f, Standing standing = Standing::kClean) {
  f->Command(PeerReadiness{
      .anew = true, .version = Version(3), .instances = Shared({{"i", standing, Version(3)}})});
}

TEST_CASE("a joined daemon shows the readiness that the coordinator sent, and none before") {
  Fixture f;
  CHECK(f.follower().readiness() == nullptr);
  SendClean(&f);
  REQUIRE(f.follower().readiness() != nullptr);
  CHECK(f.follower().readiness()->Of("i", 0)->ready);
  f.Command(
      PeerReadiness{.version = Version(3), .instances = Shared({{"far", Standing::kForming, {}}})});
  const std::vector<InstanceView> shown = f.follower().View(f.now()).group.instances;
  REQUIRE(shown.size() == 2);  // this daemon's, and another's
  CHECK((shown[0].name == "far" && shown[0].state == "forming" && !shown[0].readiness.ready));
  CHECK((shown[1].name == "i" && shown[1].state == "clean" && shown[1].readiness.ready));
  CHECK(shown[1].version == Version(3));
  f.Command(PeerReadiness{.version = Version(4), .instances = {}});
  CHECK_FALSE(f.follower().readiness()->Of("i", 0)->ready);
  CHECK(f.follower().readiness()->Of("i", 1)->ready);
  f.Command(
      PeerReadiness{.version = Version(4), .instances = Shared({{"i", Standing::kGone, {}}})});
  CHECK_FALSE(f.follower().readiness()->Of("i", 1).has_value());
}

TEST_CASE(
    "a joined daemon that loses its coordinator keeps what it knew, except weights that are "
    "unknown") {
  Fixture f;
  bool ready = false;
  SECTION("no update ran") {
    SendClean(&f);
    ready = true;
  }
  SECTION("the instance took part in an update") { SendClean(&f, Standing::kUpdating); }
  SECTION("the rank was told to be ready, and the coordinator had no time to say so") {
    SendClean(&f);
    PeerPrepare prepare;
    prepare.update = UpdateId(1);
    prepare.version = Version(4);
    prepare.engines = {kEngine};
    f.Command(prepare);
  }
  CHECK_FALSE(f.follower().last_readiness().has_value());
  f.Do(LinkLost{absl::UnavailableError("gone")});
  CHECK(f.follower().readiness() == nullptr);
  REQUIRE(f.follower().last_readiness().has_value());
  CHECK(f.follower().last_readiness()->here == std::set<std::string>{"i"});
  CHECK(f.follower().last_readiness()->book.Of("i", 0)->ready == ready);
}

TEST_CASE("a coordinator that sent no readiness leaves none behind") {
  Fixture f;
  f.Do(LinkLost{absl::UnavailableError("gone")});
  CHECK_FALSE(f.follower().last_readiness().has_value());
}

}  // namespace
}  // namespace refitd
