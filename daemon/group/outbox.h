// What one event brings about: actions in their order, with the time of the event. All machines of
// a group write to its outbox.
//
// Pure; not thread-safe.
#ifndef REFITD_DAEMON_GROUP_OUTBOX_H_
#define REFITD_DAEMON_GROUP_OUTBOX_H_

#include <string>
#include <utility>

#include "daemon/group/group.h"

namespace refitd::group {

class Outbox {
 public:
  // An event of this time begins; its actions are appended to `actions`.
  void Open(TimePoint now, GroupActions* actions) {
    now_ = now;
    actions_ = actions;
    if (actions->empty()) actions->reserve(kUsual);
    changed_ = false;
  }
  void Close() {
    if (changed_) Do(StateChanged{});
    actions_ = nullptr;
  }

  TimePoint now() const { return now_; }
  template <typename Action>
  void Do(Action action) {
    actions_->push_back(std::move(action));
  }
  void Log(LogLine::Level level, std::string text) { Do(LogLine{level, std::move(text)}); }
  // Something that status or watch shows has changed.
  void Changed() { changed_ = true; }
  void Refuse(CallId call, absl::Status status) {
    Do(Reply{call, std::move(status), EmptyReply{}});
  }

 private:
  // Most events bring about no more actions. A list that grows moves its actions, which are large.
  static constexpr size_t kUsual = 8;

  TimePoint now_;
  GroupActions* actions_ = nullptr;
  bool changed_ = false;
};

}  // namespace refitd::group

#endif  // REFITD_DAEMON_GROUP_OUTBOX_H_
