// Checks sequence and incarnation of the messages that come over one link: none is missing, none
// comes twice, and none belongs to an incarnation of the group that is over.
//
// Not thread-safe.
#ifndef REFITD_DAEMON_LINK_ORDER_H_
#define REFITD_DAEMON_LINK_ORDER_H_

#include <cstdint>
#include <deque>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "daemon/link/limits.h"

namespace refitd {

class PeerOrder {
 public:
  explicit PeerOrder(uint64_t incarnation) : incarnations_{incarnation} {}

  // Messages may have this incarnation from now on. Once a message has it, earlier incarnations are
  // over. RESOURCE_EXHAUSTED: too many announced incarnations that the other side has not taken up.
  absl::Status Announce(uint64_t incarnation);
  // Whether the message counts; false: the same message came before. ABORTED: messages before it
  // are missing. FAILED_PRECONDITION: it has another incarnation.
  absl::StatusOr<bool> Check(uint64_t sequence, uint64_t incarnation);

 private:
  uint64_t last_ = 0;
  std::deque<uint64_t> incarnations_;  // front: the incarnation that messages have now
};

}  // namespace refitd

#endif  // REFITD_DAEMON_LINK_ORDER_H_
