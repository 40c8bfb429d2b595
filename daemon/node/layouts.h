// Layouts of members: checked against the member's regions, and registered with the group's
// coordinator.
//
// Thread-safe; called without the mutex.
#ifndef REFITD_DAEMON_NODE_LAYOUTS_H_
#define REFITD_DAEMON_NODE_LAYOUTS_H_

#include <cstdint>
#include <functional>
#include <memory>
#include <optional>

#include "absl/base/thread_annotations.h"
#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "daemon/node/data_plane.h"
#include "daemon/node/members.h"
#include "daemon/node/state.h"
#include "transport/plan/layout.h"

namespace refitd {

class Layouts {
 public:
  Layouts(DaemonState* state, Members* members, DataPlane* data_plane)
      : state_(*state), members_(*members), data_plane_(*data_plane) {}

  // OK: the lease is that of a rank of that role. Called to refuse a stream before its chunks are
  // collected.
  absl::Status CheckLease(const Caller& caller, bool engine);
  // Counts what the caller's layout takes while it is collected: to be grown as it grows, which
  // limits.held_bytes bounds.
  ByteLedger::Hold HoldFor(const Caller& caller) const {
    return state_.held.Empty(IdentityOf(caller.peer));
  }
  // An engine rank's layout was refused, with that status, before Register got it. Where a limit
  // refused it, the group fails the calls that wait for the rank's instance.
  void Refused(const Caller& caller, const absl::Status& why);
  struct Registered {
    uint64_t digest = 0;
    int64_t pieces = 0;
    int64_t bytes = 0;
  };
  using Reply = std::function<void(const absl::StatusOr<Registered>&)>;
  // Replies once, as a ReplyFunction does: OK when the group's coordinator has the layout. If the
  // coordinator is another daemon, its loss (PeerLimits::peer) and the end of the lease are answers
  // too (P4).
  // `hold` counts the layout while it lives.
  void Register(CallId call, const Caller& caller, bool engine, Layout layout, Reply reply,
                ByteLedger::Hold hold = {});

 private:
  // A layout that was checked and is being registered.
  struct Registering {
    CallId call;
    Caller caller;
    bool engine = false;
    std::shared_ptr<const Layout> layout;
    Reply reply;
  };
  void Hand(Registering r, std::optional<uint64_t> content);
  absl::Status Read(const MemberRecord& member, const Registering& r)
      ABSL_EXCLUSIVE_LOCKS_REQUIRED(kInTurn);
  absl::StatusOr<std::shared_ptr<const Layout>> Check(const Caller& caller, bool engine,
                                                      Layout layout, ByteLedger::Hold hold);
  absl::StatusOr<const MemberRecord*> Admit(const Caller& caller, bool engine, const Layout& layout)
      ABSL_EXCLUSIVE_LOCKS_REQUIRED(kInTurn);

  DaemonState& state_;
  Members& members_;
  DataPlane& data_plane_;
};

}  // namespace refitd

#endif  // REFITD_DAEMON_NODE_LAYOUTS_H_
