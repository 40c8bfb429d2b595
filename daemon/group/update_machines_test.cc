// The machines of an update, each alone: participants, coverage, push, read-back; and the history.
#include <catch2/catch.hpp>

#include "daemon/group/bucket_draft_testing.h"
#include "daemon/group/history.h"
#include "daemon/group/push.h"
#include "daemon/group/readback.h"

namespace refitd::group {
namespace {

const TensorSpec kTensor{"a", DType::kUint8, {100}};

std::shared_ptr<const Layout> LayoutOfTensor() {
  auto layout = std::make_shared<Layout>();
  layout->tensors.push_back(kTensor);
  Piece piece;
  piece.tensor = 0;
  piece.box.offset = {0};
  piece.box.extent = {100};
  layout->pieces.push_back(piece);
  return layout;
}

// A trainer rank and two instances of one in-place rank each, in an update to version 1.
struct Parts {
  Parts() {
    out.Open(now, &actions);
    TrainerAttached trainer_attached{trainer, {}};
    members.EnterTrainer(MemberOf(trainer_attached), false);
    for (uint64_t id = 2; id <= 3; ++id) {
      EngineAttached e{MemberId(id), {}};
      e.identity.instance = std::string(1, id == 2 ? 'i' : 'j');
      members.EnterEngine(MemberOf(e), e.identity, false);
      members.Register(members.Find(MemberId(id)), {MemberId(id), LayoutOfTensor()});
    }
    progress = &push.Join(members.Find(trainer));
    REQUIRE(participants.Assemble([](const Instance&) { return true; }, {trainer}, &kept).ok());
    push.Assemble();
    update.deadline = now + std::chrono::seconds(10);
    update.verification = Verification::kOff;
    participants.Prepare();
    for (uint64_t id = 2; id <= 3; ++id)
      participants.MarkReady(members.Find(MemberId(id)), std::nullopt, true);
    Check();
  }
  static GroupSpec Spec() {
    GroupSpec spec;
    spec.slot_bytes = 4096;
    spec.slots = 2;
    return spec;
  }
  void Check(UpdateState state = UpdateState::kData) const {
    members.CheckInvariants();
    participants.CheckInvariants(state);
    push.CheckInvariants(/*decided=*/false);
    readback.CheckInvariants();
  }
  BucketEvent Bucket(int64_t seq, int64_t start, int64_t count) const {
    BucketDraft draft;
    draft.call = CallId(static_cast<uint64_t>(seq) + 1);
    draft.member = trainer;
    draft.version = Version(1);
    draft.seq = seq;
    draft.Add(kTensor, start, count);
    return draft;
  }
  absl::StatusCode Push(const BucketEvent& e) {
    absl::Status status = push.CheckBucket(*progress, e);
    if (status.ok()) status = push.Reserve(e);
    if (!status.ok()) return status.code();
    push.Take(e, requests.Track(trainer, {CallKind::kBucket}, "", e.call), progress);
    push.StartParts();
    Check();
    return absl::StatusCode::kOk;
  }
  // The transfer of the part has ended and wrote so many bytes to each destination.
  void EndTransfer(int64_t part, int64_t bytes) {
    TransferDone done;
    done.part = PartSeq(part);
    done.bytes_written = {bytes, bytes};
    group::Part* const ended = push.EndTransfer(done.part);
    REQUIRE(ended != nullptr);
    push.TakeResult(done, ended);
    push.SendParts();
    Check();
  }
  template <typename Action>
  int64_t Count() const {
    return std::count_if(actions.begin(), actions.end(),
                         [](const auto& a) { return std::holds_alternative<Action>(a); });
  }

