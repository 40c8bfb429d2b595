// Members come and go here. A member's hello leads to its group, which exists already, is made now,
// is waited for, or is joined.
//
// Thread-safe.
#ifndef REFITD_DAEMON_NODE_ARRIVALS_H_
#define REFITD_DAEMON_NODE_ARRIVALS_H_

#include <memory>
#include <optional>
#include <string>
#include <variant>

#include "absl/base/thread_annotations.h"
#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "daemon/node/data_plane.h"
#include "daemon/node/group_life.h"
#include "daemon/node/identities.h"
#include "daemon/node/joiners.h"
#include "daemon/node/joining.h"
#include "daemon/node/members.h"
#include "daemon/node/state.h"
#include "daemon/node/turn.h"

namespace refitd {

// A member that has said hello. The hello is checked, except what depends on this daemon's state.
struct Arrival {
  MemberRecord record;  // without its id, its GPU and its stream
  std::variant<TrainerIdentity, EngineIdentity> identity;
  std::optional<GroupSpec> spec;  // as the hello has it (SpecOf)
  std::string coordinator;        // as the hello names it; empty: this daemon
  Duration wait{};                // for its group; 0: not at all
};

class Arrivals {
 public:
  Arrivals(DaemonState* state, const Identities* identities, GroupLife* life, Members* members,
           Joining* joining, Joiners* joiners, const DataPlane* data_plane)
      : state_(*state),
        identities_(*identities),
        life_(*life),
        members_(*members),
        joining_(*joining),
        joiners_(*joiners),
        data_plane_(*data_plane) {}

  // The sink gets Welcome, or End with the reason. Gone may be called at any time afterwards.
  MemberId Attach(absl::StatusOr<Arrival> arrival, std::shared_ptr<MemberSink> sink);
  void Gone(MemberId member, const std::string& reason);
  // The member itself asked to leave. This does what Gone does, but the sink ends with OK, and a
  // process that has seen that end may attach in the member's place.
  void Detached(MemberId member);

 private:
  MemberId Attach(Arrival arrival);
  // Creates, finds or waits for the member's group, then lets the member enter it.
  void Attach(Arrival arrival, Turn& turn) ABSL_EXCLUSIVE_LOCKS_REQUIRED(kInTurn);
  // Takes the identity out of the arrival.
  static GroupEvent AttachedEvent(Arrival* arrival);
  // The member's group: found, made, or being joined. Null: the group does not exist, and the
  // member does not make it.
  absl::StatusOr<GroupRecord*> GroupFor(const Arrival& arrival, const std::string& coordinator,
                                        bool* created, Turn& turn)
      ABSL_EXCLUSIVE_LOCKS_REQUIRED(kInTurn);
  // Counts the manifest of an engine among its identity's bytes (limits.held_bytes), as long as the
  // group has it.
  absl::Status CountManifest(Arrival* arrival) const;
  // OK: the member's memory can be reached from another daemon.
  absl::Status CheckSpans(const Arrival& arrival) const;
  // The GPU that the member's hello names, by ordinal; none: host.
  absl::StatusOr<std::optional<int>> DeviceOf(const MemberRecord& record) const;
  void End(MemberId member, const std::string& reason, const absl::Status& end);

  DaemonState& state_;
  const Identities& identities_;
  GroupLife& life_;
  Members& members_;
  Joining& joining_;
  Joiners& joiners_;
  const DataPlane& data_plane_;
};

}  // namespace refitd

#endif  // REFITD_DAEMON_NODE_ARRIVALS_H_
