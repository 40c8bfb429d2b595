#include "daemon/node/watchers.h"

#include <algorithm>
#include <iterator>
#include <utility>

#include "daemon/policy/quota.h"
#include "transport/base/status.h"

namespace refitd {

absl::StatusOr<uint64_t> Watchers::Add(Wish wish, std::shared_ptr<UpdateSink> sink,
                                       const Machines& all, TimePoint now) {
  const auto held = std::count_if(watchers_.begin(), watchers_.end(), [&wish](const auto& entry) {
    return entry.second.wish.identity == wish.identity;
  });
  REFITD_RETURN_IF_ERROR(CheckPlace("callers watch", kMaxWatchers, watchers_.size(),
                                    static_cast<size_t>(held), wish.identity));
  Watcher watcher;
  watcher.wish = std::move(wish);
  watcher.sink = std::move(sink);
  for (const GroupMachine* group : all) {
    const std::optional<UpdateMark> mark = group->MarkLatest();
    if (mark.has_value() && !group->update_running()) watcher.told[group->name()] = *mark;
  }
  const uint64_t id = next_++;
  watchers_[id] = std::move(watcher);
  Progress(all, now);
  return id;
}

void Watchers::Forget(const std::string& group) {
  for (auto& [id, watcher] : watchers_) watcher.told.erase(group);
}

void Watchers::EndAll(const absl::Status& status) {
  for (const auto& [id, watcher] : watchers_) watcher.sink->End(status);
  watchers_.clear();
}

void Watchers::Changed(const GroupMachine& group, const Machines& all, TimePoint now) {
  std::optional<UpdateView> view;
  for (auto it = watchers_.begin(); it != watchers_.end();) {
    const bool concerned = it->second.Watches(group);
    if (concerned) Notify(&it->second, group, &view, false, now);
    it = concerned && EndIfIdle(it->second, all) ? watchers_.erase(it) : std::next(it);
  }
}

void Watchers::Progress(const Machines& all, TimePoint now) {
  std::map<const GroupMachine*, std::optional<UpdateView>> views;
  for (auto it = watchers_.begin(); it != watchers_.end();) {
    Watcher& watcher = it->second;
    if (watcher.due <= now) {
      watcher.due = now + watcher.wish.interval;
      for (const GroupMachine* group : all) {
        if (watcher.Watches(*group)) Notify(&watcher, *group, &views[group], true, now);
      }
    }
    it = EndIfIdle(watcher, all) ? watchers_.erase(it) : std::next(it);
  }
}

std::optional<TimePoint> Watchers::NextDue() const {
  std::optional<TimePoint> next;
  for (const auto& [id, watcher] : watchers_) {
    next = std::min(next.value_or(watcher.due), watcher.due);
  }
  return next;
}

void Watchers::Notify(Watcher* watcher, const GroupMachine& group, std::optional<UpdateView>* view,
                      bool due, TimePoint now) {
  const std::string& name = group.name();
  const std::optional<UpdateMark> mark = group.MarkLatest();
  if (!mark.has_value()) return;
  const auto told = watcher->told.find(name);
  const bool known = told != watcher->told.end() && told->second == *mark;
  if (known && !(due && group.update_running())) return;
  if (!view->has_value()) {
    *view = group.ViewLatest(now);
    ++views_;
  }
  watcher->told[name] = *mark;
  watcher->sink->Send({name, **view});
}

bool Watchers::EndIfIdle(const Watcher& watcher, const Machines& all) {
  if (!watcher.wish.until_idle) return false;
  const bool runs = std::any_of(all.begin(), all.end(), [&watcher](const GroupMachine* group) {
    return watcher.Watches(*group) && group->update_running();
  });
  if (!runs) watcher.sink->End(absl::OkStatus());
  return !runs;
}

void Watchers::CheckInvariants() const {
  REFITD_CHECK(watchers_.size() <= kMaxWatchers);
  for (const auto& [id, watcher] : watchers_) {
    REFITD_CHECK(id < next_);
    REFITD_CHECK(watcher.sink != nullptr);
    REFITD_CHECK(watcher.wish.interval > Duration(0));
  }
}

}  // namespace refitd
