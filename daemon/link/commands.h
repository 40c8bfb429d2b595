// Commands, which the coordinator sends to a joined daemon (daemon/group/peer.h), from and to the
// messages of proto/refitd/v1/peer.proto. The rules are those of reports.h.
#ifndef REFITD_DAEMON_LINK_COMMANDS_H_
#define REFITD_DAEMON_LINK_COMMANDS_H_

#include <cstdint>
#include <optional>
#include <vector>

#include "absl/status/statusor.h"
#include "daemon/group/peer.h"
#include "daemon/link/limits.h"
#include "daemon/link/program.h"
#include "refitd/v1/peer.pb.h"

namespace refitd {

// Encodes a command: a program as several messages, every other command as one. RESOURCE_EXHAUSTED:
// a message would be larger than `message_bytes`.
absl::StatusOr<std::vector<v1::PeerAnswer>> ToProto(const PeerCommand& command,
                                                    int64_t message_bytes);

// Decodes a command that is one whole message. Chunks of a program need a CommandDecoder.
absl::StatusOr<PeerCommand> FromProto(const v1::PeerAnswer& answer, const PeerBounds& bounds);

// Decodes the commands of one link, in order.
class CommandDecoder {
 public:
  explicit CommandDecoder(const PeerBounds& bounds) : bounds_(bounds) {}
  // nullopt: the message is a chunk of a program that is not complete yet.
  absl::StatusOr<std::optional<PeerCommand>> Decode(const v1::PeerAnswer& answer);

 private:
  PeerBounds bounds_;
  ProgramDecoder programs_;
};

}  // namespace refitd

#endif  // REFITD_DAEMON_LINK_COMMANDS_H_
