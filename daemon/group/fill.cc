// Fills: an instance that lacks the group's version gets it from clean instances that hold it.
//
// A fill is an update of the group's own version. Its sources are ranks of clean instances, which
// give: they are not paused and hear nothing. Its participants are the newcomers, which hear
// Prepare and its outcome as in any update. A program moves the bytes, and every byte is read back
// (P1).
//
//   opened      fill_gather after a fill became possible, while no update runs
//   gives way   to the first call of a trainer that would open an update; to a drain; when a giver
//               left, registered another layout or is dirty: the next fill then takes others
//   fails       the newcomers are left alone for fill_wait, doubled at each further failure
//
// A trainer's call that comes while a fill runs is checked at once and waits, until its own
// deadline, for the copies of the fill to end (P4, P6).
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

// ---- who gives, and who is filled ----

bool Group::Impl::Fillable(const Instance& instance) const {
  if (WhyKeptOut(instance) != nullptr || !Complete(instance)) return false;
  return std::all_of(instance.ranks.begin(), instance.ranks.end(), [this](const auto& rank) {
    const Member& member = *Find(rank.second);
    return member.fill && Fills(member.delivery);
  });
}

// P1: bytes are given only by an instance that holds the version in full, in memory that is at
// rest, and only where this group itself verified them: what a rank says that it holds when it
// attaches, or registers another layout, is its own word, on which no other instance should depend.
bool Group::Impl::Gives(const Instance& instance) const {
  const auto verified = [this](const auto& rank) { return Find(rank.second)->verified; };
  return instance.state == InstanceState::kClean && Fillable(instance) &&
         VersionOf(instance) == group::HeldVersion{*version, incarnation} &&
         std::all_of(instance.ranks.begin(), instance.ranks.end(), verified);
}

bool Group::Impl::LacksVersion(const Instance& instance) const {
  return Fillable(instance) && VersionOf(instance) != group::HeldVersion{*version, incarnation};
}

std::vector<std::string> Group::Impl::Newcomers() const {
  return InstancesThat([this](const Instance& instance) {
    return Available(instance) && LacksVersion(instance) && instance.fill_after <= now;
  });
}

// Instances on the newcomers' own nodes come first, since their bytes cross no link. After a fill
// that failed, only one instance gives, and each time another one, so that an instance that can't
// be reached costs one try and not every fill.
std::vector<std::string> Group::Impl::ChooseGivers(
    const std::vector<std::string>& newcomers) const {
  std::vector<std::string> givers =
      InstancesThat([this](const Instance& instance) { return Gives(instance); });
  if (givers.empty()) return givers;
  if (failed_fills > 0) {
    return {givers[static_cast<size_t>(failed_fills - 1) % givers.size()]};
  }
  std::set<NodeId> near;
  for (const std::string& newcomer : newcomers) {
    for (const auto& [rank, id] : instances.at(newcomer).ranks) near.insert(Find(id)->node);
  }
  std::stable_partition(givers.begin(), givers.end(), [&](const std::string& giver) {
    const auto& ranks = instances.at(giver).ranks;
    return std::any_of(ranks.begin(), ranks.end(),
                       [&](const auto& rank) { return near.contains(Find(rank.second)->node); });
  });
  if (givers.size() > kMaxGivers) givers.resize(kMaxGivers);
  return givers;
}

bool Group::Impl::TakenIn(const Instance& instance) const {
  if (!Available(instance)) return false;
  return !FillRuns() || (LacksVersion(instance) && instance.fill_after <= now);
}

// ---- opening ----

// Finds when the next fill is due. This looks at every instance, so it is done only after a step
// that may have changed the answer.
void Group::Impl::FindFillDue() {
  look_for_fill = false;
  fill_due.reset();
  const auto lacking = !limits.fills || !version.has_value() || state != GroupState::kIdle
                           ? std::vector<std::string>()
                           : InstancesThat([this](const Instance& instance) {
                               return Available(instance) && LacksVersion(instance);
                             });
  const bool possible =
      !lacking.empty() && std::any_of(instances.begin(), instances.end(),
                                      [this](const auto& i) { return Gives(i.second); });
  if (!possible) {
    fill_possible.reset();
    return;
  }
  if (!fill_possible.has_value()) fill_possible = now;
  TimePoint first = TimePoint::max();
  for (const std::string& name : lacking) first = std::min(first, instances.at(name).fill_after);
  fill_due = std::max(first, *fill_possible + limits.fill_gather);
}

