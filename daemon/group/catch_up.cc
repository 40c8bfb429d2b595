// Catch-ups: an instance that lacks the group's version gets it from clean instances that hold it.
//
// A catch-up is an update of the group's own version. Its sources are ranks of clean instances,
// which give: they are not paused and hear nothing. Its participants are the late instances, which
// hear Prepare and its outcome as in any update. A program moves the bytes, and every byte is read
// back (P1).
//
//   opened      catch_up_gather after a catch-up became possible, while no update runs
//   gives way   to the first call of a trainer that would open an update; to a drain; when a source
//   instance
//               left, registered another layout or is dirty: the next fill then takes others
//   fails       the late instances are left alone for catch_up_wait, doubled at each further
//   failure
//
// A trainer's call that comes while a catch-up runs is checked at once and waits, until its own
// deadline, for the copies of the catch-up to end (P4, P6).
#include <algorithm>
#include <set>
#include <utility>

#include "daemon/group/group_impl.h"

namespace refitd {
namespace {

template <typename Instances>
std::string Names(const Instances& names) {
  return group::Few({names.begin(), names.end()});
}

}  // namespace

// ---- who gives, and who catches up ----

bool Group::Impl::MayCatchUp(const Instance& instance) const {
  if (WhyKeptOut(instance) != nullptr || !Complete(instance)) return false;
  return std::all_of(instance.ranks.begin(), instance.ranks.end(), [this](const auto& rank) {
    const Member& member = *Find(rank.second);
    return member.catch_up && CatchesUp(member.delivery);
  });
}

// P1: bytes are given only by an instance that holds the version in full, in memory that is at
// rest, and only where this group itself verified them: what a rank says that it holds when it
// attaches, or registers another layout, is its own word, on which no other instance should depend.
bool Group::Impl::Gives(const Instance& instance) const {
  const auto verified = [this](const auto& rank) { return Find(rank.second)->verified; };
  return instance.state == InstanceState::kClean && MayCatchUp(instance) &&
         VersionOf(instance) == group::HeldVersion{*version, incarnation} &&
         std::all_of(instance.ranks.begin(), instance.ranks.end(), verified);
}

bool Group::Impl::LacksVersion(const Instance& instance) const {
  return MayCatchUp(instance) && VersionOf(instance) != group::HeldVersion{*version, incarnation};
}

std::vector<std::string> Group::Impl::LateInstances() const {
  return InstancesThat([this](const Instance& instance) {
    return Available(instance) && LacksVersion(instance) && instance.catch_up_after <= now;
  });
}

// Instances on the late instances' own nodes come first, since their bytes cross no link. After a
// catch-up that failed, only one instance gives, and each time another one, so that an instance
// that can't be reached costs one try and not every catch-up.
std::vector<std::string> Group::Impl::ChooseSources(
    const std::vector<std::string>& late_instances) const {
  std::vector<std::string> source_instances =
      InstancesThat([this](const Instance& instance) { return Gives(instance); });
  if (source_instances.empty()) return source_instances;
  if (failed_catch_ups > 0) {
    return {source_instances[static_cast<size_t>(failed_catch_ups - 1) % source_instances.size()]};
  }
  std::set<NodeId> near;
  for (const std::string& late_instance : late_instances) {
    for (const auto& [rank, id] : instances.at(late_instance).ranks) near.insert(Find(id)->node);
  }
  std::stable_partition(source_instances.begin(), source_instances.end(),
                        [&](const std::string& source_instance) {
                          const auto& ranks = instances.at(source_instance).ranks;
                          return std::any_of(ranks.begin(), ranks.end(), [&](const auto& rank) {
                            return near.contains(Find(rank.second)->node);
                          });
                        });
  if (source_instances.size() > kMaxSourceInstances) source_instances.resize(kMaxSourceInstances);
  return source_instances;
}

bool Group::Impl::TakenIn(const Instance& instance) const {
  if (!Available(instance)) return false;
  return !CatchUpRuns() || (LacksVersion(instance) && instance.catch_up_after <= now);
}

// ---- opening ----

// Finds when the next catch-up is due. This looks at every instance, so it is done only after a
// step that may have changed the answer.
void Group::Impl::FindCatchUpDue() {
  look_for_catch_up = false;
  catch_up_due.reset();
  const auto lacking = !limits.catch_ups || !version.has_value() || state != GroupState::kIdle
                           ? std::vector<std::string>()
                           : InstancesThat([this](const Instance& instance) {
                               return Available(instance) && LacksVersion(instance);
                             });
  const bool possible =
      !lacking.empty() && std::any_of(instances.begin(), instances.end(),
                                      [this](const auto& i) { return Gives(i.second); });
  if (!possible) {
    catch_up_possible.reset();
    return;
  }
  if (!catch_up_possible.has_value()) catch_up_possible = now;
  TimePoint first = TimePoint::max();
  for (const std::string& name : lacking)
    first = std::min(first, instances.at(name).catch_up_after);
  catch_up_due = std::max(first, *catch_up_possible + limits.catch_up_gather);
}

void Group::Impl::OpenCatchUpIfDue() {
  if (update != nullptr) return;
  if (look_for_catch_up) FindCatchUpDue();
  if (!catch_up_due.has_value() || *catch_up_due > now) return;
  catch_up_due.reset();
  catch_up_possible.reset();
  update = std::make_unique<Update>();
  update->id = next_update();
  update->version = *version;
  update->started = now;
  update->deadline = now + limits.max_duration;
  update->verification = Verification::kReadback;
  update->evict_late = true;
  update->last_call = now;
  update->catch_up.emplace();
  Step(&state, GroupTrigger::kOpen);
  Changed();
  PumpUpdate();
  if (update == nullptr && look_for_catch_up) FindCatchUpDue();
}

void Group::Impl::AssembleCatchUp() {
  group::CatchUp& catch_up = *update->catch_up;
  const std::vector<std::string> late_instances = LateInstances();
  catch_up.source_instances = ChooseSources(late_instances);
  catch_up.sources.clear();
  for (const std::string& source_instance : catch_up.source_instances) {
    for (const auto& [rank, id] : instances.at(source_instance).ranks)
      catch_up.sources.push_back(id);
  }
  if (late_instances.empty()) return GiveWay("no instance lacks the version any more");
  if (catch_up.source_instances.empty()) return GiveWay("no instance is left that gives");
  Assemble();
  if (update == nullptr || update->state != UpdateState::kPreparing) return;
  Log(LogLine::kInfo,
      fmt::format("catch-up to version {}: instance {} from instance {}", update->version,
                  Names(late_instances), Names(catch_up.source_instances)));
}

// ---- giving way ----

void Group::Impl::GiveWay(std::string reason) {
  if (update->state == UpdateState::kEnding) return;
  update->catch_up->gave_way = true;
  Abandon({std::move(reason), GiveUpClass::kOther});
}

void Group::Impl::GiveUpCatchUpIfSourcesChanged() {
  if (!CatchUpRuns() || update->state == UpdateState::kEnding) return;
  for (const std::string& source_instance : update->catch_up->source_instances) {
    const auto it = instances.find(source_instance);
    if (it != instances.end() && Gives(it->second)) continue;
    return GiveWay(fmt::format("instance {} can't give any more", source_instance));
  }
}

// The call is checked already, so that a call which is refused does not end the catch-up (P10).
void Group::Impl::Defer(std::variant<BeginEvent, RefitEvent> event, Duration duration) {
  if (duration == Duration(0)) duration = std::min(limits.default_duration, limits.max_duration);
  const Version wanted = std::visit([](const auto& e) { return e.version; }, event);
  deferred.push_back({std::move(event), now + duration});
  GiveWay(fmt::format("it gives way to the update to version {}", wanted));
  Changed();
}

void Group::Impl::TakeDeferred() {
  while (!deferred.empty() && !CatchUpRuns()) {
    group::DeferredCall call = std::move(deferred.front());
    deferred.pop_front();
    // The rest of the call's duration. Tick has refused each call whose time is over.
    const Duration remaining =
        std::max<Duration>(call.deadline - now, std::chrono::milliseconds(1));
    std::visit(
        [this, remaining](auto& e) {
          e.duration = remaining;
          On(e);
        },
        call.event);
    PumpUpdate();
  }
}

void Group::Impl::RefuseDeferred(Version wanted, const absl::Status& why) {
  std::erase_if(deferred, [&](const group::DeferredCall& call) {
    return std::visit(
        [&](const auto& e) {
          if (e.version != wanted) return false;
          Refuse(e.call, why);
          return true;
        },
        call.event);
  });
}

std::set<Version> Group::Impl::DeferredOf(MemberId member) const {
  std::set<Version> versions;
  for (const group::DeferredCall& call : deferred) {
    std::visit(
        [&](const auto& e) {
          if (e.member == member) versions.insert(e.version);
        },
        call.event);
  }
  return versions;
}

bool Group::Impl::RefuseDeferredCall(CallId call, const absl::Status& why) {
  const auto it = std::find_if(deferred.begin(), deferred.end(), [call](const auto& waiting) {
    return std::visit([call](const auto& e) { return e.call == call; }, waiting.event);
  });
  if (it == deferred.end()) return false;
  deferred.erase(it);
  Refuse(call, why);
  return true;
}

void Group::Impl::RefuseOverdueDeferred() {
  std::erase_if(deferred, [this](const group::DeferredCall& call) {
    if (call.deadline > now) return false;
    const CallId id = std::visit([](const auto& e) { return e.call; }, call.event);
    Refuse(id, WithFailure(
                   Error(absl::StatusCode::kDeadlineExceeded,
                         "the catch-up that runs did not end in time: waited for {}", WaitedFor()),
                   SuspectAwaited()));
    return true;
  });
}

// ---- the end ----

void Group::Impl::NoteFailedCatchUp(Instance* instance, const std::string& reason) {
  Duration wait = limits.catch_up_wait;
  for (int i = 0; i < instance->failed_catch_ups && wait < limits.catch_up_most_wait; ++i)
    wait *= 2;
  ++instance->failed_catch_ups;
  instance->catch_up_after = now + std::min(wait, limits.catch_up_most_wait);
  instance->catch_up_failure = reason;
}

// The catch-up was given up. If its digests differed, the next catch-up has the same source
// instances: leaving out some of them could leave out those that are right.
void Group::Impl::NoteFailedCatchUps() {
  // A catch-up whose source instance is gone gave way, and did not fail. This must be found out
  // here, since the loss of a source instance's daemon is told before the loss of its ranks.
  const auto gone = [this](const std::string& source_instance) {
    const auto it = instances.find(source_instance);
    return it == instances.end() || !Gives(it->second);
  };
  group::CatchUp& catch_up = *update->catch_up;
  catch_up.gave_way = catch_up.gave_way ||
                      (version.has_value() && std::any_of(catch_up.source_instances.begin(),
                                                          catch_up.source_instances.end(), gone));
  if (catch_up.gave_way) return;
  const auto& all = update->participants;
  const bool by_late_instances =
      !all.empty() && std::all_of(all.begin(), all.end(), [](const auto& p) { return p.evicted; });
  if (!by_late_instances && update->give_up.kind != GiveUpClass::kVerification) ++failed_catch_ups;
  const std::string& reason = update->give_up.reason;
  if (update->participants.empty()) {  // the catch-up has not been assembled
    for (const std::string& late_instance : LateInstances()) {
      NoteFailedCatchUp(&instances.at(late_instance), reason);
    }
  }
  for (const Participant& participant : update->participants) {
    if (!participant.evicted) NoteFailedCatchUp(&instances.at(participant.instance), reason);
  }
}

void Group::Impl::ForgetFailedCatchUps() {
  failed_catch_ups = 0;
  for (auto& [instance_name, instance] : instances) {
    instance.failed_catch_ups = 0;
    instance.catch_up_after = TimePoint();
    instance.catch_up_failure.clear();
  }
}

int64_t Group::Impl::CaughtUpBytes() const {
  if (update->catalog == nullptr) return 0;
  int64_t bytes = 0;
  for (uint32_t d = 0; d < update->catalog->destinations().size(); ++d) {
    if (!update->skip_destination[d]) bytes += update->bytes_written[d];
  }
  return bytes;
}

void Group::Impl::LogCatchUpEnd(Outcome outcome, const std::string& reason) {
  if (outcome == Outcome::kCommitted) {
    std::vector<std::string> caught_up;
    for (const Participant& p : update->participants) {
      if (!p.evicted) caught_up.push_back(p.instance);
    }
    return Log(
        LogLine::kInfo,
        fmt::format("catch-up committed: version {}, instance {}, {} bytes in {}", update->version,
                    Names(caught_up), CaughtUpBytes(), group::Seconds(now - update->started)));
  }
  Log(update->catch_up->gave_way ? LogLine::kInfo : LogLine::kWarning,
      fmt::format("catch-up to version {} {}: {}", update->version,
                  update->catch_up->gave_way ? "given up" : "failed", reason));
}

std::string Group::Impl::CatchUpState(const Instance& instance) const {
  if (!limits.catch_ups || !version.has_value() || !LacksVersion(instance)) return "";
  if (CatchUpRuns()) {
    const bool in = std::any_of(
        update->participants.begin(), update->participants.end(),
        [&](const Participant& p) { return p.instance == instance.name && !p.evicted; });
    if (in)
      return fmt::format("catches up from instance {}", Names(update->catch_up->source_instances));
  }
  const bool any = std::any_of(instances.begin(), instances.end(),
                               [this](const auto& i) { return Gives(i.second); });
  if (!any && !CatchUpRuns()) {
    return fmt::format("waits for the next version: no clean instance gives version {}", *version);
  }
  if (instance.catch_up_after > now) {
    return fmt::format("is tried again in {}: {}", group::Seconds(instance.catch_up_after - now),
                       instance.catch_up_failure);
  }
  return "waits for a catch-up";
}

// P1: while a catch-up copies, every source belongs to a clean instance that holds the version, and
// none takes part in the update that writes.
void Group::Impl::CheckCatchUp() const {
  REFITD_CHECK(deferred.empty() || CatchUpRuns());
  REFITD_CHECK(!catch_up_due.has_value() || (limits.catch_ups && version.has_value()));
  if (!CatchUpRuns()) return;
  const Update& u = *update;
  REFITD_CHECK(u.trainers.empty() && u.parts.empty() && u.pushed.empty());
  REFITD_CHECK(u.verification == Verification::kReadback);
  for (const MemberId source : u.catch_up->sources) {
    REFITD_CHECK(!u.participant_of.contains(source));
  }
  if (u.state == UpdateState::kEnding) return;
  REFITD_CHECK(limits.catch_ups && deferred.empty() && version == u.version);
  for (const std::string& source_instance : u.catch_up->source_instances) {
    REFITD_CHECK(instances.contains(source_instance) && Gives(instances.at(source_instance)));
  }
  // Only a program moves bytes in a catch-up, and the catch-up stays opening until the program is
  // there.
  if (u.state != UpdateState::kOpening) {
    REFITD_CHECK(u.program.has_value() && u.program->sources == u.catch_up->sources);
  }
}

bool Group::catch_up_running() const { return impl_->CatchUpRuns(); }

}  // namespace refitd
