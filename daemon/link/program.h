// Converts PeerProgram to and from the chunks of proto/refitd/v1/peer.proto. The rules are those of
// reports.h.
#ifndef REFITD_DAEMON_LINK_PROGRAM_H_
#define REFITD_DAEMON_LINK_PROGRAM_H_

#include <cstdint>
#include <memory>
#include <optional>
#include <vector>

#include "absl/status/statusor.h"
#include "daemon/group/peer.h"
#include "refitd/v1/peer.pb.h"

namespace refitd {

inline constexpr int64_t kMaxPlanSetNodes = int64_t{1} << 22;  // members of all node sets together
inline constexpr int64_t kMaxReplicaShares = int64_t{1} << 22;

// Encodes the program in chunks of about `chunk_bytes`.
std::vector<v1::PeerAnswer> ProgramToProto(const PeerProgram& program, int64_t chunk_bytes);

// Puts the chunks of one PeerProgram together. INVALID_ARGUMENT names the field at fault.
class ProgramDecoder {
 public:
  // nullopt: the chunk is not the last.
  absl::StatusOr<std::optional<PeerCommand>> Add(const v1::PeerProgram& message);
  bool idle() const { return !program_.has_value(); }

 private:
  absl::Status Begin(const v1::PeerProgram& message);
  absl::Status AddPlan(const v1::PeerPlan& message);
  absl::Status AddTensors(const v1::PeerPlan& message);
  absl::Status AddNamed(const v1::PeerPlan& message);
  absl::Status AddSets(const v1::PeerPlan& message);
  absl::Status AddRoutes(const v1::PeerPlan& message);
  absl::Status AddReplicas(const v1::PeerPlan& message);
  absl::Status CheckWhole() const;

  std::optional<PeerProgram> program_;
  std::shared_ptr<RoutePlan> plan_;
  std::shared_ptr<std::vector<ReplicaShare>> replicas_;
  int64_t set_nodes_ = 0;
};

}  // namespace refitd

#endif  // REFITD_DAEMON_LINK_PROGRAM_H_
