// A MemberAction, by which a group tells a member something, travels to the member's daemon as the
// event that the member gets. A rank's Ready travels to the group as the rank sent it.
//
// Pure functions, thread-safe.
#ifndef REFITD_DAEMON_LINK_MEMBER_ACTIONS_H_
#define REFITD_DAEMON_LINK_MEMBER_ACTIONS_H_

#include "absl/status/statusor.h"
#include "daemon/group/group.h"
#include "refitd/v1/engine.pb.h"
#include "refitd/v1/peer.pb.h"
#include "refitd/v1/trainer.pb.h"

namespace refitd {

void Put(const MemberAction& action, v1::PeerAnswer* answer);
// INVALID_ARGUMENT, naming field and value: the message is malformed.
absl::StatusOr<MemberAction> MemberActionOf(const v1::PeerMemberEvent& message);

// The event on the member's stream. `Event` is v1::EngineEvent or v1::TrainerEvent.
template <typename Event>
Event EventOf(const MemberAction& action);

ReadyEvent ReadyOf(MemberId member, const v1::Ready& message);

}  // namespace refitd

#endif  // REFITD_DAEMON_LINK_MEMBER_ACTIONS_H_
