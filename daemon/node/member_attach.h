// The Attach streams of members: each begins with a hello, and its end ends the member's lease. The
// hello leads to the member's group, which exists already, is made now, is waited for, or is
// joined.
//
// Thread-safe.
#ifndef REFITD_DAEMON_NODE_MEMBER_ATTACH_H_
#define REFITD_DAEMON_NODE_MEMBER_ATTACH_H_

#include <memory>
#include <optional>
#include <string>
#include <variant>

#include "absl/base/thread_annotations.h"
#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "daemon/node/peer_client.h"
#include "daemon/node/peer_server.h"
#include "daemon/node/state.h"
#include "daemon/node/state_lock.h"

namespace refitd {

// A member whose hello has come. The hello is checked, except for what depends on this daemon's
// state.
struct Arrival {
  MemberRecord record;  // without its id, its GPU and its stream
  std::variant<TrainerIdentity, EngineIdentity> identity;
  std::optional<GroupSpec> spec;  // as the hello has it (SpecOf)
  std::string coordinator;        // as the hello names it; empty: this daemon
  Duration wait{};                // for its group; 0: not at all
};

class MemberAttach {
 public:
  MemberAttach(DaemonState* state, PeerClient* peer_client, PeerServer* peer_server)
      : state_(*state), peer_client_(*peer_client), peer_server_(*peer_server) {}

  // The sink gets Welcome, or End with the reason. Gone may be called at any time afterwards.
  MemberId Attach(absl::StatusOr<Arrival> arrival, std::shared_ptr<MemberSink> sink);
  void Gone(MemberId member, const std::string& reason);
  // The member itself asked to leave. This does what Gone does, but the sink ends with OK, and a
  // process that has seen that end may attach in the member's place.
  void Detached(MemberId member);

 private:
  MemberId Attach(Arrival arrival);
  // Creates, finds or waits for the member's group, then lets the member enter it.
  void Attach(Arrival arrival, StateLock& lock) ABSL_EXCLUSIVE_LOCKS_REQUIRED(kStateLocked);
  // The member's group: found, made, or being joined. Null: the group does not exist, and the
  // member does not make it.
  absl::StatusOr<GroupRecord*> GroupFor(const Arrival& arrival, const std::string& coordinator,
                                        bool* created, StateLock& lock)
      ABSL_EXCLUSIVE_LOCKS_REQUIRED(kStateLocked);
  void End(MemberId member, const std::string& reason, const absl::Status& end);

  DaemonState& state_;
  PeerClient& peer_client_;
  PeerServer& peer_server_;
};

}  // namespace refitd

#endif  // REFITD_DAEMON_NODE_MEMBER_ATTACH_H_
