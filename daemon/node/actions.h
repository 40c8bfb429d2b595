// Hands events to the groups' machines and performs the machines' actions. Replies and stream
// events are sent from here; actions that touch memory go to the data plane.
#ifndef REFITD_DAEMON_NODE_ACTIONS_H_
#define REFITD_DAEMON_NODE_ACTIONS_H_

#include <string>

#include "absl/base/thread_annotations.h"
#include "daemon/group/machine.h"
#include "daemon/node/state.h"
#include "daemon/node/state_lock.h"

namespace refitd {

// Feeds one event to the group's machine and performs the machine's actions. Does nothing if the
// group is gone.
void DispatchEvent(DaemonState& state, const std::string& group, MachineEvent& event,
                   StateLock& lock) ABSL_EXCLUSIVE_LOCKS_REQUIRED(kStateLocked);

}  // namespace refitd

#endif  // REFITD_DAEMON_NODE_ACTIONS_H_
