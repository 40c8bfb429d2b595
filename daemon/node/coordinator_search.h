// The search of one daemon for the coordinator of a group that has several candidates.
//
// The daemon probes the other candidates again and again, tells the search their answers, and asks
// it what to do:
//
//   a candidate coordinates the group              -> join it (kJoin); of several, the one with the
//                                                     greatest incarnation
//   none does, and the first candidate that is not
//   gone is another daemon, which answers          -> ask it to make the group (kAsk); it searches
//                                                     as well before it does
//   ... is this daemon, and every other candidate
//   answered or is gone                            -> make the group (kMake)
//   otherwise                                      -> probe on (kWait)
//
// Invariants
//  1. A candidate is gone if its last probe failed and it has not answered for `failover`. A
//     candidate that was not probed yet, or whose answer was forgotten, is not gone.
//  2. The order of the candidates is that of the list, in every daemon: two daemons that reach the
//     same candidates decide for the same one.
//
// Pure. Not thread-safe.
#ifndef REFITD_DAEMON_NODE_COORDINATOR_SEARCH_H_
#define REFITD_DAEMON_NODE_COORDINATOR_SEARCH_H_

#include <cstddef>
#include <cstdint>
#include <optional>
#include <vector>

#include "transport/base/ids.h"

namespace refitd {

class CoordinatorSearch {
 public:
  struct Options {
    size_t candidates = 0;
    std::optional<size_t> own;  // this daemon's place; nullopt: it is no candidate
    Duration failover{};
  };
  // `searched`: for how long the daemon on whose behalf this one searches has searched already.
  CoordinatorSearch(const Options& options, TimePoint now, Duration searched);

  // The candidate coordinates the group with that incarnation; 0: it does not.
  void Answered(size_t candidate, uint64_t incarnation, TimePoint now);
  void Failed(size_t candidate);
  // Forgets all answers and failures, but not for how long candidates have not answered.
  void Forget();

  enum class Step : uint8_t { kWait, kJoin, kAsk, kMake };
  struct Decision {
    Step step = Step::kWait;
    size_t candidate = 0;  // kJoin, kAsk
  };
  Decision Decide(TimePoint now) const;
  // The time at which a candidate whose last probe failed will be gone, unless it answers; nullopt:
  // none will.
  std::optional<TimePoint> NextGone(TimePoint now) const;
  // For how long this daemon, or the one on whose behalf it searches, has searched.
  Duration searched(TimePoint now) const { return now - since_; }

 private:
  enum class Last : uint8_t { kNothing, kAnswer, kFailure };
  struct Candidate {
    Last last = Last::kNothing;
    uint64_t incarnation = 0;  // of the last answer
    TimePoint heard;           // when it last answered, or the search began
  };
  bool Gone(const Candidate& candidate, TimePoint now) const {
    return candidate.last == Last::kFailure && now - candidate.heard >= options_.failover;
  }

  const Options options_;
  const TimePoint since_;
  std::vector<Candidate> candidates_;  // the entry of this daemon is not used
};

// Whether a daemon that coordinates the group with the incarnation `own` gives its group up when
// another daemon coordinates the same group with the incarnation `other`.
inline bool GivesWay(uint64_t own, uint64_t other) { return other > own; }

}  // namespace refitd

#endif  // REFITD_DAEMON_NODE_COORDINATOR_SEARCH_H_
