// The engine ranks that serve one copy of the model: they commit, become dirty and are evicted
// together. A dirty instance has no version (P2). An instance is dirty from the first byte that is
// written or handed over until it commits in full; losing a rank does not make it clean. Pure,
// thread-safe.
//
//             complete           prepare                     all_ready
//   forming ----------> clean ------------> clean_preparing -----------> clean_ready --+
//      |                 | ^ ^                     |                       |  |        |
//      |                 | | +------ give_up ------+-----------------------+  |        |
//      |                 | +------------------------ commit ------------------+        |
//      |                 |                                                 first_write |
//      v       complete  v        prepare                     all_ready                v
//   forming_dirty ----> dirty ------------> dirty_preparing -----------> dirty_ready <-+
//                          ^                       |                       |  |
//                          +-------- give_up ------+-----------------------+  +-commit-> clean
//
//   mark_dirty: from the upper row to the state below.
//   rank_lost: from the upper row to forming, from the lower row to forming_dirty.
//   last_lost: from any state to gone.
//
// Triggers:
//   complete     every rank is attached and, for in-place delivery, has a layout
//   prepare      an update takes the instance in: Prepare is sent to every rank. A shadowed
//                instance stays clean or dirty until the version is staged, and is not sent the
//                Prepare that flips before that; it has no first_write.
//   all_ready    every rank answered Ready
//   first_write  the first byte of an update is about to be written or handed over to it
//   commit       the update committed with this instance in it
//   give_up      the update aborted, or evicted it with all its ranks alive
//   rank_lost    a rank's lease ended, and other ranks stay; or a rank has withdrawn its layout
//   last_lost    the lease of the last rank ended
//   mark_dirty   the group was replaced by a new incarnation, a rank attached with dirty weights,
//                or a rank failed an update that had already committed
//
// "-": refused, nothing changes.
// clang-format off
// | state           | complete | prepare         | all_ready   | first_write | commit | give_up | rank_lost     | last_lost | mark_dirty      |
// | forming         | clean    | -               | -           | -           | -      | -       | forming       | gone      | forming_dirty   |
// | forming_dirty   | dirty    | -               | -           | -           | -      | -       | forming_dirty | gone      | forming_dirty   |
// | clean           | -        | clean_preparing | -           | -           | -      | -       | forming       | gone      | dirty           |
// | dirty           | -        | dirty_preparing | -           | -           | -      | -       | forming_dirty | gone      | dirty           |
// | clean_preparing | -        | -               | clean_ready | -           | -      | clean   | forming       | gone      | dirty_preparing |
// | dirty_preparing | -        | -               | dirty_ready | -           | -      | dirty   | forming_dirty | gone      | dirty_preparing |
// | clean_ready     | -        | -               | -           | dirty_ready | clean  | clean   | forming       | gone      | dirty_ready     |
// | dirty_ready     | -        | -               | -           | dirty_ready | clean  | dirty   | forming_dirty | gone      | dirty_ready     |
// | gone            | -        | -               | -           | -           | -      | -       | -             | -         | -               |
// clang-format on
#ifndef REFITD_DAEMON_GROUP_INSTANCE_STATE_H_
#define REFITD_DAEMON_GROUP_INSTANCE_STATE_H_

#include <array>
#include <cstdint>
#include <optional>
#include <string_view>

#include "daemon/group/fsm.h"

namespace refitd {

enum class InstanceState : uint8_t {
  kForming,
  kFormingDirty,
  kClean,
  kDirty,
  kCleanPreparing,
  kDirtyPreparing,
  kCleanReady,
  kDirtyReady,
  kGone,
};
inline constexpr std::array<std::string_view, 9> kInstanceStateNames = {
    "forming",         "forming_dirty", "clean",       "dirty", "clean_preparing",
    "dirty_preparing", "clean_ready",   "dirty_ready", "gone"};
constexpr std::string_view Name(InstanceState state) {
  return kInstanceStateNames[static_cast<size_t>(state)];
}

enum class InstanceTrigger : uint8_t {
  kComplete,
  kPrepare,
  kAllReady,
  kFirstWrite,
  kCommit,
  kGiveUp,
  kRankLost,
  kLastLost,
  kMarkDirty,
};
inline constexpr std::array<std::string_view, 9> kInstanceTriggerNames = {
    "complete", "prepare",   "all_ready", "first_write", "commit",
    "give_up",  "rank_lost", "last_lost", "mark_dirty"};

inline constexpr TransitionTable<InstanceState, 9, 9> kInstanceTransitions = [] {
  using enum InstanceState;
  constexpr std::nullopt_t kNo = std::nullopt;
  return TransitionTable<InstanceState, 9, 9>{{
      // forming
      {{kClean, kNo, kNo, kNo, kNo, kNo, kForming, kGone, kFormingDirty}},
      // forming_dirty
      {{kDirty, kNo, kNo, kNo, kNo, kNo, kFormingDirty, kGone, kFormingDirty}},
      // clean
      {{kNo, kCleanPreparing, kNo, kNo, kNo, kNo, kForming, kGone, kDirty}},
      // dirty
      {{kNo, kDirtyPreparing, kNo, kNo, kNo, kNo, kFormingDirty, kGone, kDirty}},
      // clean_preparing
      {{kNo, kNo, kCleanReady, kNo, kNo, kClean, kForming, kGone, kDirtyPreparing}},
      // dirty_preparing
      {{kNo, kNo, kDirtyReady, kNo, kNo, kDirty, kFormingDirty, kGone, kDirtyPreparing}},
      // clean_ready
      {{kNo, kNo, kNo, kDirtyReady, kClean, kClean, kForming, kGone, kDirtyReady}},
      // dirty_ready
      {{kNo, kNo, kNo, kDirtyReady, kClean, kDirty, kFormingDirty, kGone, kDirtyReady}},
      // gone
      {{kNo, kNo, kNo, kNo, kNo, kNo, kNo, kNo, kNo}},
  }};
}();

constexpr std::optional<InstanceState> Next(InstanceState state, InstanceTrigger trigger) {
  return kInstanceTransitions[static_cast<size_t>(state)][static_cast<size_t>(trigger)];
}

}  // namespace refitd

#endif  // REFITD_DAEMON_GROUP_INSTANCE_STATE_H_
