#include "daemon/link/member_actions.h"

#include <variant>

#include "daemon/link/values.h"
#include "transport/base/status.h"

namespace refitd {
namespace {

using peer::FailureOfMessage;
using peer::MemberOf;
using peer::TextOf;
using peer::TextToProto;
using peer::VersionOf;

// Each action has three functions: Write writes it for the member's daemon, ActionOf reads it
// there, Tell writes it for the member.

// ---- committed ----

void Write(const SendCommitted& v, v1::PeerAnswer* answer) {
  v1::PeerCommitted* out = answer->mutable_committed();
  out->set_member(v.member.value());
  out->set_version(v.version.value());
  out->set_digest(v.digest);
}

absl::StatusOr<MemberAction> ActionOf(const v1::PeerCommitted& message) {
  SendCommitted out;
  REFITD_ASSIGN_OR_RETURN(out.member, MemberOf(message.member(), "committed.member"));
  REFITD_ASSIGN_OR_RETURN(out.version, VersionOf(message.version(), "committed.version"));
  out.digest = message.digest();
  return out;
}

template <typename Event>
void Tell(const SendCommitted& v, Event* event) {
  event->mutable_committed()->set_version(v.version.value());
  event->mutable_committed()->set_incarnation(v.incarnation);
  event->mutable_committed()->set_owner(v.owner);
  event->mutable_committed()->set_digest(v.digest);
}

// ---- aborted ----

void Write(const SendAborted& v, v1::PeerAnswer* answer) {
  v1::PeerAborted* out = answer->mutable_aborted();
  out->set_member(v.member.value());
  out->set_version(v.version.value());
  out->set_reason(TextToProto(v.reason));
  SetFailure(v.failure, out);
  out->set_dirty(v.dirty);
}

absl::StatusOr<MemberAction> ActionOf(const v1::PeerAborted& message) {
  SendAborted out;
  REFITD_ASSIGN_OR_RETURN(out.member, MemberOf(message.member(), "aborted.member"));
  REFITD_ASSIGN_OR_RETURN(out.version, VersionOf(message.version(), "aborted.version"));
  REFITD_ASSIGN_OR_RETURN(out.reason, TextOf(message.reason(), "aborted.reason"));
  REFITD_ASSIGN_OR_RETURN(out.failure, FailureOfMessage(message, "aborted"));
  out.dirty = message.dirty();
  return out;
}

template <typename Event>
void Tell(const SendAborted& v, Event* event) {
  event->mutable_aborted()->set_version(v.version.value());
  event->mutable_aborted()->set_reason(CleanText(v.reason, kMaxPeerTextBytes));
  SetFailure(v.failure, event->mutable_aborted());
  event->mutable_aborted()->set_dirty(v.dirty);
}

// ---- draining ----

void Write(const SendDraining& v, v1::PeerAnswer* answer) {
  answer->mutable_draining()->set_member(v.member.value());
}

absl::StatusOr<MemberAction> ActionOf(const v1::PeerDraining& message) {
  REFITD_ASSIGN_OR_RETURN(const MemberId member, MemberOf(message.member(), "draining.member"));
  return SendDraining{member};
}

template <typename Event>
void Tell(const SendDraining& /*v*/, Event* event) {
  event->mutable_draining();
}

}  // namespace

void Put(const MemberAction& action, v1::PeerAnswer* answer) {
  std::visit([answer](const auto& kind) { Write(kind, answer); }, action);
}

absl::StatusOr<MemberAction> MemberActionOf(const v1::PeerAnswer& answer) {
  if (answer.has_committed()) return ActionOf(answer.committed());
  if (answer.has_aborted()) return ActionOf(answer.aborted());
  if (answer.has_draining()) return ActionOf(answer.draining());
  return Invalid("kind is not known");
}

template <typename Event>
Event EventOf(const MemberAction& action) {
  Event event;
  std::visit([&event](const auto& kind) { Tell(kind, &event); }, action);
  return event;
}
template v1::EngineEvent EventOf(const MemberAction& action);
template v1::TrainerEvent EventOf(const MemberAction& action);

}  // namespace refitd
