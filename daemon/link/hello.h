// The first message of either side of a link: the joined daemon says hello, the coordinator
// accepts. The rules are those of reports.h.
#ifndef REFITD_DAEMON_LINK_HELLO_H_
#define REFITD_DAEMON_LINK_HELLO_H_

#include <cstdint>

#include "absl/status/statusor.h"
#include "daemon/group/machine.h"
#include "daemon/link/greeting.h"
#include "daemon/link/limits.h"
#include "refitd/v1/peer.pb.h"

namespace refitd {

// The hello that the message has; only its spec is unchecked. FAILED_PRECONDITION: no common
// protocol version; the status names both sides'. INVALID_ARGUMENT names field and value.
absl::StatusOr<PeerGreeting> GreetingOf(const v1::PeerMessage& message);

// `message_bytes`: the largest message that this daemon takes.
v1::PeerAnswer AcceptedToProto(const LinkUp& up, int64_t message_bytes);

struct PeerAcceptance {
  LinkUp up;
  int64_t message_bytes = 0;  // the largest message that the coordinator takes
};
// FAILED_PRECONDITION: the coordinator chose a protocol version that this build does not speak.
absl::StatusOr<PeerAcceptance> AcceptedFromProto(const v1::PeerAnswer& answer);

// ---- a group's spec ----

// The spec that the message has, unchecked. `slots` and `slot_bytes` of 0 are left to the daemon.
GroupSpec SpecOf(const v1::GroupSpec& message);
// The message of the spec. Without `lists`, it lacks the lists of tensors, which may be long.
v1::GroupSpec SpecToProto(const GroupSpec& spec, bool lists = true);

}  // namespace refitd

#endif  // REFITD_DAEMON_LINK_HELLO_H_
