#include "daemon/node/readiness.h"

#include <algorithm>
#include <utility>

#include "daemon/policy/quota.h"
#include "transport/base/status.h"

namespace refitd {
namespace {

InstanceHealth HealthOf(const std::optional<Readiness>& readiness) {
  if (!readiness.has_value()) return InstanceHealth::kUnknown;
  return readiness->ready ? InstanceHealth::kServing : InstanceHealth::kNotServing;
}

}  // namespace

std::optional<Readiness> InstanceReadiness::Of(const std::string& group,
                                               const std::string& instance, TimePoint now) const {
  const GroupRecord* const record = groups_.Find(group);
  const GroupMachine* const machine = record == nullptr ? nullptr : record->machine.get();
  if (machine != nullptr && machine->readiness() != nullptr) {
    return machine->readiness()->Of(instance, machine->spec().max_lag);
  }
  const auto it = kept_.find(group);
  if (it == kept_.end() || now >= it->second.until) return std::nullopt;
  const Kept& kept = it->second;
  std::optional<Readiness> readiness = kept.book.Of(instance, kept.max_lag);
  const auto seen = kept.here.find(instance);
  if (!readiness.has_value() || seen == kept.here.end()) return readiness;
  const bool waits = waiters_.CountOf([&](const MemberRecord& member) {
    return member.group == group && member.instance == instance;
  }) > 0;
  if (waits || now - seen->second < kReattachLimit) return readiness;
  return Readiness{.ready = false,
                   .lag = std::nullopt,
                   .reason = "the coordinator is lost, and no rank has attached again"};
}

absl::StatusOr<uint64_t> InstanceReadiness::Watch(std::string identity, std::string group,
                                                  std::string instance,
                                                  std::shared_ptr<ReadinessSink> sink,
                                                  TimePoint now) {
  const auto held = std::count_if(watchers_.begin(), watchers_.end(), [&](const auto& entry) {
    return entry.second.identity == identity;
  });
  REFITD_RETURN_IF_ERROR(CheckPlace("callers watch instances", kMaxWatchers, watchers_.size(),
                                    static_cast<size_t>(held), identity));
  const uint64_t id = next_++;
  Watcher& watcher = watchers_[id];
  watcher = {std::move(identity), std::move(group), std::move(instance), std::move(sink),
             std::nullopt};
  Notify(&watcher, now);
  return id;
}

void InstanceReadiness::EndAll(const absl::Status& status) {
  for (const auto& [id, watcher] : watchers_) watcher.sink->End(status);
  watchers_.clear();
}

void InstanceReadiness::Notify(Watcher* watcher, TimePoint now) {
  const InstanceHealth health = HealthOf(Of(watcher->group, watcher->instance, now));
  if (watcher->told == health) return;
  watcher->told = health;
  watcher->sink->Send(health);
}

void InstanceReadiness::Changed(const std::string& group, TimePoint now) {
  const GroupRecord* const record = groups_.Find(group);
  if (record != nullptr && record->follower != nullptr) Keep(group, *record->follower, now);
  for (auto& [id, watcher] : watchers_) {
    if (watcher.group == group) Notify(&watcher, now);
  }
}

// A follower that lost its coordinator lives until no copy touches its members' memory, so it may
// be seen here several times: only the first time counts.
void InstanceReadiness::Keep(const std::string& group, const Follower& follower, TimePoint now) {
  if (follower.readiness() != nullptr) {
    kept_.erase(group);
    return;
  }
  const std::optional<Follower::LastReadiness>& last = follower.last_readiness();
  if (!last.has_value() || kept_.contains(group)) return;
  if (keep_ == Duration(0) || kept_.size() >= kMaxKept) return;
  Kept& kept = kept_[group];
  kept.book = last->book;
  kept.max_lag = follower.spec().max_lag;
  kept.incarnation = follower.incarnation();
  kept.until = now + keep_;
  for (const std::string& instance : last->here) kept.here[instance] = now;
}

void InstanceReadiness::Arrived(const std::string& group, const EngineIdentity& engine,
                                TimePoint now) {
  const auto it = kept_.find(group);
  if (it == kept_.end()) return;
  Kept& kept = it->second;
  kept.here[engine.instance] = now;
  const auto known = kept.book.instances().find(engine.instance);
  if (known == kept.book.instances().end()) return;
  const std::optional<Version>& version = known->second.version;
  const bool same = !version.has_value() ||
                    (engine.held_version == version && engine.held_origin == kept.incarnation);
  if (engine.dirty || !same) kept.book.MarkUnknown(engine.instance);
  Changed(group, now);
}

void InstanceReadiness::Look(TimePoint now) {
  looked_ = now;
  std::erase_if(kept_, [now](const auto& kept) { return now >= kept.second.until; });
  for (auto& [id, watcher] : watchers_) Notify(&watcher, now);
}

std::optional<TimePoint> InstanceReadiness::NextDue() const {
  if (kept_.empty()) return std::nullopt;
  if (!watchers_.empty()) return looked_ + kLookInterval;
  std::optional<TimePoint> next;
  for (const auto& [group, kept] : kept_) next = std::min(next.value_or(kept.until), kept.until);
  return next;
}

void InstanceReadiness::CheckInvariants() const {
  REFITD_CHECK(watchers_.size() <= kMaxWatchers && kept_.size() <= kMaxKept);
  for (const auto& [id, watcher] : watchers_) {
    REFITD_CHECK(id < next_ && watcher.sink != nullptr && watcher.told.has_value());
  }
  for (const auto& [group, kept] : kept_) {
    const GroupRecord* const record = groups_.Find(group);
    REFITD_CHECK(record == nullptr || record->machine->readiness() == nullptr);
  }
}

}  // namespace refitd
