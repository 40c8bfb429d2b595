// Asks another daemon whether it coordinates a group, without joining the group (Peer.Probe).
//
// Threads: StartProbe and what it returns may be called from any thread, also under the caller's
// own mutex. The answer comes on one of gRPC's threads, with no lock held.
#ifndef REFITD_DAEMON_LINK_PROBE_H_
#define REFITD_DAEMON_LINK_PROBE_H_

#include <cstdint>
#include <functional>
#include <memory>
#include <string>

#include "absl/status/statusor.h"
#include "transport/base/ids.h"

namespace grpc {
class ChannelCredentials;
}  // namespace grpc

namespace refitd {

inline constexpr Duration kProbeLimit = std::chrono::seconds(1);

struct ProbeDial {
  std::string address;  // "host:port" of the daemon that is asked
  std::string group;
  uint64_t incarnation = 0;  // with which this daemon coordinates the group; 0: it does not
  std::string daemon_id;     // this daemon's
  std::string boot_id;       // this daemon's, kBootIdBytes
  std::shared_ptr<grpc::ChannelCredentials> credentials;
};

// The incarnation with which the other daemon coordinates the group; 0: it does not, or it is of a
// release that knows no probes. UNAVAILABLE, DEADLINE_EXCEEDED: it could not be reached, or drains.
using ProbeAnswer = std::function<void(absl::StatusOr<uint64_t> incarnation)>;

// `answer` is called once, within kProbeLimit (P4). The function that is returned ends the probe
// early, with CANCELLED, and does nothing after the answer.
std::function<void()> StartProbe(ProbeDial dial, ProbeAnswer answer);

}  // namespace refitd

#endif  // REFITD_DAEMON_LINK_PROBE_H_
