// The planted bugs, by name, and the promises that they break. The simulator must find each
// (sim_test).
#ifndef REFITD_TESTS_SIM_BUGS_H_
#define REFITD_TESTS_SIM_BUGS_H_

#include <array>
#include <string_view>

#include "tests/sim/world.h"

namespace refitd::sim {

struct Planted {
  Bug bug;
  std::string_view name;
  std::string_view promises;  // the run may report any of these
  uint64_t within;            // seeds that are tried
  uint64_t first = 0;         // the first of them
};

inline constexpr std::array<Planted, 44> kPlanted = {{
    {Bug::kEarlyCommitted, "early-committed", "P1", 100},
    {Bug::kForgottenUnknown, "forgotten-unknown", "P2", 1000},
    {Bug::kEarlyIssue, "early-issue", "P5", 100},
    {Bug::kSwallowedDeath, "swallowed-death", "P4", 3000},
    {Bug::kEarlyDone, "early-done", "P1 P2 P6", 100},
    {Bug::kForgottenRequest, "forgotten-request", "P3", 200},
    {Bug::kTrustingSink, "trusting-sink", "P1", 500},
    {Bug::kSharedWire, "shared-wire", "P7", 500},
    {Bug::kEarlyRegistered, "early-registered", "REG", 500},
    {Bug::kTrustedReplicas, "trusted-replicas", "P1", 1000},
    {Bug::kHalfStale, "half-stale", "P1", 1000},
    {Bug::kUnseenOverlap, "unseen-overlap", "P1", 4000},
    {Bug::kOldBinding, "old-binding", "P1", 500},
    {Bug::kEarlyRounds, "early-rounds", "P5 P7", 500},
    {Bug::kUnfilledSlot, "unfilled-slot", "P1", 500},
    // Rare: 3 of 26,000 seeds.
    {Bug::kHastyLeave, "hasty-leave", "REST", 4000, 15'000},
    {Bug::kBlindWire, "blind-wire", "REST", 2000},
    {Bug::kPatientCleanUp, "patient-clean-up", "P4", 500},
    {Bug::kTrustedReply, "trusted-reply", "P10", 500},
    {Bug::kSkippedForward, "skipped-forward", "P1", 500},
    {Bug::kEarlyForward, "early-forward", "P1", 500},
    {Bug::kHalfRerun, "half-rerun", "P1 REST", 2000},
    {Bug::kSkippedRound, "skipped-round", "P1 REST", 4000},
    {Bug::kWrongResume, "wrong-resume", "P1 REST", 4000},
    {Bug::kTornSource, "torn-source_instance", "P1", 1000},
    {Bug::kStubbornCatchUp, "stubborn-catch-up", "GIVE", 1000},
    {Bug::kBlindCatchUp, "blind-catch-up", "P1", 1000},
    {Bug::kSkippedPart, "skipped-part", "P1 REST", 1000},
    {Bug::kTwiceStored, "twice-stored", "P1 REST", 1000},
    {Bug::kTakeover, "takeover", "P9", 2000},
    {Bug::kOwnerElsewhere, "owner-on-another-daemon", "P9", 2000},
    {Bug::kEarlyFlip, "early-flip", "P1 P2", 500},
    {Bug::kHalfFlip, "half-flip", "P1", 500},
    {Bug::kStaleSide, "stale-side", "P1 P2", 500},
    {Bug::kKeptSide, "kept-side", "P1 P2", 1000},
    {Bug::kNoWayBack, "no-way-back", "P2", 2000},
    {Bug::kWrittenSide, "written-side", "P1 P2", 500},
    {Bug::kIgnoredHold, "ignored-hold", "HOLD", 500},
    {Bug::kWrongContent, "wrong-content", "P11", 500},
    {Bug::kForgottenContent, "forgotten-content", "P11", 1000},
    {Bug::kHastyPrepare, "hasty-prepare", "AHEAD", 500},
    {Bug::kEveryoneStaged, "everyone-staged", "AHEAD", 500},
    {Bug::kEarlyStaged, "early-staged", "P1", 500},
    {Bug::kKeptProcessed, "kept-processed", "P11", 1000},
}};

}  // namespace refitd::sim

#endif  // REFITD_TESTS_SIM_BUGS_H_
