#include "daemon/group/group.h"

#include <algorithm>
#include <utility>

#include "daemon/group/group_impl.h"
#include "transport/base/errors.h"
#include "transport/base/failure.h"

namespace refitd {

Group::Impl::Impl(std::string group_name, uint64_t incarnation, GroupSpec spec,
                  GroupLimits group_limits, std::function<UpdateId()> next,
                  Ownership::Rule owner_rule)
    : name(std::move(group_name)),
      limits(group_limits),
      members(name, std::move(spec), std::move(owner_rule), &out, &requests),
      versions(name, incarnation, &members, &out),
      updates(std::move(next), {limits, &members, &versions, &requests, &slots, &catch_up,
                                &compiler, &rollback, &out}) {}

void Group::Impl::Pump() {
  if (updates.CatchUpRuns() && update->state != UpdateState::kEnding) {
    if (updates.waiting() != nullptr && !rollback.Holds()) updates.GiveWay("the hold is over");
    for (const std::string& source_instance : update->catch_up->source_instances) {
      if (!catch_up.Gives(source_instance))
        updates.GiveWay(fmt::format("instance {} can't give any more", source_instance));
    }
  }
  PumpUpdate();
  if (updates.Resume()) PumpUpdate();
  ExpelUnwelcome();
  while (catch_up.anyone_waits() && !updates.CatchUpRuns()) {
    std::visit([this](const auto& e) { On(e); }, catch_up.TakeDeferred());
    PumpUpdate();
  }
  OpenCatchUpIfDue();
  if (update != nullptr && update->state == UpdateState::kData) slots.Serve(update->deadline);
}

void Group::Impl::PumpUpdate() {
  if (update != nullptr) AssembleIfAllHere();
  if (update != nullptr) OpenDataIfReady();
  if (update != nullptr) {
    if (update->state == UpdateState::kPreparing && update->push.all_in_one_call()) {
      update->program.CompareEarly();  // here, so that the engines' pause holds no comparison
    }
    if (update->state == UpdateState::kData || update->state == UpdateState::kSettling) {
      update->push.SendParts();
      if (update->data_plane_up) update->push.StartParts();
    }
    if (update->state == UpdateState::kSettling && update->program.exists() &&
        update->push.all_started()) {
      update->program.RunIfDue(update->push.next_part(), update->data_plane_up);
    }
    update->participants.AbortEvictedIfQuiet();
    if (update->state == UpdateState::kSettling &&
        update->verification == Verification::kReadback) {
      update->readback.StartIfLast(update->push, update->program);
    }
    SettleIfDone();
  }
  if (update != nullptr && update->state == UpdateState::kStaged &&
      !update->participants.AnyProcessing()) {
    Flip();
  }
  if (update != nullptr && update->state == UpdateState::kFlipping &&
      update->participants.all_ready()) {
    Conclude(Outcome::kCommitted, "");
  }
  if (update == nullptr || update->state != UpdateState::kEnding) return;
  if (update->push.in_flight() > 0 || update->program.in_use()) return;
  if (!update->readback.running()) Conclude(Outcome::kAborted, update->end.why().reason);
}

// ---- catch-ups ----

void Group::Impl::OpenCatchUpIfDue() {
  if (update != nullptr && !updates.WaitsForHold()) return;
  catch_up.FindDue(!updates.drains());
  if (!catch_up.TakeDue()) return;
  updates.OpenCatchUp();
  PumpUpdate();
  if (updates.Resume()) PumpUpdate();
  if (update == nullptr || updates.WaitsForHold()) catch_up.FindDue(!updates.drains());
}

// ---- the data phase ----

void Group::Impl::On(const LeaseSlotEvent& e) {
  Member* member = members.Trainer(e.member, e.call);
  if (member == nullptr) return;
  if (e.wait < Duration(0)) {
    out.Refuse(e.call, InvalidField("wait", "wait: {} is negative", group::Seconds(e.wait)));
    return;
  }
  const absl::StatusOr<TrainerProgress*> progress = updates.Find(*member, e.version, e.update);
  if (!progress.ok()) {
    out.Refuse(e.call, progress.status());
    return;
  }
  if ((*progress)->committed) {
    out.Refuse(e.call,
               Precondition("{} has committed version {} already", member->label, e.version));
    return;
  }
  const auto early =
      std::count_if((*progress)->early.begin(), (*progress)->early.end(),
                    [](const auto& bucket) { return bucket.second->content->slot.has_value(); });
  slots.Wait(e, early, (*progress)->next_seq, update->deadline);
}

void Group::Impl::On(const ReleaseSlotEvent& e) {
  if (members.Trainer(e.member, e.call) != nullptr) slots.GiveBack(e);
}

void Group::Impl::On(const BucketEvent& e) {
  REFITD_CHECK(e.bucket != nullptr);
  const int64_t seq = e.bucket->seq;
  Member* member = members.Trainer(e.member, e.call);
  if (member == nullptr) return;
  const group::Asked what{CallKind::kBucket, e.version, seq};
  if (requests.Repeated(e.member, what, e.request_id, e.call)) return;
  const absl::StatusOr<TrainerProgress*> progress = updates.Find(*member, e.version, e.update);
  absl::Status status = progress.status();
  if (status.ok()) status = update->push.CheckBucket(**progress, e);
  if (status.ok()) status = update->push.Reserve(e);
  if (!status.ok()) {
    // The rank's Commit would wait forever for the refused bucket, so it is refused as well.
    if (progress.ok() && seq >= (*progress)->next_seq &&
        seq < (*progress)->awaited_buckets.value_or(0) && !(*progress)->early.contains(seq)) {
      update->push.WithdrawCommit(
          *progress,
          WithFailureOf(status, Precondition("seq {} was refused: {}", seq, Message(status))));
    }
    out.Refuse(e.call, std::move(status));
    return;
  }
  update->push.Take(e, requests.Track(e.member, what, e.request_id, e.call), *progress);
  TakeCommitIfComplete(member, *progress);
}

void Group::Impl::On(const TransferDone& e) {
  if (update == nullptr || update->id != e.update) return;
  Part* const part = update->push.EndTransfer(e.part);
  if (part == nullptr) return;
  if (update->state == UpdateState::kEnding) {
    if (part->slot.has_value()) slots.Release(*part->slot);
    return;
  }
  if (!e.status.ok()) {
    return updates.Abandon(group::FailedMove(update->participants, members,
                                             fmt::format("part {}", e.part), e.status,
                                             e.failed_destination));
  }
  update->push.TakeResult(e, part);
}

void Group::Impl::On(const AckEvent& e) {
  if (!slots.Acknowledge(e)) return;
  if (update != nullptr && update->id == e.update) update->push.Acknowledge(e);
}

// ---- calls ----

void Group::Impl::On(const CallGone& e) {
  const absl::Status why = absl::CancelledError("the caller went away");
  if (requests.waiting().contains(e.call)) {
    const std::shared_ptr<const Request> request = requests.Leave(e.call, why);
    if (update != nullptr && request != nullptr && request->kind == CallKind::kCommit) {
      update->push.WithdrawIfNobodyWaits(*request, why);
    }
    return;
  }
  if (slots.Leave(e.call, why)) return;
  if (updates.Leave(e.call)) return out.Refuse(e.call, why);
  catch_up.Leave(e.call, why);
}

// ---- time ----

void Group::Impl::On(const Tick&) {
  // The slot stays with its holder, which may still be packing into it. Only the holder's
  // ReleaseSlot, or its death, frees the slot.
  for (const auto& [holder, grant] : slots.TakeOverdue()) {
    const std::string reason = fmt::format("{} did not submit leased slot {} within its lease",
                                           members.Label(holder), grant.slot);
    out.Log(LogLine::kWarning, reason);
    if (update != nullptr)
      updates.Abandon({reason, GiveUpClass::kDeadline, members.Suspecting(holder)});
  }
  if (update != nullptr && update->state == UpdateState::kEnding) {
    if (update->end.TakeOverdue()) {
      // The transfers that still run may touch one instance only, or belong to a daemon that is
      // silent. The other members need not stay paused for them.
      out.Log(LogLine::kError,
              fmt::format("update to version {}: clean-up takes longer than {}: waiting for {}",
                          update->version, group::Seconds(limits.cleanup_limit),
                          updates.WaitedFor(out.now())));
      update->participants.Abort(/*quiet=*/true, update->end.why().reason,
                                 update->end.why().failure);
      out.Do(CleanUpOverdue{update->id});
      out.Changed();
    }
  } else if (update != nullptr) {
    TickUpdate();
  }
  // The update that waits is given up once it is resumed.
  if (updates.waiting() != nullptr && out.now() >= updates.waiting()->deadline) {
    updates.GiveWay("an update has to end");
  }
  if (catch_up.any_overdue()) {
    catch_up.RefuseOverdue(
        WithFailure(Error(absl::StatusCode::kDeadlineExceeded,
                          "the catch-up that runs did not end in time: waited for {}",
                          updates.WaitedFor(out.now())),
                    updates.SuspectAwaited()));
  }
  catch_up.LookIfDue();
  slots.RefuseOverdue();
}

void Group::Impl::TickUpdate() {
  constexpr absl::StatusCode kDeadline = absl::StatusCode::kDeadlineExceeded;
  if (update->state == UpdateState::kStaged) {
    // P4: the ranks that have not answered process the rest in their pause.
    if (out.now() < update->ready_deadline) return;
    out.Log(LogLine::kWarning,
            fmt::format("version {} is put into place after {} (limits.processing_ms), without "
                        "waiting for {}",
                        update->version, group::Seconds(out.now() - update->staged_at),
                        updates.WaitedFor(out.now())));
    Flip();
  }
  if (update->state == UpdateState::kFlipping) {
    if (out.now() >= update->ready_deadline) FailUnready();
    return;
  }
  if (out.now() >= update->deadline) {
    updates.Abandon(
        {.reason = fmt::format("the update's deadline passed after {} (Begin's "
                               "duration, else limits.default_duration_ms): waited for {}",
                               group::Seconds(update->deadline - update->started),
                               updates.WaitedFor(out.now())),
         .kind = GiveUpClass::kDeadline,
         .failure = updates.SuspectAwaited(),
         .begin_code = kDeadline,
         .bucket_code = kDeadline,
         .commit_code = kDeadline,
         .lease_code = kDeadline});
    return;
  }
  if (update->state == UpdateState::kPreparing && out.now() >= update->ready_deadline) {
    FailUnready();
  }
  while (update->state != UpdateState::kEnding) {
    const auto late = update->push.FirstLate();
    if (!late.has_value() || late->first > out.now()) break;
    const group::LoaderReader& reader = update->push.reader(late->second);
    GiveUp why{fmt::format("{} did not acknowledge part {} within {} (limits.ack_ms)",
                           members.Label(late->second), reader.outstanding.front().part,
                           group::Seconds(limits.ack_limit)),
               GiveUpClass::kDeadline, members.Suspecting(late->second)};
    if (update->state == UpdateState::kSettling) why.commit_code = kDeadline;
    FailEngine(reader.participant, why);
  }
  if (update->state == UpdateState::kEnding) return;
  if (const std::optional<TimePoint> idle = updates.IdleDeadline();
      idle.has_value() && *idle <= out.now()) {
    updates.Abandon(
        {fmt::format("no call from any trainer rank for {} (limits.idle_ms): waited for {}",
                     group::Seconds(limits.idle_limit), updates.WaitedFor(out.now())),
         GiveUpClass::kDeadline, updates.SuspectAwaited()});
  }
}

// ---- the group's own state ----

void Group::Impl::On(const ReplaceGroup& e) {
  if (!updates.Replace()) {
    return out.Refuse(e.call, Precondition("group {}: replace: an update to version {} runs", name,
                                           updates.Opened()->version));
  }
  versions.Replace(e.incarnation);
  members.Replace(e.by);
  rollback.Release();
  catch_up.Look();
  out.Do(Reply{e.call, absl::OkStatus(), EmptyReply{}});
  out.Log(LogLine::kInfo, "replaced by a new incarnation: every instance counts as dirty");
  out.Changed();
}

void Group::Impl::On(const DrainEvent&) {
  if (updates.drains()) return;
  updates.Drain();
  catch_up.Look();
  for (const auto& [id, member] : members.members()) {
    if (member.state != MemberState::kLeaving) out.Do(SendDraining{id});
  }
  out.Changed();
}

// ---- invariants ----

// These cost as much as the group has members, calls and parts, and are for tests, simulation and
// fuzzing.
void Group::Impl::CheckInvariants() const {
  members.CheckInvariants();
  versions.CheckInvariants();
  slots.CheckInvariants();
  catch_up.CheckInvariants();
  compiler.CheckInvariants();
  rollback.CheckInvariants();
  requests.CheckInvariants();
  updates.CheckInvariants();
}

// ---- Destinations ----

void Destinations::Add(NodeId node, MemberId rank) {
  by_node_[node].push_back(static_cast<uint32_t>(node_of_.size()));
  node_of_.push_back(node);
  ranks_.push_back(rank);
}

const std::vector<uint32_t>& Destinations::On(NodeId node) const {
  static const std::vector<uint32_t>* const kNone = new std::vector<uint32_t>();
  const auto it = by_node_.find(node);
  return it == by_node_.end() ? *kNone : it->second;
}

std::vector<bool> Destinations::SkipOn(NodeId node, const std::vector<bool>& skip) const {
  std::vector<bool> on_node;
  for (const uint32_t d : On(node)) on_node.push_back(d < skip.size() && skip[d]);
  return on_node;
}

// ---- Group ----

bool EqualButTrainers(GroupSpec a, const GroupSpec& b) {
  a.trainer_ranks = b.trainer_ranks;
  return a == b;
}

Group::Group(std::string name, uint64_t incarnation, GroupSpec spec, GroupLimits limits,
             std::function<UpdateId()> next_update, Ownership::Rule owner_rule)
    : impl_(std::make_unique<Impl>(std::move(name), incarnation, std::move(spec), limits,
                                   std::move(next_update), std::move(owner_rule))) {}

Group::~Group() = default;

void Group::Handle(const GroupEvent& event, TimePoint now, GroupActions* actions) {
  impl_->out.Open(now, actions);
  std::visit([this](const auto& e) { impl_->On(e); }, event);
  impl_->Pump();
  impl_->out.Close();
  impl_->updates.CheckState();
}

std::optional<TimePoint> Group::NextDeadline() const {
  std::optional<TimePoint> next = impl_->slots.NextDeadline();
  const auto consider = [&next](std::optional<TimePoint> due) {
    if (due.has_value() && (!next.has_value() || *due < *next)) next = due;
  };
  consider(impl_->catch_up.NextDeadline());
  const group::Update* update = impl_->update.get();
  if (update == nullptr) {
    consider(impl_->catch_up.due());
    return next;
  }
  if (update->state == UpdateState::kEnding) {
    consider(update->end.cleanup_deadline());
    return next;
  }
  consider(update->deadline);
  const group::Updates& updates = impl_->updates;
  if (updates.waiting() != nullptr) consider(updates.waiting()->deadline);
  if (updates.WaitsForHold()) consider(impl_->catch_up.due());
  if (updates.waiting() != nullptr || updates.WaitsForHold()) {
    consider(impl_->rollback.held_until());
  }
  if (update->awaits_ranks()) consider(update->ready_deadline);
  if (const auto ack = update->push.FirstLate(); ack.has_value()) consider(ack->first);
  consider(updates.IdleDeadline());
  return next;
}

const std::string& Group::name() const { return impl_->name; }
uint64_t Group::incarnation() const { return impl_->versions.incarnation(); }
const GroupSpec& Group::spec() const { return impl_->members.spec(); }
bool Group::has_members() const { return !impl_->members.members().empty(); }
const std::string& Group::owner() const { return impl_->members.owner(); }
bool Group::has_trainers() const { return !impl_->members.trainers().empty(); }
bool Group::update_running() const { return impl_->update != nullptr; }
std::optional<Version> Group::version() const { return impl_->versions.last(); }
std::optional<Version> Group::content() const { return impl_->versions.content(); }

absl::Status Group::CanRegisterLayout(MemberId member) const {
  const group::Member* m = impl_->members.Find(member);
  if (m == nullptr || m->state == MemberState::kLeaving) {
    return Error(absl::StatusCode::kFailedPrecondition, "member {} is not attached", member);
  }
  if (m->engine && !NeedsLayout(m->delivery)) {
    return Error(absl::StatusCode::kFailedPrecondition,
                 "{} takes {} delivery: it registers no layout", m->label, Name(m->delivery));
  }
  const group::Update* const update = impl_->update.get();
  if (m->state != MemberState::kAttached ||
      (update != nullptr && update->participants.Uses(member))) {
    return Error(absl::StatusCode::kFailedPrecondition,
                 "{} takes part in the running update to version {}", m->label, update->version);
  }
  return absl::OkStatus();
}

absl::Status Group::CheckLayout(const LayoutRegistered& e) const { return impl_->CheckLayout(e); }

bool Group::SendsFrom(NodeId node) const {
  if (!impl_->updates.CatchUpRuns()) return TrainsOn(node);
  const std::vector<MemberId>& sources = impl_->update->catch_up->sources;
  return std::any_of(sources.begin(), sources.end(), [this, node](MemberId source) {
    const group::Member* member = impl_->members.Find(source);
    return member != nullptr && member->node == node;
  });
}

void Group::CheckInvariants() const { impl_->CheckInvariants(); }

bool Group::TrainsOn(NodeId node) const { return impl_->members.TrainsOn(node); }

std::string Group::KeptOut(NodeId node) const { return impl_->members.WhyKeptOut(node); }

PastUpdate Group::Past(Version version) const {
  const group::Update* const opened = impl_->updates.Opened();
  if (opened != nullptr && !opened->content.has_value() && opened->version == version) {
    return {Outcome::kRunning, ""};
  }
  return impl_->updates.history().Find(version);
}

}  // namespace refitd
