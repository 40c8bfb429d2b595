// The updates of a group that have ended: how each of the trainers' last kRememberedUpdates ended,
// for GetUpdate and for late calls, and the views of the last of them, for status.
//
// Pure; not thread-safe.
#ifndef REFITD_DAEMON_GROUP_HISTORY_H_
#define REFITD_DAEMON_GROUP_HISTORY_H_

#include <cstdint>
#include <deque>
#include <optional>
#include <utility>

#include "daemon/group/group.h"
#include "transport/base/errors.h"
#include "transport/base/failure.h"

namespace refitd::group {

class UpdateHistory {
 public:
  // `what`: the answer to GetUpdate. Catch-ups and rollbacks are only shown, never answered:
  // GetUpdate is about trainers' updates, also where a rollback took the number that one of them
  // wanted.
  void Add(UpdateView view, PastUpdate what) {
    last_was_catch_up_ = view.catch_up;
    if (view.catch_up) {
      catch_up_ = std::move(view);
      return;
    }
    ++(what.outcome == Outcome::kCommitted ? committed_ : aborted_);
    if (!view.content.has_value()) past_.push_back({view.id, view.version, std::move(what)});
    update_ = std::move(view);
    if (past_.size() > kRememberedUpdates) past_.pop_front();
  }
  // A new incarnation begins.
  void Clear() {
    past_.clear();
    update_.reset();
    catch_up_.reset();
  }

  PastUpdate Find(Version version) const {
    for (auto it = past_.rbegin(); it != past_.rend(); ++it) {
      if (it->version == version) return it->what;
    }
    return {};
  }
  // The error for a call to an update that is over. OK: no update to that version is remembered.
  absl::Status Refuse(Version version) const {
    for (auto it = past_.rbegin(); it != past_.rend(); ++it) {
      if (it->version == version) return Refuse(*it);
    }
    return absl::OkStatus();
  }
  // The same for a call that names the update that its rank began. It gets no other update's error,
  // even if another one installed the same version.
  absl::Status Refuse(UpdateId update, Version version) const {
    for (const Ended& ended : past_) {
      if (ended.update == update) return Refuse(ended);
    }
    return Error(
        absl::StatusCode::kAborted,
        "the update to version {} is over (update {}): what became of it is not remembered",
        version, update);
  }

  // The last update of trainers or rollback, the last catch-up, and whichever of the two ended
  // later.
  const std::optional<UpdateView>& update() const { return update_; }
  const std::optional<UpdateView>& catch_up() const { return catch_up_; }
  const std::optional<UpdateView>& latest() const {
    return last_was_catch_up_ ? catch_up_ : update_;
  }
  int64_t committed() const { return committed_; }
  int64_t aborted() const { return aborted_; }

 private:
  struct Ended {
    UpdateId update;
    Version version;
    PastUpdate what;
  };
  static absl::Status Refuse(const Ended& ended) {
    if (ended.what.outcome == Outcome::kCommitted) {
      return Precondition("version {} is committed already", ended.version);
    }
    return WithFailure(Error(absl::StatusCode::kAborted, "the update to version {} is lost: {}",
                             ended.version, ended.what.reason),
                       ended.what.failure);
  }

  std::deque<Ended> past_;  // newest last; at most kRememberedUpdates
  std::optional<UpdateView> update_;
  std::optional<UpdateView> catch_up_;
  bool last_was_catch_up_ = false;
  int64_t committed_ = 0;
  int64_t aborted_ = 0;
};

}  // namespace refitd::group

#endif  // REFITD_DAEMON_GROUP_HISTORY_H_
