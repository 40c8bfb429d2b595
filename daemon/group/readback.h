// The read-back of what an update wrote: all in-place ranks still in the update are read again
// once everything is written (P1). Their memory is touched meanwhile (P6).
//
// Pure; not thread-safe: lives inside its update.
#ifndef REFITD_DAEMON_GROUP_READBACK_H_
#define REFITD_DAEMON_GROUP_READBACK_H_

#include <algorithm>
#include <cstdint>
#include <vector>

#include "daemon/group/group.h"
#include "daemon/group/outbox.h"
#include "daemon/group/participants.h"
#include "daemon/group/push.h"
#include "daemon/group/refit_program.h"

namespace refitd::group {

class UpdateReadback {
 public:
  UpdateReadback(const UpdateRecord& update, UpdateParticipants* participants, Outbox* out)
      : update_(update), participants_(*participants), out_(*out) {}

  bool started() const { return state_ != State::kNone; }
  bool running() const { return state_ == State::kRunning; }
  // By destination: the ContentDigest of what was read back.
  const std::vector<uint64_t>& content() const { return content_; }

  // Begins once everything is written, or will be: each node begins when its own last part has
  // ended. Not started: parts or the program follow, or there is nothing to read.
  void StartIfLast(const UpdatePush& push, const UpdateProgram& program) {
    if (started() || !push.all_started() || (program.exists() && !program.started())) return;
    const bool busy = push.in_flight() > 0 || program.running();
    if (participants_.on_one_node() && (busy || !participants_.WrittenInFull().ok())) return;
    destinations_ = participants_.Destinations();
    if (destinations_.empty()) return;
    participants_.Touch(destinations_, 1);
    state_ = State::kRunning;
    out_.Do(VerifyUpdate{update_.id, participants_.skip_destination()});
    out_.Changed();
  }
  // False: none runs.
  bool End() {
    if (!running()) return false;
    state_ = State::kDone;
    participants_.Touch(destinations_, -1);
    return true;
  }
  // Whether what was read is right. A failure counts only for instances still in the update.
  bool Passes(const VerifyDone& e) {
    const std::vector<bool>& skip = participants_.skip_destination();
    const bool only_evicted =
        !e.failed_destinations.empty() &&
        std::all_of(e.failed_destinations.begin(), e.failed_destinations.end(),
                    [&](uint32_t d) { return d < skip.size() && skip[d]; });
    if (!e.status.ok() && !only_evicted) return false;
    content_ = e.content;
    return true;
  }
  void CheckInvariants() const {
    REFITD_CHECK(started() || content_.empty());
    REFITD_CHECK(!running() || !destinations_.empty());
  }

 private:
  enum class State : uint8_t { kNone, kRunning, kDone };

  const UpdateRecord& update_;
  UpdateParticipants& participants_;
  Outbox& out_;
  State state_ = State::kNone;
  std::vector<uint32_t> destinations_;
  std::vector<uint64_t> content_;
};

}  // namespace refitd::group

#endif  // REFITD_DAEMON_GROUP_READBACK_H_