void Group::Impl::OpenFillIfDue() {
  if (update != nullptr) return;
  if (look_for_fill) FindFillDue();
  if (!fill_due.has_value() || *fill_due > now) return;
  fill_due.reset();
  fill_possible.reset();
  update = std::make_unique<Update>();
  update->id = next_update();
  update->version = *version;
  update->started = now;
  update->deadline = now + limits.max_duration;
  update->verification = Verification::kReadback;
  update->evict_late = true;
  update->last_call = now;
  update->fill.emplace();
  Step(&state, GroupTrigger::kOpen);
  Changed();
  PumpUpdate();
  if (update == nullptr && look_for_fill) FindFillDue();
}

void Group::Impl::AssembleFill() {
  group::Fill& fill = *update->fill;
  const std::vector<std::string> newcomers = Newcomers();
  fill.givers = ChooseGivers(newcomers);
  fill.sources.clear();
  for (const std::string& giver : fill.givers) {
    for (const auto& [rank, id] : instances.at(giver).ranks) fill.sources.push_back(id);
  }
  if (newcomers.empty()) return GiveWay("no instance lacks the version any more");
  if (fill.givers.empty()) return GiveWay("no instance is left that gives");
  Assemble();
  if (update == nullptr || update->state != UpdateState::kPreparing) return;
  Log(LogLine::kInfo, fmt::format("fill with version {}: instance {} from instance {}",
                                  update->version, Names(newcomers), Names(fill.givers)));
}

// ---- giving way ----

void Group::Impl::GiveWay(std::string reason) {
  if (update->state == UpdateState::kEnding) return;
  update->fill->gave_way = true;
  Abandon({std::move(reason), GiveUpClass::kOther});
}

void Group::Impl::GiveUpFillIfGiversChanged() {
  if (!FillRuns() || update->state == UpdateState::kEnding) return;
  for (const std::string& giver : update->fill->givers) {
    const auto it = instances.find(giver);
    if (it != instances.end() && Gives(it->second)) continue;
    return GiveWay(fmt::format("instance {} can't give any more", giver));
  }
}

// The call is checked already, so that a call which is refused does not end the fill (P10).
void Group::Impl::Defer(std::variant<BeginEvent, RefitEvent> event, Duration duration) {
  if (duration == Duration(0)) duration = std::min(limits.default_duration, limits.max_duration);
  const Version wanted = std::visit([](const auto& e) { return e.version; }, event);
  deferred.push_back({std::move(event), now + duration});
  GiveWay(fmt::format("it gives way to the update to version {}", wanted));
  Changed();
}

void Group::Impl::TakeDeferred() {
  while (!deferred.empty() && !FillRuns()) {
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
    Refuse(id,
           WithFailure(Error(absl::StatusCode::kDeadlineExceeded,
                             "the fill that runs did not end in time: waited for {}", WaitedFor()),
                       SuspectAwaited()));
    return true;
  });
}

// ---- the end ----

void Group::Impl::NoteFailedFill(Instance* instance, const std::string& reason) {
  Duration wait = limits.fill_wait;
  for (int i = 0; i < instance->failed_fills && wait < limits.fill_most_wait; ++i) wait *= 2;
  ++instance->failed_fills;
  instance->fill_after = now + std::min(wait, limits.fill_most_wait);
  instance->fill_failure = reason;
}

