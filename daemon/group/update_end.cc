#include "daemon/group/update_end.h"

#include <utility>

#include "transport/base/errors.h"
#include "transport/base/failure.h"

namespace refitd::group {
namespace {

// Whether the next update may succeed where one was given up for such a reason.
bool MayPass(GiveUpClass kind) {
  switch (kind) {
    case GiveUpClass::kDeadline:
    case GiveUpClass::kMemberLost:
    case GiveUpClass::kPeerLost:
    case GiveUpClass::kAborted:
    case GiveUpClass::kOperator:
    case GiveUpClass::kTransfer:
    case GiveUpClass::kSlow:
      return true;
    case GiveUpClass::kNone:
    case GiveUpClass::kVerification:
    case GiveUpClass::kOther:
      return false;
  }
  return false;
}

}  // namespace

void UpdateEnd::GiveUpFor(GiveUp why) {
  REFITD_CHECK(!given_up_);
  given_up_ = true;
  why_ = std::move(why);
  cleanup_deadline_ = out_.now() + limits_.cleanup_limit;
}

bool UpdateEnd::TakeOverdue() {
  if (!cleanup_deadline_.has_value() || out_.now() < *cleanup_deadline_) return false;
  cleanup_deadline_.reset();
  return true;
}

Failure UpdateEnd::FailureOf(const UpdateParticipants& participants) const {
  Failure failure = why_.failure;
  failure.version = update_.version.value();
  failure.may_be_retried = MayPass(why_.kind);
  failure.weights = Weights::kClean;
  participants.AddDirty(&failure);
  return failure;
}

absl::StatusCode UpdateEnd::CodeFor(CallKind kind) const {
  switch (kind) {
    case CallKind::kBegin:
      return why_.begin_code;
    case CallKind::kBucket:
      return why_.bucket_code;
    case CallKind::kCommit:
    case CallKind::kRollback:
      return why_.commit_code;
    case CallKind::kRefit:
      return update_.data_began != TimePoint() ? why_.commit_code : why_.begin_code;
    case CallKind::kAbort:
      break;
  }
  return absl::StatusCode::kOk;
}

void UpdateEnd::Answer(const Requests::ByCall& awaited, const CommitReply* done,
                       const std::string& reason, const Failure& failure) {
  const auto lost = [&](absl::StatusCode code) {
    if (code == absl::StatusCode::kOk) return absl::OkStatus();
    return WithFailure(Error(code, "the update to version {} is lost: {}", update_.version, reason),
                       failure);
  };
  // This walks a copy, since Finish takes the request out of those that are unfinished.
  for (const auto& [call, request] : Requests::ByCall(awaited)) {
    if (done == nullptr) {
      requests_.Finish(request, lost(CodeFor(request->kind)), EmptyReply{});
      continue;
    }
    REFITD_CHECK(request->kind == CallKind::kCommit || request->kind == CallKind::kRefit ||
                 request->kind == CallKind::kRollback);
    requests_.Finish(request, absl::OkStatus(), *done);
  }
  if (slots_.anyone_waits()) slots_.RefuseAll(lost(why_.lease_code));
  for (const CallId call : operators_) out_.Do(Reply{call, absl::OkStatus(), EmptyReply{}});
}

// `ending`: the update is being given up.
void UpdateEnd::CheckInvariants(bool ending) const {
  REFITD_CHECK(given_up_ == ending);
  REFITD_CHECK(ending || (!cleanup_deadline_.has_value() && operators_.empty()));
}

}  // namespace refitd::group
