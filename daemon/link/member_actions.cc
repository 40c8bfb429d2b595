#include "daemon/link/member_actions.h"

#include <algorithm>
#include <chrono>
#include <variant>

#include "daemon/link/values.h"
#include "transport/base/status.h"

namespace refitd {
namespace {

using peer::ContentVersionOf;
using peer::FailureOfMessage;
using peer::MemberOf;
using peer::MillisOf;
using peer::MillisToProto;
using peer::TextOf;
using peer::TextToProto;
using peer::VersionOf;

// Each action has two functions: Tell writes it as an event, ActionOf reads it at the member's
// daemon.

// ---- staged ----

template <typename Event>
void Put(const SendStaged& v, Event* event) {
  if constexpr (requires { event->mutable_staged(); }) {
    event->mutable_staged()->set_version(v.version.value());
    event->mutable_staged()->set_update_id(v.update.value());
    event->mutable_staged()->set_remaining_ms(MillisToProto(v.remaining));
    if (v.content.has_value()) event->mutable_staged()->set_content_version(v.content->value());
  } else {
    REFITD_CHECK(false);  // a trainer has no backs
  }
}

absl::StatusOr<MemberAction> ActionOf(MemberId member, const v1::Staged& message) {
  SendStaged out;
  out.member = member;
  REFITD_ASSIGN_OR_RETURN(out.version, VersionOf(message.version(), "staged.version"));
  REFITD_ASSIGN_OR_RETURN(out.remaining, MillisOf(message.remaining_ms(), "staged.remaining_ms"));
  out.update = UpdateId(message.update_id());
  REFITD_ASSIGN_OR_RETURN(out.content, ContentVersionOf(message, "staged.content_version"));
  return out;
}

// ---- flip ----

template <typename Event>
void Put(const SendFlip& v, Event* event) {
  if constexpr (requires { event->mutable_prepare(); }) {
    event->mutable_prepare()->set_version(v.version.value());
    event->mutable_prepare()->set_update_id(v.update.value());
    event->mutable_prepare()->set_remaining_ms(MillisToProto(v.remaining));
    event->mutable_prepare()->set_flip(true);
    if (v.content.has_value()) {
      event->mutable_prepare()->set_content_version(v.content->value());
    }
  } else {
    REFITD_CHECK(false);  // a trainer has no backs
  }
}

absl::StatusOr<MemberAction> ActionOf(MemberId member, const v1::Prepare& message) {
  if (!message.flip()) return Invalid("prepare.flip is false: other ranks get it with the update");
  SendFlip out;
  out.member = member;
  REFITD_ASSIGN_OR_RETURN(out.version, VersionOf(message.version(), "prepare.version"));
  REFITD_ASSIGN_OR_RETURN(out.remaining, MillisOf(message.remaining_ms(), "prepare.remaining_ms"));
  out.update = UpdateId(message.update_id());
  REFITD_ASSIGN_OR_RETURN(out.content, ContentVersionOf(message, "prepare.content_version"));
  return out;
}

// ---- committed ----

template <typename Event>
void Put(const SendCommitted& v, Event* event) {
  event->mutable_committed()->set_version(v.version.value());
  event->mutable_committed()->set_incarnation(v.incarnation);
  event->mutable_committed()->set_owner(v.owner);
  event->mutable_committed()->set_digest(v.digest);
  if (v.content.has_value()) event->mutable_committed()->set_content_version(v.content->value());
}

absl::StatusOr<MemberAction> ActionOf(MemberId member, const v1::Committed& message) {
  SendCommitted out{.member = member, .version = {}};
  REFITD_ASSIGN_OR_RETURN(out.version, VersionOf(message.version(), "committed.version"));
  out.digest = message.digest();
  REFITD_ASSIGN_OR_RETURN(out.content, ContentVersionOf(message, "committed.content_version"));
  return out;
}

// ---- aborted ----

template <typename Event>
void Put(const SendAborted& v, Event* event) {
  event->mutable_aborted()->set_version(v.version.value());
  event->mutable_aborted()->set_reason(TextToProto(v.reason));
  SetFailure(v.failure, event->mutable_aborted());
  event->mutable_aborted()->set_dirty(v.dirty);
}

absl::StatusOr<MemberAction> ActionOf(MemberId member, const v1::Aborted& message) {
  SendAborted out;
  out.member = member;
  REFITD_ASSIGN_OR_RETURN(out.version, VersionOf(message.version(), "aborted.version"));
  REFITD_ASSIGN_OR_RETURN(out.reason, TextOf(message.reason(), "aborted.reason"));
  REFITD_ASSIGN_OR_RETURN(out.failure, FailureOfMessage(message, "aborted"));
  out.dirty = message.dirty();
  return out;
}

// ---- draining ----

template <typename Event>
void Put(const SendDraining& /*v*/, Event* event) {
  event->mutable_draining();
}

}  // namespace

void Put(const MemberAction& action, v1::PeerAnswer* answer) {
  v1::PeerMemberEvent* out = answer->mutable_member_event();
  std::visit(
      [out](const auto& kind) {
        out->set_member(kind.member.value());
        Put(kind, out->mutable_event());
      },
      action);
}

absl::StatusOr<MemberAction> MemberActionOf(const v1::PeerMemberEvent& message) {
  REFITD_ASSIGN_OR_RETURN(const MemberId member, MemberOf(message.member(), "member_event.member"));
  const v1::EngineEvent& event = message.event();
  if (event.has_staged()) return ActionOf(member, event.staged());
  if (event.has_prepare()) return ActionOf(member, event.prepare());
  if (event.has_committed()) return ActionOf(member, event.committed());
  if (event.has_aborted()) return ActionOf(member, event.aborted());
  if (event.has_draining()) return SendDraining{member};
  return Invalid("member_event.event is none that is passed on");
}

template <typename Event>
Event EventOf(const MemberAction& action) {
  Event event;
  std::visit([&event](const auto& kind) { Put(kind, &event); }, action);
  return event;
}
template v1::EngineEvent EventOf(const MemberAction& action);
template v1::TrainerEvent EventOf(const MemberAction& action);

ReadyEvent ReadyOf(MemberId member, const v1::Ready& message) {
  ReadyEvent out{member, UpdateId(message.update_id())};
  // P10: a negative time says nothing, and the group counts none beyond Prepare.
  constexpr std::chrono::microseconds kLongest = std::chrono::hours(24);
  if (message.has_stopped_us() && message.stopped_us() >= 0) {
    out.stopped = std::min(std::chrono::microseconds(message.stopped_us()), kLongest);
  }
  return out;
}

}  // namespace refitd