// The fill was given up. If its digests differed, the next fill has the same givers: leaving out
// some of them could leave out those that are right.
void Group::Impl::NoteFailedFills() {
  // A fill whose giver is gone gave way, and did not fail. This must be found out here, since the
  // loss of a giver's daemon is told before the loss of its ranks.
  const auto gone = [this](const std::string& giver) {
    const auto it = instances.find(giver);
    return it == instances.end() || !Gives(it->second);
  };
  group::Fill& fill = *update->fill;
  fill.gave_way = fill.gave_way || (version.has_value() &&
                                    std::any_of(fill.givers.begin(), fill.givers.end(), gone));
  if (fill.gave_way) return;
  const auto& all = update->participants;
  const bool by_newcomers =
      !all.empty() && std::all_of(all.begin(), all.end(), [](const auto& p) { return p.evicted; });
  if (!by_newcomers && update->give_up.kind != GiveUpClass::kVerification) ++failed_fills;
  const std::string& reason = update->give_up.reason;
  if (update->participants.empty()) {  // the fill has not been assembled
    for (const std::string& newcomer : Newcomers()) {
      NoteFailedFill(&instances.at(newcomer), reason);
    }
  }
  for (const Participant& participant : update->participants) {
    if (!participant.evicted) NoteFailedFill(&instances.at(participant.instance), reason);
  }
}

void Group::Impl::ForgetFailedFills() {
  failed_fills = 0;
  for (auto& [instance_name, instance] : instances) {
    instance.failed_fills = 0;
    instance.fill_after = TimePoint();
    instance.fill_failure.clear();
  }
}

int64_t Group::Impl::FilledBytes() const {
  if (update->catalog == nullptr) return 0;
  int64_t bytes = 0;
  for (uint32_t d = 0; d < update->catalog->destinations().size(); ++d) {
    if (!update->skip_destination[d]) bytes += update->bytes_written[d];
  }
  return bytes;
}

void Group::Impl::LogFillEnd(Outcome outcome, const std::string& reason) {
  if (outcome == Outcome::kCommitted) {
    std::vector<std::string> filled;
    for (const Participant& p : update->participants) {
      if (!p.evicted) filled.push_back(p.instance);
    }
    return Log(
        LogLine::kInfo,
        fmt::format("fill committed: version {}, instance {}, {} bytes in {}", update->version,
                    Names(filled), FilledBytes(), group::Seconds(now - update->started)));
  }
  Log(update->fill->gave_way ? LogLine::kInfo : LogLine::kWarning,
      fmt::format("fill with version {} {}: {}", update->version,
                  update->fill->gave_way ? "given up" : "failed", reason));
}

std::string Group::Impl::FillState(const Instance& instance) const {
  if (!limits.fills || !version.has_value() || !LacksVersion(instance)) return "";
  if (FillRuns()) {
    const bool in = std::any_of(
        update->participants.begin(), update->participants.end(),
        [&](const Participant& p) { return p.instance == instance.name && !p.evicted; });
    if (in) return fmt::format("is filled from instance {}", Names(update->fill->givers));
  }
  const bool any = std::any_of(instances.begin(), instances.end(),
                               [this](const auto& i) { return Gives(i.second); });
  if (!any && !FillRuns()) {
    return fmt::format("waits for the next version: no clean instance gives version {}", *version);
  }
  if (instance.fill_after > now) {
    return fmt::format("is tried again in {}: {}", group::Seconds(instance.fill_after - now),
                       instance.fill_failure);
  }
  return "waits for a fill";
}

// P1: while a fill copies, every source belongs to a clean instance that holds the version, and
// none takes part in the update that writes.
void Group::Impl::CheckFill() const {
  REFITD_CHECK(deferred.empty() || FillRuns());
  REFITD_CHECK(!fill_due.has_value() || (limits.fills && version.has_value()));
  if (!FillRuns()) return;
  const Update& u = *update;
  REFITD_CHECK(u.trainers.empty() && u.parts.empty() && u.pushed.empty());
  REFITD_CHECK(u.verification == Verification::kReadback);
  for (const MemberId source : u.fill->sources) {
    REFITD_CHECK(!u.participant_of.contains(source));
  }
  if (u.state == UpdateState::kEnding) return;
  REFITD_CHECK(limits.fills && deferred.empty() && version == u.version);
  for (const std::string& giver : u.fill->givers) {
    REFITD_CHECK(instances.contains(giver) && Gives(instances.at(giver)));
  }
  // Only a program moves bytes in a fill, and the fill stays opening until the program is there.
  if (u.state != UpdateState::kOpening) {
    REFITD_CHECK(u.program.has_value() && u.program->sources == u.fill->sources);
  }
}

bool Group::fill_running() const { return impl_->FillRuns(); }

}  // namespace refitd
