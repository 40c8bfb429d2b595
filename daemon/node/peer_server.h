// Daemons that join groups of this one, at the daemon's end of their links.
//
// Thread-safe, but for AdmitWaiting, which is used under the state lock (state_lock.h).
#ifndef REFITD_DAEMON_NODE_PEER_SERVER_H_
#define REFITD_DAEMON_NODE_PEER_SERVER_H_

#include <cstdint>
#include <map>
#include <memory>
#include <string>

#include "absl/base/thread_annotations.h"
#include "absl/status/status.h"
#include "daemon/link/peer_link.h"
#include "daemon/node/peer_client.h"
#include "daemon/node/state.h"
#include "daemon/node/state_lock.h"

namespace refitd {

class PeerServer : public PeerAcceptor {
 public:
  PeerServer(DaemonState* state, PeerClient* peer_client)
      : state_(*state), peer_client_(*peer_client) {}

  void Hello(PeerGreeting hello, std::string peer_address,
             std::shared_ptr<PeerSession> session) override;
  Room RoomFor(const std::string& identity) override;
  void Report(uint64_t session, PeerReport report) override;
  void Gone(uint64_t session, std::string reason) override;

  // The group was given up here for the daemon to which its coordinator's name leads now. Refuses
  // links that ask for the group until `until`; they may try again.
  void RefuseUntil(const std::string& group, TimePoint until)
      ABSL_EXCLUSIVE_LOCKS_REQUIRED(kStateLocked);

  // Called when the group was made: lets in the members and daemons that waited for the group.
  void AdmitWaiting(const std::string& group, StateLock& lock)
      ABSL_EXCLUSIVE_LOCKS_REQUIRED(kStateLocked);

 private:
  // Checks the hello of a daemon that joins, and makes the group that its spec asks for.
  absl::Status TakeHello(PeerSessions::Waiting* peer, bool* created, StateLock& lock)
      ABSL_EXCLUSIVE_LOCKS_REQUIRED(kStateLocked);
  // Takes a hello of this daemon itself: the coordinator's name leads here, so the group lives
  // here, and the members that waited for that name enter the group.
  void CoordinateOwn(const PeerGreeting& hello, StateLock& lock)
      ABSL_EXCLUSIVE_LOCKS_REQUIRED(kStateLocked);
  void Admit(PeerSessions::Waiting peer, StateLock& lock)
      ABSL_EXCLUSIVE_LOCKS_REQUIRED(kStateLocked);
  // If the group knows a layout that equals the reported layout, makes the report share the known
  // object. The two are compared without the mutex, since the time for that grows with the number
  // of tensors.
  void ShareLayout(uint64_t session, PeerLayout* report);

  // UNAVAILABLE: the group was drained here a moment ago.
  absl::Status CheckNotDrained(const std::string& group) const
      ABSL_EXCLUSIVE_LOCKS_REQUIRED(kStateLocked);

  DaemonState& state_;
  PeerClient& peer_client_;
  // Groups that were drained here, and until when no link is taken for them.
  std::map<std::string, TimePoint> drained_ ABSL_GUARDED_BY(kStateLocked);
};

}  // namespace refitd

#endif  // REFITD_DAEMON_NODE_PEER_SERVER_H_
