#include "daemon/group/group.h"

#include <algorithm>
#include <utility>

#include "daemon/group/group_impl.h"
#include "transport/base/errors.h"

namespace refitd {

namespace group {

std::string Seconds(Duration duration) {
  return fmt::format("{:g} s", std::chrono::duration<double>(duration).count());
}

Suspect SuspectOf(const Member& member) {
  return {member.engine ? SuspectRole::kEngine : SuspectRole::kTrainer, member.daemon,
          member.instance, member.rank, member.pid};
}

bool MayPass(GiveUpClass kind) {
  switch (kind) {
    case GiveUpClass::kDeadline:
    case GiveUpClass::kMemberLost:
    case GiveUpClass::kPeerLost:
    case GiveUpClass::kAborted:
    case GiveUpClass::kOperator:
    case GiveUpClass::kTransfer:
    case GiveUpClass::kSlow:
      return true;
    case GiveUpClass::kNone:
    case GiveUpClass::kVerification:
    case GiveUpClass::kOther:
      return false;
  }
  return false;
}

std::string Few(const std::vector<std::string>& names) {
  constexpr size_t kShown = 4;
  std::string text;
  for (size_t i = 0; i < std::min(names.size(), kShown); ++i) {
    text += (i == 0 ? "" : ", ") + names[i];
  }
  if (names.size() > kShown) text += fmt::format(" and {} more", names.size() - kShown);
  return text;
}

}  // namespace group

Group::Impl::Impl(std::string group_name, uint64_t first_incarnation, GroupSpec group_spec,
                  GroupLimits group_limits, std::function<UpdateId()> next,
                  Ownership::Rule owner_rule)
    : name(std::move(group_name)),
      incarnation(first_incarnation),
      spec(std::move(group_spec)),
      limits(group_limits),
      next_update(std::move(next)),
      ownership(name, std::move(owner_rule)),
      ledger(spec.slots),
      declared(
          std::make_shared<group::TensorTable>(spec.engine_only_tensors, spec.unwanted_tensors)) {}

void Group::Impl::Pump() {
  GiveUpCatchUpIfSourcesChanged();
  PumpUpdate();
  ExpelUnwelcome();
  TakeDeferred();
  OpenCatchUpIfDue();
  ServeLeases();
}

void Group::Impl::PumpUpdate() {
  if (update != nullptr) AssembleIfAllHere();
  if (update != nullptr) OpenDataIfReady();
  if (update != nullptr) {
    SendParts();
    StartParts();
    RunProgramIfDue();
    AbortEvictedIfQuiet();
    ReadBackIfLast();
    SettleIfDone();
  }
  if (update != nullptr) EndIfQuiet();
}

// ---- requests ----

bool Group::Impl::Repeated(Member* member, CallKind kind, const std::string& id,
                           const std::string& what, CallId call) {
  const std::shared_ptr<Request> first = member->requests.Find(id);
  if (first == nullptr) return false;
  if (first->kind != kind || first->what != what) {
    Refuse(call, InvalidField("request_id", "request_id '{}' was used for {} before, now for {}",
                              id, first->what, what));
  } else if (first->finished) {
    Do(Reply{call, first->status, first->payload});
  } else {
    first->calls.push_back(call);
    pending[call] = first;
  }
  return true;
}

std::shared_ptr<group::Request> Group::Impl::Track(Member* member, CallKind kind,
                                                   const std::string& id, std::string what,
                                                   CallId call) {
  auto request = std::make_shared<Request>();
  request->kind = kind;
  request->member = member->id;
  request->id = id;
  request->what = std::move(what);
  request->first_call = call;
  request->calls.push_back(call);
  member->requests.Add(request);
  pending[call] = request;
  unfinished[call] = request;
  return request;
}

void Group::Impl::Finish(const std::shared_ptr<Request>& request, absl::Status status,
                         ReplyPayload payload) {
  REFITD_CHECK(!request->finished);
  request->finished = true;
  unfinished.erase(request->first_call);
  request->status = std::move(status);
  request->payload = std::move(payload);
  for (const CallId call : request->calls) {
    pending.erase(call);
    Do(Reply{call, request->status, request->payload});
  }
  request->calls.clear();
  Member* member = Find(request->member);
  if (member != nullptr) member->requests.Finished(*request);
  if (update != nullptr) update->last_call = now;
}

void Group::Impl::On(const CallGone& e) {
  const auto gone = [this](CallId call) {
    Refuse(call, absl::CancelledError("the caller went away"));
    if (update != nullptr) update->last_call = now;
  };
  if (const auto it = pending.find(e.call); it != pending.end()) {
    // A bucket's answer waits for the last read of its source, even if the caller is gone (P6).
    if (it->second->kind == CallKind::kBucket) return;
    const std::shared_ptr<Request> request = it->second;
    std::erase(request->calls, e.call);
    pending.erase(it);
    gone(e.call);
    if (request->kind == CallKind::kCommit) WithdrawIfNobodyWaits(*request);
    return;
  }
  const auto waiter = std::find_if(slot_waiters.begin(), slot_waiters.end(),
                                   [&e](const SlotWaiter& w) { return w.call == e.call; });
  if (waiter != slot_waiters.end()) {
    slot_waiters.erase(waiter);
    gone(e.call);
  } else if (update != nullptr && std::erase(update->operator_calls, e.call) > 0) {
    Refuse(e.call, absl::CancelledError("the caller went away"));
  } else {
    RefuseDeferredCall(e.call, absl::CancelledError("the caller went away"));
  }
}

// A Commit that waits for buckets is withdrawn once no caller waits for its answer: otherwise the
// last bucket would commit an update whose caller has given up.
void Group::Impl::WithdrawIfNobodyWaits(const Request& commit) {
  const Member* member = Find(commit.member);
  if (member == nullptr || update == nullptr) return;
  const auto it = update->trainers.find(member->rank);
  if (it == update->trainers.end() || it->second.member != commit.member) return;
  TrainerProgress& progress = it->second;
  if (!progress.announced.has_value() || progress.committed) return;
  if (std::any_of(progress.commits.begin(), progress.commits.end(),
                  [](const auto& request) { return !request->calls.empty(); })) {
    return;
  }
  WithdrawAnnounced(&progress, absl::CancelledError("the caller went away"));
}

bool Group::Impl::CallsOutstanding() const {
  if (!slot_waiters.empty()) return true;
  return std::any_of(pending.begin(), pending.end(), [this](const auto& p) {
    if (p.second->kind != CallKind::kCommit) return true;
    const Member* member = Find(p.second->member);
    if (member == nullptr) return true;
    const auto it = update->trainers.find(member->rank);
    return it == update->trainers.end() || it->second.committed ||
           !it->second.announced.has_value();
  });
}

// ---- time ----

std::optional<TimePoint> Group::Impl::IdleDeadline() const {
  if (update == nullptr || update->catch_up.has_value() || CallsOutstanding()) return std::nullopt;
  switch (update->state) {
    case UpdateState::kOpening:
    case UpdateState::kPreparing:
    case UpdateState::kData:
      return update->last_call + limits.idle_limit;
    default:
      return std::nullopt;
  }
}

std::optional<std::pair<TimePoint, MemberId>> Group::Impl::AckDeadline() const {
  if (update->state == UpdateState::kEnding) return std::nullopt;
  return update->acks.First();
}

void Group::Impl::SetAckDue(MemberId id, const group::LoaderReader& reader) {
  std::optional<TimePoint> due;
  if (!reader.outstanding.empty()) {
    due = std::max(reader.last_ack, reader.outstanding.front().sent) + limits.ack_limit;
  }
  update->acks.Set(id, due);
}

void Group::Impl::On(const Tick&) {
  // The slot stays with its holder, which may still be packing into it. Only the holder's
  // ReleaseSlot, or its death, frees the slot.
  for (const auto& [holder, grant] : ledger.Overdue(now)) {
    const std::string reason =
        fmt::format("{} did not submit leased slot {} within its lease", Label(holder), grant.slot);
    Log(LogLine::kWarning, reason);
    if (update != nullptr) Abandon({reason, GiveUpClass::kDeadline, Suspecting(holder)});
  }
  if (update != nullptr && update->state == UpdateState::kEnding) {
    if (now >= update->cleanup_deadline && !update->cleanup_logged) ReportOverdueCleanUp();
  } else if (update != nullptr) {
    TickUpdate();
  }
  RefuseOverdueDeferred();
  if (catch_up_due.has_value() && *catch_up_due <= now) look_for_catch_up = true;
  for (auto it = slot_waiters.begin(); it != slot_waiters.end();) {
    if (it->deadline > now) {
      ++it;
      continue;
    }
    Refuse(it->call,
           Error(absl::StatusCode::kDeadlineExceeded, "no slot came free: {}", HoldersOfSlots()));
    if (update != nullptr) update->last_call = now;
    it = slot_waiters.erase(it);
  }
}

void Group::Impl::TickUpdate() {
  constexpr absl::StatusCode kDeadline = absl::StatusCode::kDeadlineExceeded;
  if (now >= update->deadline) {
    Abandon({fmt::format("the update's deadline passed: waited for {}", WaitedFor()),
             GiveUpClass::kDeadline, SuspectAwaited(), kDeadline, kDeadline, kDeadline, kDeadline});
    return;
  }
  if (update->state == UpdateState::kPreparing && now >= update->ready_deadline) {
    FailUnready();
  }
  for (auto late = AckDeadline(); late.has_value() && late->first <= now; late = AckDeadline()) {
    const group::LoaderReader& reader = update->readers.at(late->second);
    GiveUp why{fmt::format("{} did not acknowledge part {} within {}", Label(late->second),
                           reader.outstanding.front().part, group::Seconds(limits.ack_limit)),
               GiveUpClass::kDeadline, Suspecting(late->second)};
    if (update->state == UpdateState::kSettling) why.commit_code = kDeadline;
    FailEngine(reader.participant, why);
  }
  if (update->state == UpdateState::kEnding) return;
  if (const std::optional<TimePoint> idle = IdleDeadline(); idle.has_value() && *idle <= now) {
    Abandon({fmt::format("no call from any trainer rank for {}: waited for {}",
                         group::Seconds(limits.idle_limit), WaitedFor()),
             GiveUpClass::kDeadline, SuspectAwaited()});
  }
}

// ---- the group's own state ----

void Group::Impl::On(const ReplaceGroup& e) {
  // A catch-up gives way: it ends with its late instances dirty, as all instances are then.
  if (CatchUpRuns()) GiveWay("the group is replaced");
  const std::optional<GroupState> next =
      CatchUpRuns() ? std::optional(state) : Next(state, GroupTrigger::kReplace);
  if (!next.has_value()) {
    Refuse(e.call, Error(absl::StatusCode::kFailedPrecondition,
                         "group {}: replace: an update to version {} runs", name, update->version));
    return;
  }
  state = *next;
  committed_to.clear();
  replaced.insert(incarnation);
  if (replaced.size() > kRememberedIncarnations) replaced.erase(replaced.begin());
  incarnation = e.incarnation;
  ownership.Replaced(e.by);
  had_version = had_version || version.has_value();
  version.reset();
  past.clear();
  last_update.reset();
  last_catch_up.reset();
  look_for_catch_up = true;
  for (auto& [id, member] : members) member.held.reset();
  for (auto& [instance_name, instance] : instances) {
    Step(&instance.state, InstanceTrigger::kMarkDirty);
    NoteStanding(instance_name);
    instance.reason = "the group was replaced";
  }
  Do(Reply{e.call, absl::OkStatus(), EmptyReply{}});
  Log(LogLine::kInfo, "replaced by a new incarnation: every instance counts as dirty");
  Changed();
}

void Group::Impl::On(const DrainEvent&) {
  if (state == GroupState::kDraining || state == GroupState::kDrained) return;
  Step(&state, GroupTrigger::kDrain);
  look_for_catch_up = true;
  if (CatchUpRuns()) GiveWay("the daemon drains");
  for (const auto& [id, member] : members) {
    if (member.state != MemberState::kLeaving) Do(SendDraining{id});
  }
  Changed();
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
  impl_->now = now;
  impl_->actions = actions;
  impl_->changed = false;
  std::visit([this](const auto& e) { impl_->On(e); }, event);
  impl_->Pump();
  if (impl_->changed) actions->push_back(StateChanged{});
  impl_->actions = nullptr;
  impl_->CheckState();
}

std::optional<TimePoint> Group::NextDeadline() const {
  std::optional<TimePoint> next = impl_->ledger.NextExpiry();
  const auto consider = [&next](std::optional<TimePoint> due) {
    if (due.has_value() && (!next.has_value() || *due < *next)) next = due;
  };
  for (const group::SlotWaiter& waiter : impl_->slot_waiters) consider(waiter.deadline);
  for (const group::DeferredCall& call : impl_->deferred) consider(call.deadline);
  const group::Update* update = impl_->update.get();
  if (update == nullptr) {
    consider(impl_->catch_up_due);
    return next;
  }
  if (update->state == UpdateState::kEnding) {
    if (!update->cleanup_logged) consider(update->cleanup_deadline);
    return next;
  }
  consider(update->deadline);
  if (update->state == UpdateState::kPreparing) consider(update->ready_deadline);
  if (const auto ack = impl_->AckDeadline(); ack.has_value()) consider(ack->first);
  consider(impl_->IdleDeadline());
  return next;
}

const std::string& Group::name() const { return impl_->name; }
uint64_t Group::incarnation() const { return impl_->incarnation; }
const GroupSpec& Group::spec() const { return impl_->spec; }
bool Group::has_members() const { return !impl_->members.empty(); }
const std::string& Group::owner() const { return impl_->ownership.owner(); }
bool Group::has_trainers() const { return !impl_->trainers.empty(); }
bool Group::update_running() const { return impl_->update != nullptr; }
std::optional<Version> Group::version() const { return impl_->version; }

absl::Status Group::CanRegisterLayout(MemberId member) const {
  const group::Member* m = std::as_const(*impl_).Find(member);
  if (m == nullptr || m->state == MemberState::kLeaving) {
    return Error(absl::StatusCode::kFailedPrecondition, "member {} is not attached", member);
  }
  if (m->engine && !NeedsLayout(m->delivery)) {
    return Error(absl::StatusCode::kFailedPrecondition,
                 "{} takes {} delivery: it registers no layout", m->label, Name(m->delivery));
  }
  if (m->state != MemberState::kAttached) {
    return Error(absl::StatusCode::kFailedPrecondition,
                 "{} takes part in the running update to version {}", m->label,
                 impl_->update->version);
  }
  return absl::OkStatus();
}

bool Group::SendsFrom(NodeId node) const {
  if (!impl_->CatchUpRuns()) return TrainsOn(node);
  const std::vector<MemberId>& sources = impl_->update->catch_up->sources;
  return std::any_of(sources.begin(), sources.end(), [this, node](MemberId source) {
    const group::Member* member = std::as_const(*impl_).Find(source);
    return member != nullptr && member->node == node;
  });
}

bool Group::TrainsOn(NodeId node) const {
  return std::any_of(impl_->trainers.begin(), impl_->trainers.end(), [this, node](const auto& t) {
    const group::Member* member = std::as_const(*impl_).Find(t.second);
    return member != nullptr && member->node == node;
  });
}

std::string Group::KeptOut(NodeId node) const {
  const auto it = impl_->kept_out.find(node);
  return it == impl_->kept_out.end() ? "" : it->second;
}

PastUpdate Group::Past(Version version) const {
  if (impl_->update != nullptr && impl_->update->version == version && !impl_->CatchUpRuns()) {
    return {Outcome::kRunning, ""};
  }
  for (auto it = impl_->past.rbegin(); it != impl_->past.rend(); ++it) {
    if (it->version == version) return it->what;
  }
  return {};
}

}  // namespace refitd