  const TimePoint now{std::chrono::seconds(10)};
  const UpdateId id{1};
  const MemberId trainer{1};
  GroupActions actions;
  Outbox out;
  Requests requests{&out};
  Membership members{"g", Spec(), nullptr, &out, &requests};
  Versions versions{"g", 11, &members, &out};
  GroupLimits limits;
  Slots slots{limits, &members, &requests, &out};
  BucketLog log;
  std::shared_ptr<const Catalog> kept;
  UpdateRecord update{id, Version(1)};
  UpdateParticipants participants{update, &members, &out};
  UpdateProgram program{&update, limits, &members, &slots, &participants, &out};
  UpdateCoverage coverage{&participants, &program};
  UpdatePush push{&update,       limits,    &members, &slots, &requests,
                  &participants, &coverage, &log,     &out};
  UpdateReadback readback{update, &participants, &out};
  TrainerProgress* progress = nullptr;
};

TEST_CASE("buckets are taken in their order, and each part is transferred once (P7)") {
  Parts p;
  CHECK(p.Push(p.Bucket(1, 50, 50)) == absl::StatusCode::kOk);
  CHECK(p.Count<MovePart>() == 0);
  CHECK(p.Push(p.Bucket(0, 0, 50)) == absl::StatusCode::kOk);
  CHECK(p.Count<MovePart>() == 2);
  CHECK(p.push.in_flight() == 2);
  p.EndTransfer(1, 50);
  CHECK_FALSE(p.push.settled());
  p.EndTransfer(0, 50);
  CHECK(p.push.settled());
  CHECK(p.push.EndTransfer(PartSeq(0)) == nullptr);
  CHECK(p.log.Statistics().buckets.size() == 2);
}

TEST_CASE("every element comes once, and a missing one is named (P1)") {
  Parts p;
  CHECK(p.Push(p.Bucket(0, 0, 60)) == absl::StatusCode::kOk);
  CHECK(p.Push(p.Bucket(1, 50, 50)) == absl::StatusCode::kAlreadyExists);
  const absl::Status missing = p.coverage.CheckAll(0);
  CHECK(std::string(missing.message()).find("element 60") != std::string::npos);
  CHECK(p.Push(p.Bucket(1, 60, 40)) == absl::StatusCode::kOk);
  CHECK(p.coverage.CheckAll(0).ok());
  CHECK_FALSE(p.coverage.CheckAll(2).ok());
}

TEST_CASE("an instance is dirty from its first byte on, and its ranks hear so (P2)") {
  Parts p;
  CHECK(p.Push(p.Bucket(0, 0, 100)) == absl::StatusCode::kOk);
  CHECK(p.members.FindInstance("i")->state == InstanceState::kDirtyReady);
  CHECK_FALSE(p.participants.WrittenInFull().ok());
  p.participants.Evict(0, "it was slow", Failure());
  p.participants.AbortEvictedIfQuiet();
  CHECK(p.Count<SendAborted>() == 0);  // the transfer still touches its memory (P6)
  p.EndTransfer(0, 100);
  p.participants.AbortEvictedIfQuiet();
  REQUIRE(p.Count<SendAborted>() == 1);
  CHECK(std::get<SendAborted>(p.actions.back()).dirty);
  CHECK(p.participants.WrittenInFull().ok());
  CHECK(p.participants.Remaining() == std::vector<std::string>{"j"});
  p.participants.Commit({0, 7}, &p.versions);
  CHECK(p.Count<SendCommitted>() == 1);
  CHECK(p.versions.IsCurrent(*p.members.FindInstance("j")));
  CHECK(p.members.FindInstance("i")->state == InstanceState::kDirty);
}

TEST_CASE("a read-back that failed only for evicted instances passes") {
  Parts p;
  p.readback.StartIfLast(p.push, p.program);
  CHECK_FALSE(p.readback.started());  // nothing was written yet
  CHECK(p.Push(p.Bucket(0, 0, 100)) == absl::StatusCode::kOk);
  p.EndTransfer(0, 100);
  p.readback.StartIfLast(p.push, p.program);
  CHECK(p.readback.running());
  CHECK(p.members.Find(MemberId(2))->touching == 1);
  VerifyDone done{p.id, absl::DataLossError("differs"), {0}, {5, 7}};
  CHECK_FALSE(p.readback.Passes(done));
  p.participants.Evict(0, "it was slow", Failure());
  CHECK(p.readback.End());
  CHECK_FALSE(p.readback.End());
  CHECK(p.readback.Passes(done));
  CHECK(p.readback.content() == std::vector<uint64_t>{5, 7});
  CHECK(p.members.Find(MemberId(2))->touching == 0);
}

TEST_CASE("an update that is given up starts no more parts") {
  Parts p;
  CHECK(p.Push(p.Bucket(0, 0, 50)) == absl::StatusCode::kOk);
  CHECK(p.Push(p.Bucket(2, 50, 50)) == absl::StatusCode::kOk);
  p.push.DropUnstarted();
  CHECK(p.push.all_started());
  CHECK(p.push.in_flight() == 1);
  CHECK(p.progress->early.empty());
  p.Check();
}

TEST_CASE("a program is compiled once for the same layouts, compared, and then run (P11)") {
  Parts p;
  p.members.Register(p.members.Find(p.trainer), {p.trainer, LayoutOfTensor()});
  RefitCompiler compiler{&p.members, &p.slots, &p.out};
  const RefitCompiler::Sources sources{{p.trainer}};
  CHECK_FALSE(*compiler.Find(sources, p.participants, &p.program));
  REQUIRE(p.Count<PlanRefit>() == 1);
  const PlanRefit asked = std::get<PlanRefit>(p.actions[p.actions.size() - 1]);
  CHECK_FALSE(*compiler.Find(sources, p.participants, &p.program));
  CHECK(p.Count<PlanRefit>() == 1);
  compiler.Cancel();
  CHECK(asked.options.cancelled->load());
  compiler.Take({asked.program, absl::OkStatus(), std::make_shared<RefitPlan>()});
  compiler.CheckInvariants();
  REQUIRE(*compiler.Find(sources, p.participants, &p.program));
  CHECK_FALSE(compiler.busy());
  p.program.RunIfDue(PartSeq(0), true);
  CHECK(p.program.comparing());
  CHECK(p.Count<StartRefit>() == 0);
  CHECK(p.members.Find(p.trainer)->touching == 1);
  REQUIRE(p.program.EndCompare());
  p.program.NoteEqual();
  p.program.RunIfDue(PartSeq(0), true);
  CHECK(p.Count<StartRefit>() == 1);
  CHECK(p.participants.all()[0].written);
  p.program.CheckInvariants();
  CHECK(p.program.EndRun());
  CHECK_FALSE(p.program.EndRun());
  CHECK(p.program.done());
  CHECK(p.members.Find(p.trainer)->touching == 0);
}

TEST_CASE("the history answers for the newest update to a version, until a new incarnation") {
  UpdateHistory history;
  UpdateView view;
  view.id = UpdateId(1);
  view.version = Version(4);
  CHECK(history.Refuse(Version(4)).ok());
  history.Add(view, {Outcome::kAborted, "it was slow", Failure()});
  CHECK(history.Refuse(Version(4)).code() == absl::StatusCode::kAborted);
  view.id = UpdateId(2);
  history.Add(view, {Outcome::kCommitted, "", Failure()});
  CHECK(history.Refuse(Version(4)).code() == absl::StatusCode::kFailedPrecondition);
  CHECK(history.Refuse(UpdateId(1), Version(4)).code() == absl::StatusCode::kAborted);
  CHECK(history.Find(Version(4)).outcome == Outcome::kCommitted);
  view.catch_up = true;
  history.Add(view, {Outcome::kAborted, "", Failure()});
  CHECK(history.committed() == 1);
  CHECK(history.aborted() == 1);
  CHECK(history.latest()->catch_up);
  history.Clear();
  CHECK(history.Find(Version(4)).outcome == Outcome::kUnknown);
  CHECK_FALSE(history.update().has_value());
}

}  // namespace
}  // namespace refitd::group
