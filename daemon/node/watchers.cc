#include "daemon/node/watchers.h"

#include <algorithm>
#include <iterator>
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

// ---- of updates ----

absl::StatusOr<uint64_t> Watchers::Add(WatchFilter filter, std::shared_ptr<UpdateSink> sink,
                                       const Machines& all, TimePoint now) {
  const auto held = std::count_if(updates_.begin(), updates_.end(), [&filter](const auto& entry) {
    return entry.second.filter.identity == filter.identity;
  });
  REFITD_RETURN_IF_ERROR(CheckPlace("callers watch", kMaxWatchers, updates_.size(),
                                    static_cast<size_t>(held), filter.identity));
  Watcher watcher;
  watcher.filter = std::move(filter);
  watcher.sink = std::move(sink);
  for (const GroupMachine* group : all) {
    const std::optional<UpdateMark> mark = group->MarkLatest();
    if (mark.has_value() && !group->update_running()) watcher.sent[group->name()] = *mark;
  }
  const uint64_t id = next_++;
  updates_[id] = std::move(watcher);
  Progress(all, now);
  return id;
}

void Watchers::Forget(const std::string& group) {
  for (auto& [id, watcher] : updates_) watcher.sent.erase(group);
}

void Watchers::EndAll(const absl::Status& status) {
  for (const auto& [id, watcher] : updates_) watcher.sink->End(status);
  updates_.clear();
}

void Watchers::Changed(const GroupMachine& group, const Machines& all, TimePoint now) {
  std::optional<UpdateView> view;
  for (auto it = updates_.begin(); it != updates_.end();) {
    const bool concerned = it->second.Watches(group);
    if (concerned) Notify(&it->second, group, &view, false, now);
    it = concerned && EndIfIdle(it->second, all) ? updates_.erase(it) : std::next(it);
  }
}

void Watchers::Progress(const Machines& all, TimePoint now) {
  std::map<const GroupMachine*, std::optional<UpdateView>> views;
  for (auto it = updates_.begin(); it != updates_.end();) {
    Watcher& watcher = it->second;
    if (watcher.due <= now) {
      watcher.due = now + watcher.filter.interval;
      for (const GroupMachine* group : all) {
        if (watcher.Watches(*group)) Notify(&watcher, *group, &views[group], true, now);
      }
    }
    it = EndIfIdle(watcher, all) ? updates_.erase(it) : std::next(it);
  }
}

std::optional<TimePoint> Watchers::NextProgress() const {
  std::optional<TimePoint> next;
  for (const auto& [id, watcher] : updates_) {
    next = std::min(next.value_or(watcher.due), watcher.due);
  }
  return next;
}

void Watchers::Notify(Watcher* watcher, const GroupMachine& group, std::optional<UpdateView>* view,
                      bool due, TimePoint now) {
  const std::string& name = group.name();
  const std::optional<UpdateMark> mark = group.MarkLatest();
  if (!mark.has_value()) return;
  const auto sent = watcher->sent.find(name);
  const bool known = sent != watcher->sent.end() && sent->second == *mark;
  if (known && !(due && group.update_running())) return;
  if (!view->has_value()) {
    *view = group.ViewLatest(now);
    ++views_;
  }
  watcher->sent[name] = *mark;
  watcher->sink->Send({name, **view, group.incarnation()});
}

bool Watchers::EndIfIdle(const Watcher& watcher, const Machines& all) {
  if (!watcher.filter.until_idle) return false;
  const bool runs = std::any_of(all.begin(), all.end(), [&watcher](const GroupMachine* group) {
    return watcher.Watches(*group) && group->update_running();
  });
  if (!runs) watcher.sink->End(absl::OkStatus());
  return !runs;
}

// ---- of instances ----

std::optional<Readiness> Watchers::ReadinessOf(const std::string& group,
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
  const bool waits = pending_.CountOf([&](const MemberRecord& member) {
    return member.group == group && member.instance == instance;
  }) > 0;
  if (waits || now - seen->second < kReattachLimit) return readiness;
  return Readiness{.ready = false,
                   .lag = std::nullopt,
                   .reason = "the coordinator is lost, and no rank has attached again"};
}

absl::StatusOr<uint64_t> Watchers::AddInstance(std::string identity, std::string group,
                                               std::string instance,
                                               std::shared_ptr<ReadinessSink> sink, TimePoint now) {
  const auto held = std::count_if(instances_.begin(), instances_.end(), [&](const auto& entry) {
    return entry.second.identity == identity;
  });
  REFITD_RETURN_IF_ERROR(CheckPlace("callers watch instances", kMaxInstanceWatchers,
                                    instances_.size(), static_cast<size_t>(held), identity));
  const uint64_t id = next_++;
  InstanceWatcher& watcher = instances_[id];
  watcher = {std::move(identity), std::move(group), std::move(instance), std::move(sink),
             std::nullopt};
  Notify(&watcher, now);
  return id;
}

void Watchers::EndInstances(const absl::Status& status) {
  for (const auto& [id, watcher] : instances_) watcher.sink->End(status);
  instances_.clear();
}

void Watchers::Notify(InstanceWatcher* watcher, TimePoint now) {
  const InstanceHealth health = HealthOf(ReadinessOf(watcher->group, watcher->instance, now));
  if (watcher->sent == health) return;
  watcher->sent = health;
  watcher->sink->Send(health);
}

void Watchers::ReadinessChanged(const std::string& group, TimePoint now) {
  const GroupRecord* const record = groups_.Find(group);
  if (record != nullptr && record->follower != nullptr) Keep(group, *record->follower, now);
  for (auto& [id, watcher] : instances_) {
    if (watcher.group == group) Notify(&watcher, now);
  }
}

// A follower that lost its coordinator lives until no copy touches its members' memory, so it may
// be seen here several times: only the first time counts.
void Watchers::Keep(const std::string& group, const Follower& follower, TimePoint now) {
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

void Watchers::Arrived(const std::string& group, const EngineIdentity& engine, TimePoint now) {
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
  ReadinessChanged(group, now);
}

void Watchers::Look(TimePoint now) {
  looked_ = now;
  std::erase_if(kept_, [now](const auto& kept) { return now >= kept.second.until; });
  for (auto& [id, watcher] : instances_) Notify(&watcher, now);
}

std::optional<TimePoint> Watchers::NextLook() const {
  if (kept_.empty()) return std::nullopt;
  if (!instances_.empty()) return looked_ + kLookInterval;
  std::optional<TimePoint> next;
  for (const auto& [group, kept] : kept_) next = std::min(next.value_or(kept.until), kept.until);
  return next;
}

void Watchers::CheckInvariants() const {
  REFITD_CHECK(updates_.size() <= kMaxWatchers);
  for (const auto& [id, watcher] : updates_) {
    REFITD_CHECK(id < next_);
    REFITD_CHECK(watcher.sink != nullptr);
    REFITD_CHECK(watcher.filter.interval > Duration(0));
  }
  REFITD_CHECK(instances_.size() <= kMaxInstanceWatchers && kept_.size() <= kMaxKept);
  for (const auto& [id, watcher] : instances_) {
    REFITD_CHECK(id < next_ && watcher.sink != nullptr && watcher.sent.has_value());
  }
  for (const auto& [group, kept] : kept_) {
    const GroupRecord* const record = groups_.Find(group);
    REFITD_CHECK(record == nullptr || record->machine->readiness() == nullptr);
  }
}

}  // namespace refitd
