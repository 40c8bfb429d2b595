#include "daemon/group/catch_up.h"

#include <algorithm>
#include <type_traits>
#include <utility>

namespace refitd::group {
namespace {

CallId CallOf(const DeferredCall& call) {
  return std::visit([](const auto& e) { return e.call; }, call.event);
}

// nullopt: the call is a rollback, which names no version that it opens.
std::optional<Version> VersionOf(const DeferredCall& call) {
  return std::visit(
      [](const auto& e) -> std::optional<Version> {
        if constexpr (std::is_same_v<std::decay_t<decltype(e)>, RollbackEvent>) {
          return std::nullopt;
        } else {
          return e.version;
        }
      },
      call.event);
}

}  // namespace

// ---- who gives, and who catches up ----

bool CatchUp::MayCatchUp(const Instance& instance) const {
  if (!limits_.catch_ups) return false;
  if (members_.WhyKeptOut(instance) != nullptr || !members_.Complete(instance)) return false;
  return std::all_of(instance.ranks.begin(), instance.ranks.end(), [this](const auto& rank) {
    const Member& member = *members_.Find(rank.second);
    return member.catch_up && refitd::CatchesUp(member.delivery);
  });
}

// P1: bytes are given only by an instance that holds the version in full, in memory that is at
// rest, and only where this group itself verified them: what a rank says that it holds when it
// attaches, or registers another layout, is its own word, on which no other instance should depend.
bool CatchUp::Gives(const Instance& instance) const {
  const auto verified = [this](const auto& rank) { return members_.Find(rank.second)->verified; };
  return instance.state == InstanceState::kClean && MayCatchUp(instance) &&
         versions_.IsCurrent(instance) &&
         std::all_of(instance.ranks.begin(), instance.ranks.end(), verified);
}

bool CatchUp::Gives(const std::string& instance) const {
  const Instance* known = members_.FindInstance(instance);
  return known != nullptr && Gives(*known);
}

bool CatchUp::AnyGives() const {
  const auto& instances = members_.instances();
  return std::any_of(instances.begin(), instances.end(),
                     [this](const auto& i) { return Gives(i.second); });
}

bool CatchUp::LacksVersion(const Instance& instance) const {
  return MayCatchUp(instance) && !versions_.IsCurrent(instance);
}

TimePoint CatchUp::After(const std::string& instance) const {
  const auto retry = retries_.find(instance);
  return retry == retries_.end() ? TimePoint() : retry->second.after;
}

bool CatchUp::CatchesUp(const Instance& instance) const {
  return members_.Available(instance) && LacksVersion(instance) &&
         After(instance.name) <= out_.now();
}

std::vector<std::string> CatchUp::LateInstances() const {
  return InstancesThat([this](const Instance& instance) { return CatchesUp(instance); });
}

// Instances on the late instances' own nodes come first, since their bytes cross no link. After a
// catch-up that failed, only one instance gives, and each time another one, so that an instance
// that can't be reached costs one try and not every catch-up.
std::vector<std::string> CatchUp::ChooseSources(
    const std::vector<std::string>& late_instances) const {
  std::vector<std::string> source_instances =
      InstancesThat([this](const Instance& instance) { return Gives(instance); });
  if (source_instances.empty()) return source_instances;
  if (failed_ > 0) {
    return {source_instances[static_cast<size_t>(failed_ - 1) % source_instances.size()]};
  }
  std::set<NodeId> near;
  for (const std::string& late_instance : late_instances) {
    for (const auto& [rank, id] : members_.FindInstance(late_instance)->ranks) {
      near.insert(members_.Find(id)->node);
    }
  }
  std::stable_partition(source_instances.begin(), source_instances.end(),
                        [&](const std::string& source_instance) {
                          const auto& ranks = members_.FindInstance(source_instance)->ranks;
                          return std::any_of(ranks.begin(), ranks.end(), [&](const auto& rank) {
                            return near.contains(members_.Find(rank.second)->node);
                          });
                        });
  if (source_instances.size() > kMaxSourceInstances) source_instances.resize(kMaxSourceInstances);
  return source_instances;
}

std::vector<std::string> CatchUp::Assemble(UpdateCatchUp* catch_up) const {
  std::vector<std::string> late_instances = LateInstances();
  catch_up->source_instances = ChooseSources(late_instances);
  catch_up->sources.clear();
  for (const std::string& source_instance : catch_up->source_instances) {
    for (const auto& [rank, id] : members_.FindInstance(source_instance)->ranks)
      catch_up->sources.push_back(id);
  }
  return late_instances;
}

// ---- when ----

// This looks at every instance, so it is done only after a step that may have changed the answer.
void CatchUp::FindDue(bool idle) {
  if (!look_ && seen_changes_ == members_.changes()) return;
  look_ = false;
  seen_changes_ = members_.changes();
  due_.reset();
  const auto lacking = !versions_.last().has_value() || !idle
                           ? std::vector<std::string>()
                           : InstancesThat([this](const Instance& instance) {
                               return members_.Available(instance) && LacksVersion(instance);
                             });
  if (lacking.empty() || !AnyGives()) {
    possible_.reset();
    return;
  }
  if (!possible_.has_value()) possible_ = out_.now();
  TimePoint first = TimePoint::max();
  for (const std::string& name : lacking) first = std::min(first, After(name));
  due_ = std::max(first, *possible_ + limits_.catch_up_gather);
}

bool CatchUp::TakeDue() {
  if (!due_.has_value() || *due_ > out_.now()) return false;
  due_.reset();
  possible_.reset();
  return true;
}

// ---- how catch-ups ended ----

void CatchUp::NoteFailure(const std::string& instance, const std::string& reason) {
  Retry& retry = retries_[instance];
  Duration wait = limits_.catch_up_wait;
  for (int i = 0; i < retry.failed && wait < limits_.catch_up_most_wait; ++i) wait *= 2;
  ++retry.failed;
  retry.after = out_.now() + std::min(wait, limits_.catch_up_most_wait);
  retry.reason = reason;
}

void CatchUp::NoteGivenUp(bool opening, const std::vector<std::string>& remaining,
                          bool verification, const std::string& reason, UpdateCatchUp* part) {
  // A catch-up whose source instance is gone gave way, and did not fail. This must be found out
  // here, since the loss of a source instance's daemon is noted before the loss of its ranks.
  const auto gone = [this](const std::string& source_instance) { return !Gives(source_instance); };
  part->gave_way = part->gave_way || (versions_.last().has_value() &&
                                      std::any_of(part->source_instances.begin(),
                                                  part->source_instances.end(), gone));
  if (part->gave_way) return;
  // The next catch-up takes another source instance, unless only late instances failed, or digests
  // differed: leaving out some source instances could leave out those that are right.
  const bool by_late_instances = !opening && remaining.empty();
  if (!by_late_instances && !verification) ++failed_;
  for (const std::string& late_instance : opening ? LateInstances() : remaining) {
    NoteFailure(late_instance, reason);
  }
}

void CatchUp::NoteCommit(bool catch_up, const std::vector<std::string>& instances) {
  failed_ = 0;
  if (!catch_up) return retries_.clear();
  for (const std::string& instance : instances) {
    const auto retry = retries_.find(instance);
    if (retry == retries_.end()) continue;
    retry->second.failed = 0;
    retry->second.reason.clear();
  }
}

std::string CatchUp::Describe(const Instance& instance, const UpdateCatchUp* running,
                              bool taken_in) const {
  if (!versions_.last().has_value() || !LacksVersion(instance)) return "";
  if (taken_in) return fmt::format("catches up from instance {}", Few(running->source_instances));
  if (running == nullptr && !AnyGives()) {
    return fmt::format("waits for the next version: no clean instance gives version {}",
                       *versions_.last());
  }
  if (After(instance.name) > out_.now()) {
    const Retry& retry = retries_.at(instance.name);
    return fmt::format("is tried again in {}: {}", Seconds(retry.after - out_.now()), retry.reason);
  }
  return "waits for a catch-up";
}

// ---- calls that wait until a catch-up has given way ----

void CatchUp::Defer(OpeningCall event, Duration duration) {
  if (duration == Duration(0)) duration = std::min(limits_.default_duration, limits_.max_duration);
  deferred_.push_back({std::move(event), out_.now() + duration});
  out_.Changed();
}

OpeningCall CatchUp::TakeDeferred() {
  DeferredCall call = std::move(deferred_.front());
  deferred_.pop_front();
  // Tick has refused each call whose time is over.
  const Duration remaining =
      std::max<Duration>(call.deadline - out_.now(), std::chrono::milliseconds(1));
  std::visit([remaining](auto& e) { e.duration = remaining; }, call.event);
  return std::move(call.event);
}

void CatchUp::Refuse(Version wanted, const absl::Status& why) {
  std::erase_if(deferred_, [&](const DeferredCall& call) {
    if (VersionOf(call) != wanted) return false;
    out_.Refuse(CallOf(call), why);
    return true;
  });
}

bool CatchUp::any_overdue() const {
  return std::any_of(deferred_.begin(), deferred_.end(),
                     [this](const DeferredCall& call) { return call.deadline <= out_.now(); });
}

void CatchUp::RefuseOverdue(const absl::Status& why) {
  std::erase_if(deferred_, [&](const DeferredCall& call) {
    if (call.deadline > out_.now()) return false;
    out_.Refuse(CallOf(call), why);
    return true;
  });
}

bool CatchUp::Leave(CallId call, const absl::Status& why) {
  if (std::erase_if(deferred_, [call](const auto& waits) { return CallOf(waits) == call; }) == 0) {
    return false;
  }
  out_.Refuse(call, why);
  return true;
}

std::set<Version> CatchUp::DeferredOf(MemberId member) const {
  std::set<Version> wanted;
  for (const DeferredCall& call : deferred_) {
    if (std::visit([](const auto& e) { return e.member; }, call.event) != member) continue;
    if (const auto version = VersionOf(call); version.has_value()) wanted.insert(*version);
  }
  return wanted;
}

std::optional<TimePoint> CatchUp::NextDeadline() const {
  std::optional<TimePoint> next;
  for (const DeferredCall& call : deferred_) {
    if (!next.has_value() || call.deadline < *next) next = call.deadline;
  }
  return next;
}

void CatchUp::CheckInvariants() const {
  REFITD_CHECK(!due_.has_value() || (limits_.catch_ups && versions_.last().has_value()));
  REFITD_CHECK(!due_.has_value() || possible_.has_value());
  REFITD_CHECK(failed_ >= 0);
  for (const auto& [instance, retry] : retries_) {
    REFITD_CHECK(members_.FindInstance(instance) != nullptr && retry.failed >= 0);
  }
}

}  // namespace refitd::group
