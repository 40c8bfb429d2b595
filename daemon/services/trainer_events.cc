#include "daemon/services/trainer_events.h"

#include "daemon/checks/bucket_message.h"
#include "daemon/link/trainer_messages.h"
#include "transport/base/status.h"

namespace refitd {

Caller CallerOf(const v1::Lease& lease, const Peer& peer) {
  return {peer, lease.token(), lease.incarnation(), lease.protocol()};
}

absl::StatusOr<ReceivedPush> PushOf(const v1::PushBucketRequest& request) {
  REFITD_RETURN_IF_ERROR(CheckRequestId(request.request_id()));
  ReceivedPush push;
  push.event.request_id = request.request_id();
  push.event.version = Version(request.version());
  push.event.update = UpdateId(request.update_id());
  REFITD_ASSIGN_OR_RETURN(push.received, ReadBucket(request.bucket()));
  return push;
}

}  // namespace refitd
