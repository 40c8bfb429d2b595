// One attached process. An engine rank is preparing after Prepare, and ready after its Ready; a
// trainer rank is preparing after its Begin, and ready once Begin is answered. A lost member is
// leaving while a transfer still touches its memory, and gone afterwards: only then may its memory
// be unmapped (P6). Pure, thread-safe.
//
//                 +---------------- outcome --------------+
//                 v                     |                 |
//   attach -> attached --prepare--> preparing --ready--> ready
//                 |                     |                 |
//                 +------- lost --------+-----------------+
//                                       v
//                                    leaving --quiet--> gone
//
// Triggers:
//   prepare  Prepare was sent (engine) or Begin came (trainer)
//   ready    the rank answered Ready (engine), or its Begin was answered (trainer)
//   outcome  Committed or Aborted is sent to the rank
//   lost     its lease ended
//   quiet    no transfer or verification touches its memory
//
// "-": refused, nothing changes.
// | state     | prepare   | ready | outcome  | lost    | quiet |
// | attached  | preparing | -     | -        | leaving | -     |
// | preparing | -         | ready | attached | leaving | -     |
// | ready     | -         | -     | attached | leaving | -     |
// | leaving   | -         | -     | -        | -       | gone  |
// | gone      | -         | -     | -        | -       | -     |
#ifndef REFITD_DAEMON_GROUP_MEMBER_STATE_H_
#define REFITD_DAEMON_GROUP_MEMBER_STATE_H_

#include <array>
#include <cstdint>
#include <optional>
#include <string_view>

#include "daemon/group/fsm.h"

namespace refitd {

enum class MemberState : uint8_t {
  kAttached,
  kPreparing,
  kReady,
  kLeaving,
  kGone,
};
inline constexpr std::array<std::string_view, 5> kMemberStateNames = {"attached", "preparing",
                                                                      "ready", "leaving", "gone"};
constexpr std::string_view Name(MemberState state) {
  return kMemberStateNames[static_cast<size_t>(state)];
}

enum class MemberTrigger : uint8_t {
  kPrepare,
  kReady,
  kOutcome,
  kLost,
  kQuiet,
};
inline constexpr std::array<std::string_view, 5> kMemberTriggerNames = {"prepare", "ready",
                                                                        "outcome", "lost", "quiet"};

inline constexpr TransitionTable<MemberState, 5, 5> kMemberTransitions = [] {
  using enum MemberState;
  constexpr std::nullopt_t kNo = std::nullopt;
  return TransitionTable<MemberState, 5, 5>{{
      // attached
      {{kPreparing, kNo, kNo, kLeaving, kNo}},
      // preparing
      {{kNo, kReady, kAttached, kLeaving, kNo}},
      // ready
      {{kNo, kNo, kAttached, kLeaving, kNo}},
      // leaving
      {{kNo, kNo, kNo, kNo, kGone}},
      // gone
      {{kNo, kNo, kNo, kNo, kNo}},
  }};
}();

constexpr std::optional<MemberState> Next(MemberState state, MemberTrigger trigger) {
  return kMemberTransitions[static_cast<size_t>(state)][static_cast<size_t>(trigger)];
}

}  // namespace refitd

#endif  // REFITD_DAEMON_GROUP_MEMBER_STATE_H_
