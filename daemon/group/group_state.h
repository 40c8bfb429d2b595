// One group as a whole: at most one update at a time (P3), and no new one once the daemon drains.
// Pure, thread-safe.
//
//               open
//      idle <--------> updating
//       |       end       |
//     drain             drain
//       v       end       v
//    drained <------- draining
//
// Triggers:
//   open     the first Begin of a version
//   end      the update committed or aborted
//   drain    the daemon goes down
//   replace  CreateGroup(replace): a new incarnation
//
// "-": refused, nothing changes.
// | state    | open     | end     | drain    | replace |
// | idle     | updating | -       | drained  | idle    |
// | updating | -        | idle    | draining | -       |
// | draining | -        | drained | draining | -       |
// | drained  | -        | -       | drained  | drained |
#ifndef REFITD_DAEMON_GROUP_GROUP_STATE_H_
#define REFITD_DAEMON_GROUP_GROUP_STATE_H_

#include <array>
#include <cstdint>
#include <optional>
#include <string_view>

#include "daemon/group/fsm.h"

namespace refitd {

enum class GroupState : uint8_t {
  kIdle,
  kUpdating,
  kDraining,
  kDrained,
};
inline constexpr std::array<std::string_view, 4> kGroupStateNames = {"idle", "updating", "draining",
                                                                     "drained"};
constexpr std::string_view Name(GroupState state) {
  return kGroupStateNames[static_cast<size_t>(state)];
}

enum class GroupTrigger : uint8_t {
  kOpen,
  kEnd,
  kDrain,
  kReplace,
};
inline constexpr std::array<std::string_view, 4> kGroupTriggerNames = {"open", "end", "drain",
                                                                       "replace"};

inline constexpr TransitionTable<GroupState, 4, 4> kGroupTransitions = [] {
  using enum GroupState;
  constexpr std::nullopt_t kNo = std::nullopt;
  return TransitionTable<GroupState, 4, 4>{{
      // idle
      {{kUpdating, kNo, kDrained, kIdle}},
      // updating
      {{kNo, kIdle, kDraining, kNo}},
      // draining
      {{kNo, kDrained, kDraining, kNo}},
      // drained
      {{kNo, kNo, kDrained, kDrained}},
  }};
}();

constexpr std::optional<GroupState> Next(GroupState state, GroupTrigger trigger) {
  return kGroupTransitions[static_cast<size_t>(state)][static_cast<size_t>(trigger)];
}

}  // namespace refitd

#endif  // REFITD_DAEMON_GROUP_GROUP_STATE_H_
