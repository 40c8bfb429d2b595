#include "daemon/group/updates.h"

#include <algorithm>
#include <utility>

#include "transport/base/errors.h"
#include "transport/base/failure.h"

namespace refitd::group {

Updates::Updates(std::function<UpdateId()> next_update, const Machines& below)
    : next_update_(std::move(next_update)), on_(below) {}

// ---- which update ----

bool Updates::WaitsForHold() const {
  return running_ != nullptr && !CatchUpRuns() && !RollbackRuns() &&
         running_->state == UpdateState::kOpening && on_.rollback->Holds() &&
         on_.out->now() < running_->deadline;
}

absl::StatusOr<TrainerProgress*> Updates::Find(const Member& member, Version wanted,
                                               UpdateId wanted_update) const {
  Update* const opened = Opened();
  if (IsAnother(wanted_update)) return history_.Refuse(wanted_update, wanted);
  const bool open = opened != nullptr && !opened->content.has_value();
  if (!open || opened->version != wanted) {
    REFITD_RETURN_IF_ERROR(history_.Refuse(wanted));
    if (!open) return Precondition("no update to version {} is open: begin it first", wanted);
    return Precondition("version: {}, but the update that runs is to version {}", wanted,
                        opened->version);
  }
  if (opened->state == UpdateState::kEnding) {
    Failure failure = opened->end.why().failure;
    failure.version = wanted.value();
    return WithFailure(Error(absl::StatusCode::kAborted, "the update to version {} is lost: {}",
                             wanted, opened->end.why().reason),
                       failure);
  }
  const auto it = opened->push.trainers().find(member.rank);
  if (member.state != MemberState::kReady || it == opened->push.trainers().end()) {
    return Precondition("the Begin of version {} by {} was not answered yet", wanted, member.label);
  }
  return &it->second;
}

// ---- begin ----

Update* Updates::Run(Version version, Duration duration) {
  if (duration == Duration(0)) {
    duration = std::min(on_.limits.default_duration, on_.limits.max_duration);
  }
  running_ = std::make_shared<Update>(
      next_update_(), version,
      Update::Machines{on_.limits, on_.members, on_.slots, on_.requests, &buckets_, on_.out});
  running_->started = on_.out->now();
  running_->deadline = on_.out->now() + duration;
  on_.requests->NoteCall();
  return running_.get();
}

void Updates::Open(const BeginEvent& e) {
  Step(&state_, GroupTrigger::kOpen);
  Update* const update = Run(e.version, e.duration);
  update->verification = e.verification.has_value()
                             ? *e.verification
                             : on_.members->DefaultVerification(on_.limits.default_verification);
  update->evict_late = e.evict_late;
  buckets_.Clear();
  on_.out->Log(LogLine::kInfo, fmt::format("update to version {} opened", e.version));
}

void Updates::OpenRollback(const RollbackEvent& e) {
  Step(&state_, GroupTrigger::kOpen);
  const Version last = *on_.versions->last();
  Update* const update = Run(Version(last.value() + 1), e.duration);
  update->content = on_.versions->previous_content();
  update->verification = Verification::kOff;
  buckets_.Clear();
  on_.out->Log(LogLine::kInfo, fmt::format("rollback of version {} begins: to the content of "
                                           "version {}, as version {}",
                                           last, *update->content, update->version));
}

void Updates::OpenCatchUp() {
  if (running_ == nullptr) Step(&state_, GroupTrigger::kOpen);
  waiting_ = std::move(running_);
  Update* const update = Run(*on_.versions->last(), on_.limits.max_duration);
  update->verification = Verification::kReadback;
  update->evict_late = true;
  update->catch_up.emplace();
  on_.out->Changed();
}

bool Updates::Resume() {
  if (running_ != nullptr || waiting_ == nullptr) return false;
  running_ = std::move(waiting_);
  running_->id = next_update_();  // ids grow with the updates that are assembled
  return true;
}

// ---- give up ----

void Updates::Abandon(Update* given_up, GiveUp why) {
  if (given_up->state == UpdateState::kEnding) return;
  Step(&given_up->state, UpdateTrigger::kGiveUp);
  given_up->end.GiveUpFor(std::move(why));
  on_.out->Do(UpdateAbandoned{given_up->id});
  given_up->push.DropUnstarted();
  on_.out->Changed();
  if (given_up == waiting_.get()) GiveWay("an update has to end");
}

void Updates::GiveWay(std::string reason) {
  if (running_->state == UpdateState::kEnding) return;
  running_->catch_up->gave_way = true;
  Abandon({std::move(reason), GiveUpClass::kOther});
}

bool Updates::Leave(CallId operator_call) {
  return (running_ != nullptr && running_->end.Leave(operator_call)) ||
         (waiting_ != nullptr && waiting_->end.Leave(operator_call));
}

// ---- end ----

void Updates::End(UpdateView view, PastUpdate what) {
  history_.Add(std::move(view), std::move(what));
  running_.reset();
  if (waiting_ == nullptr) Step(&state_, GroupTrigger::kEnd);
  on_.out->Changed();
}

bool Updates::Replace() {
  if (CatchUpRuns() && waiting_ == nullptr) {
    // It ends with its late instances dirty, as all instances are then.
    GiveWay("the group is replaced");
  } else {
    const std::optional<GroupState> next = Next(state_, GroupTrigger::kReplace);
    if (!next.has_value()) return false;
    state_ = *next;
  }
  history_.Clear();
  return true;
}

void Updates::Drain() {
  Step(&state_, GroupTrigger::kDrain);
  if (CatchUpRuns()) GiveWay("the daemon drains");
}

// ---- time ----

std::optional<TimePoint> Updates::IdleDeadline() const {
  if (running_ == nullptr || running_->catch_up.has_value() || on_.slots->anyone_waits())
    return std::nullopt;
  // A trainer rank waits for an answer. A Commit that waits for the rank's own buckets does not
  // count.
  const auto outstanding = [this](const auto& p) {
    if (p.second->kind != CallKind::kCommit) return true;
    const Member* member = on_.members->Find(p.second->member);
    if (member == nullptr) return true;
    const auto it = running_->push.trainers().find(member->rank);
    return it == running_->push.trainers().end() || it->second.committed ||
           !it->second.awaited_buckets.has_value();
  };
  const Requests::ByCall& waiting = on_.requests->waiting();
  if (std::any_of(waiting.begin(), waiting.end(), outstanding)) return std::nullopt;
  switch (running_->state) {
    case UpdateState::kOpening:
    case UpdateState::kPreparing:
    case UpdateState::kData:
      return on_.requests->last_call() + on_.limits.idle_limit;
    default:
      return std::nullopt;
  }
}

Failure Updates::SuspectAwaited() const {
  const Update& update = *running_;
  Failure failure;
  if (update.state == UpdateState::kOpening && !CatchUpRuns()) {
    on_.members->SuspectMissing(update.push.BegunRanks(), &failure);
  }
  if (update.awaits_ranks()) {
    for (uint32_t i = 0; i < update.participants.all().size(); ++i) {
      if (!update.participants.evicted()[i]) update.participants.SuspectUnready(i, &failure);
    }
  }
  if (update.state == UpdateState::kData || update.state == UpdateState::kSettling) {
    update.push.SuspectAwaited(&failure);
  }
  return failure;
}

std::string Updates::WaitedFor(TimePoint now) const {
  switch (running_->state) {
    case UpdateState::kOpening: {
      std::vector<std::string> missing;
      if (!CatchUpRuns()) missing = on_.members->Missing(running_->push.BegunRanks());
      if (missing.empty() && (CatchUpRuns() || on_.compiler->busy())) {
        missing.emplace_back("the program to be compiled");
      }
      if (missing.empty() && on_.rollback->Holds()) missing.push_back(on_.rollback->Describe(now));
      return Few(missing);
    }
    case UpdateState::kPreparing: {
      std::vector<std::string> missing = running_->participants.Unready();
      if (!running_->data_plane_up) missing.emplace_back("the data plane between its daemons");
      return Few(missing);
    }
    case UpdateState::kVerifying:
      return "the verification of what was written";
    case UpdateState::kStaged:
    case UpdateState::kFlipping:
      return Few(running_->participants.Unready());
    default:
      break;
  }
  std::vector<std::string> waits;
  running_->push.AppendUnacknowledged(&waits);
  if (running_->program.comparing()) waits.emplace_back("the comparison of replicas");
  if (running_->program.running()) waits.emplace_back("the program");
  const int64_t transfers = running_->push.in_flight();
  if (transfers > 0) waits.push_back(fmt::format("{} transfers", transfers));
  if (running_->state == UpdateState::kEnding) {
    if (running_->readback.running()) waits.emplace_back("the verification of what was written");
    return Few(waits);
  }
  running_->push.AppendUnstarted(&waits);
  if (const int64_t needed = running_->program.waits_for_slots(); needed > 0) {
    waits.push_back(fmt::format("{} slots for the program ({})", needed, on_.slots->Holders()));
  }
  running_->push.AppendUncommitted(&waits);
  return Few(waits);
}

// ---- invariants ----

void Updates::CheckState() const {
  // P3: one update at a time.
  const bool updating = state_ == GroupState::kUpdating || state_ == GroupState::kDraining;
  REFITD_CHECK(updating == (running_ != nullptr));
  // An update waits for a hold beside a catch-up alone, before it has asked engines for anything.
  if (waiting_ != nullptr) {
    REFITD_CHECK(CatchUpRuns() && *on_.versions->last() < waiting_->version);
    REFITD_CHECK(waiting_->state == UpdateState::kOpening ||
                 waiting_->state == UpdateState::kEnding);
    REFITD_CHECK(waiting_->participants.all().empty());
  }
  if (running_ == nullptr) return;
  REFITD_CHECK(running_->state != UpdateState::kCommitted &&
               running_->state != UpdateState::kAborted);
  // P3: versions grow; a catch-up installs the group's own.
  REFITD_CHECK(!on_.versions->last().has_value() || *on_.versions->last() < running_->version ||
               (CatchUpRuns() && *on_.versions->last() == running_->version));
}

// P1: while a catch-up copies, every source belongs to a clean instance that holds the version, and
// none takes part in the update that writes.
void Updates::CheckCatchUp() const {
  const Update& u = *running_;
  REFITD_CHECK(u.push.trainers().empty() && u.push.settled() && u.coverage.tensors() == 0);
  REFITD_CHECK(u.verification == Verification::kReadback);
  if (u.state == UpdateState::kEnding) return;
  REFITD_CHECK(on_.limits.catch_ups && on_.versions->last() == u.version);
  REFITD_CHECK(!on_.catch_up->anyone_waits());
  for (const std::string& source_instance : u.catch_up->source_instances) {
    REFITD_CHECK(on_.catch_up->Gives(source_instance));
  }
  // Only a program moves bytes in a catch-up, and the catch-up stays opening until the program is
  // there.
  if (u.state != UpdateState::kOpening) {
    REFITD_CHECK(u.program.exists() && u.use->sources == u.catch_up->sources);
  }
}

// P1: a rollback moves nothing, and only instances with backs are in it.
void Updates::CheckRollback() const {
  const Update& u = *running_;
  REFITD_CHECK(u.push.trainers().empty() && u.push.settled() && u.coverage.tensors() == 0);
  REFITD_CHECK(!u.program.exists() && !u.readback.started() && u.destinations.size() == 0);
  for (const Participant& p : u.participants.all()) REFITD_CHECK(p.shadowed && !p.written);
}

void Updates::CheckInvariants() const {
  CheckState();
  REFITD_CHECK(!on_.catch_up->anyone_waits() || CatchUpRuns());
  if (running_ == nullptr) {
    // P3: no member, instance or call takes part in an update that does not run.
    REFITD_CHECK(!on_.slots->anyone_waits());
    for (const auto& [id, member] : on_.members->members()) REFITD_CHECK(!InUpdate(member.state));
    for (const auto& [name, instance] : on_.members->instances()) {
      REFITD_CHECK(!InUpdate(instance.state));
    }
    return;
  }
  if (CatchUpRuns()) CheckCatchUp();
  const Update& u = *running_;
  const bool decided =
      u.state == UpdateState::kSettling || u.state == UpdateState::kVerifying || u.staged();
  u.participants.CheckInvariants(u.state);
  u.program.CheckInvariants();
  u.push.CheckInvariants(decided);
  u.readback.CheckInvariants();
  u.end.CheckInvariants(u.state == UpdateState::kEnding);
  // P1: nothing is settled before every trainer rank has committed.
  if (RollbackRuns()) return CheckRollback();
  if (CatchUpRuns() || !decided) return;
  REFITD_CHECK(static_cast<int>(u.push.trainers().size()) == on_.members->spec().trainer_ranks);
}

}  // namespace refitd::group
