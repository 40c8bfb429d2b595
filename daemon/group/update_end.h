// Why and how an update ends: the reason for which it is given up, the time that its clean-up may
// take, the operators who wait for that, and what every call that waits for the update is answered.
//
// It keeps P4 (the answers name who is to blame, and a clean-up that takes too long is reported
// once) and P8 (no call is left without an answer). Pure; not thread-safe: lives inside its update.
#ifndef REFITD_DAEMON_GROUP_UPDATE_END_H_
#define REFITD_DAEMON_GROUP_UPDATE_END_H_

#include <optional>
#include <string>
#include <vector>

#include "daemon/group/group.h"
#include "daemon/group/outbox.h"
#include "daemon/group/participants.h"
#include "daemon/group/requests.h"
#include "daemon/group/slots.h"

namespace refitd::group {

// Why an update is given up, and the status codes that this gives to the calls that wait:
// DEADLINE_EXCEEDED to a call whose own wait ran out, ABORTED to all others.
struct GiveUp {
  std::string reason;
  GiveUpClass kind = GiveUpClass::kOther;
  Failure failure{};
  // The calls of each kind that wait are answered with these codes.
  absl::StatusCode begin_code = absl::StatusCode::kAborted;
  absl::StatusCode bucket_code = absl::StatusCode::kAborted;
  absl::StatusCode commit_code = absl::StatusCode::kAborted;
  absl::StatusCode lease_code = absl::StatusCode::kAborted;
};

class UpdateEnd {
 public:
  UpdateEnd(const UpdateRecord& update, const GroupLimits& limits, Requests* requests, Slots* slots,
            Outbox* out)
      : update_(update), limits_(limits), requests_(*requests), slots_(*slots), out_(*out) {}

  // Gives the update up, once, and begins its clean-up.
  void GiveUpFor(GiveUp why);
  const GiveUp& why() const { return why_; }  // empty: the update was not given up
  // When the clean-up takes too long; nullopt: there is none, or that was reported.
  std::optional<TimePoint> cleanup_deadline() const { return cleanup_deadline_; }
  // Whether the clean-up takes too long. True once.
  bool TakeOverdue();

  // An operator's call waits for the end.
  void AddOperator(CallId call) { operators_.push_back(call); }
  // The caller went away. False: no such call waits.
  bool Leave(CallId call) { return std::erase(operators_, call) > 0; }

  // The failure of an update that was given up, with the instances that it left dirty.
  Failure FailureOf(const UpdateParticipants& participants) const;
  // Answers the calls `awaited`, those that wait for slots, and operators, each once. `done`: the
  // update has committed; null: it is lost for that reason.
  void Answer(const Requests::ByCall& awaited, const CommitReply* done, const std::string& reason,
              const Failure& failure);

  void CheckInvariants(bool ending) const;

 private:
  absl::StatusCode CodeFor(CallKind kind) const;

  const UpdateRecord& update_;
  const GroupLimits& limits_;
  Requests& requests_;
  Slots& slots_;
  Outbox& out_;
  GiveUp why_;
  bool given_up_ = false;
  std::optional<TimePoint> cleanup_deadline_;
  std::vector<CallId> operators_;
};

}  // namespace refitd::group

#endif  // REFITD_DAEMON_GROUP_UPDATE_END_H_
