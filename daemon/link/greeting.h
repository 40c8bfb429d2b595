// A joining daemon's hello as the coordinator's node reads it.
#ifndef REFITD_DAEMON_LINK_GREETING_H_
#define REFITD_DAEMON_LINK_GREETING_H_

#include <cstdint>
#include <functional>
#include <optional>
#include <string>

#include "absl/status/status.h"
#include "daemon/group/group.h"
#include "proto/protocol.h"
#include "transport/base/ids.h"

namespace refitd {

// The hello of a daemon that joins, checked but for the spec.
struct PeerGreeting {
  std::string group;
  std::optional<GroupSpec> spec;  // as a member wishes for it; absent: the group must exist
  Duration wait{};                // for the group; 0: not at all
  std::string daemon_id;
  std::string boot_id;            // kBootIdBytes
  Protocol protocol = kProtocol;  // the agreed version
  int64_t message_bytes = 0;      // the largest message that the daemon takes
  uint64_t dial = 0;              // the number of the link among those of its process
  std::string coordinator{};      // this daemon, as the other one's members name it
  // Set only with `spec`: the identity of the member that brings the spec, and whether it is a
  // trainer.
  std::string identity{};
  bool trainer = false;
};

// Makes room for so many bytes in all, which are counted until it is destroyed (P10).
// RESOURCE_EXHAUSTED: there is none.
using Room = std::function<absl::Status(int64_t bytes)>;

}  // namespace refitd

#endif  // REFITD_DAEMON_LINK_GREETING_H_
