// A running update: the machines of its phases, and what the group decides about it.
//
// Not thread-safe: an update lives inside its group. Records name members by id, since a member may
// be gone before the update ends.
#ifndef REFITD_DAEMON_GROUP_UPDATE_H_
#define REFITD_DAEMON_GROUP_UPDATE_H_

#include <optional>

#include "daemon/group/catch_up.h"
#include "daemon/group/coverage.h"
#include "daemon/group/group.h"
#include "daemon/group/participants.h"
#include "daemon/group/push.h"
#include "daemon/group/readback.h"
#include "daemon/group/refit_program.h"
#include "daemon/group/update_end.h"
#include "daemon/group/update_state.h"

namespace refitd::group {

struct Update : UpdateRecord {
  // The machines of the group that an update stands on.
  struct Machines {
    const GroupLimits& limits;
    Membership* members;
    Slots* slots;
    Requests* requests;
    BucketLog* log;
    Outbox* out;
  };

  Update(UpdateId update, Version wanted, const Machines& below)
      : UpdateRecord(update, wanted),
        participants(*this, below.members, below.out),
        program(this, below.limits, below.members, below.slots, &participants, below.out),
        coverage(&participants, &program),
        push(this, below.limits, below.members, below.slots, below.requests, &participants,
             &coverage, below.log, below.out),
        readback(*this, &participants, below.out),
        end(*this, below.limits, below.requests, below.slots, below.out) {}

  // Whether the version is complete everywhere, so that neither trainers nor the data plane are
  // needed any more.
  bool staged() const { return state == UpdateState::kStaged || state == UpdateState::kFlipping; }
  // Whether ranks that were sent Prepare or SendStaged have until `ready_deadline` to answer.
  bool awaits_ranks() const { return state == UpdateState::kPreparing || staged(); }

  UpdateState state = UpdateState::kOpening;
  bool data_plane_up = true;  // between the update's nodes
  // Set: the update installs the group's version in late instances.
  std::optional<UpdateCatchUp> catch_up;
  // Each stands on those before it.
  UpdateParticipants participants;
  UpdateProgram program;
  UpdateCoverage coverage;
  UpdatePush push;
  UpdateReadback readback;
  UpdateEnd end;
};

}  // namespace refitd::group

#endif  // REFITD_DAEMON_GROUP_UPDATE_H_
