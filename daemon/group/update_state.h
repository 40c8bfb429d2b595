// The transaction that installs one version. Only the coordinator's own decisions drive it. Every
// wait in a state has a deadline (P4). An update commits only when all parts are settled and, if
// that was asked for, verified (P1). Pure, thread-safe.
//
//              assembled              all_ready          all_committed
//   opening ------------> preparing ------------> data ----------------> settling --decide--+
//      |                      |                    |                        | verify        |
//      |                      |                    |                        v               v
//      +-------- give_up -----+--------------------+----- give_up ----- verifying --> committed
//                                                  v                            decide
//                                              draining --quiet--> aborted
//
// With shadowed instances, flipping comes between settling or verifying and committed: the version
// is complete in their backs, and their ranks put the backs into place. Staged comes before it if
// ranks asked for it: they process the version while all serve.
//
// Triggers:
//   assembled      all trainer ranks have begun and enough instances are complete
//   all_ready      every engine rank still in the update answered Ready
//   all_committed  every trainer rank committed, and the pushed tensors cover every instance
//   verify         all parts are transferred and acknowledged; the destinations are being read back
//   stage          all that was asked for is verified, and ranks of shadowed instances process it
//   flip           the same, and shadowed instances have to flip: no rank processes it any more
//   decide         the same, and all have flipped: the version is installed
//   give_up        a trainer rank was lost, a deadline passed, a member or operator gave up, ...
//   quiet          no transfer and no verification of the update runs any more
//
// "-": refused, nothing changes.
// clang-format off
// | state     | assembled | all_ready | all_committed | verify    | stage  | flip     | decide    | give_up  | quiet   |
// | opening   | preparing | -         | -             | -         | -      | -        | -         | draining | -       |
// | preparing | -         | data      | -             | -         | -      | -        | -         | draining | -       |
// | data      | -         | -         | settling      | -         | -      | -        | -         | draining | -       |
// | settling  | -         | -         | -             | verifying | staged | flipping | committed | draining | -       |
// | verifying | -         | -         | -             | -         | staged | flipping | committed | draining | -       |
// | staged    | -         | -         | -             | -         | -      | flipping | -         | draining | -       |
// | flipping  | -         | -         | -             | -         | -      | -        | committed | draining | -       |
// | draining  | -         | -         | -             | -         | -      | -        | -         | -        | aborted |
// | committed | -         | -         | -             | -         | -      | -        | -         | -        | -       |
// | aborted   | -         | -         | -             | -         | -      | -        | -         | -        | -       |
// clang-format on
#ifndef REFITD_DAEMON_GROUP_UPDATE_STATE_H_
#define REFITD_DAEMON_GROUP_UPDATE_STATE_H_

#include <array>
#include <cstdint>
#include <optional>
#include <string_view>

#include "daemon/group/fsm.h"

namespace refitd {

enum class UpdateState : uint8_t {
  kOpening,
  kPreparing,
  kData,
  kSettling,
  kVerifying,
  kStaged,
  kFlipping,
  kEnding,
  kCommitted,
  kAborted,
};
inline constexpr std::array<std::string_view, 10> kUpdateStateNames = {
    "opening", "preparing", "data",     "settling",  "verifying",
    "staged",  "flipping",  "draining", "committed", "aborted"};
constexpr std::string_view Name(UpdateState state) {
  return kUpdateStateNames[static_cast<size_t>(state)];
}

enum class UpdateTrigger : uint8_t {
  kAssembled,
  kAllReady,
  kAllCommitted,
  kVerify,
  kStage,
  kFlip,
  kDecide,
  kGiveUp,
  kQuiet,
};
inline constexpr std::array<std::string_view, 9> kUpdateTriggerNames = {
    "assembled", "all_ready", "all_committed", "verify", "stage",
    "flip",      "decide",    "give_up",       "quiet"};

inline constexpr TransitionTable<UpdateState, 10, 9> kUpdateTransitions = [] {
  using enum UpdateState;
  constexpr std::nullopt_t kNo = std::nullopt;
  return TransitionTable<UpdateState, 10, 9>{{
      // opening
      {{kPreparing, kNo, kNo, kNo, kNo, kNo, kNo, kEnding, kNo}},
      // preparing
      {{kNo, kData, kNo, kNo, kNo, kNo, kNo, kEnding, kNo}},
      // data
      {{kNo, kNo, kSettling, kNo, kNo, kNo, kNo, kEnding, kNo}},
      // settling
      {{kNo, kNo, kNo, kVerifying, kStaged, kFlipping, kCommitted, kEnding, kNo}},
      // verifying
      {{kNo, kNo, kNo, kNo, kStaged, kFlipping, kCommitted, kEnding, kNo}},
      // staged
      {{kNo, kNo, kNo, kNo, kNo, kFlipping, kNo, kEnding, kNo}},
      // flipping
      {{kNo, kNo, kNo, kNo, kNo, kNo, kCommitted, kEnding, kNo}},
      // draining
      {{kNo, kNo, kNo, kNo, kNo, kNo, kNo, kNo, kAborted}},
      // committed
      {{kNo, kNo, kNo, kNo, kNo, kNo, kNo, kNo, kNo}},
      // aborted
      {{kNo, kNo, kNo, kNo, kNo, kNo, kNo, kNo, kNo}},
  }};
}();

constexpr std::optional<UpdateState> Next(UpdateState state, UpdateTrigger trigger) {
  return kUpdateTransitions[static_cast<size_t>(state)][static_cast<size_t>(trigger)];
}

}  // namespace refitd

#endif  // REFITD_DAEMON_GROUP_UPDATE_STATE_H_
