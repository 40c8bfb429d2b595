// Sequence and incarnation of what comes in over one link: nothing is missing, nothing comes twice,
// and nothing belongs to an incarnation of the group that is over.
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

  // Messages may now have this incarnation; once one has, those before are over.
  // RESOURCE_EXHAUSTED: too many that the other side did not take up.
  absl::Status Announce(uint64_t incarnation);
  // Whether the message counts; false: it came before. ABORTED: messages are missing;
  // FAILED_PRECONDITION: another incarnation.
  absl::StatusOr<bool> Check(uint64_t sequence, uint64_t incarnation);

 private:
  uint64_t last_ = 0;
  std::deque<uint64_t> incarnations_;  // the front is the one that messages have now
};

}  // namespace refitd

#endif  // REFITD_DAEMON_LINK_ORDER_H_
