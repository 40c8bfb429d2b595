#include "daemon/node/coordinator_search.h"

#include <algorithm>

#include "transport/base/status.h"

namespace refitd {

CoordinatorSearch::CoordinatorSearch(const Options& options, TimePoint now, Duration searched)
    : options_(options), since_(now - searched), candidates_(options.candidates) {
  REFITD_CHECK(searched >= Duration(0));
  for (Candidate& candidate : candidates_) candidate.heard = since_;
}

void CoordinatorSearch::Answered(size_t candidate, uint64_t incarnation, TimePoint now) {
  candidates_.at(candidate) = {Last::kAnswer, incarnation, now};
}

void CoordinatorSearch::Failed(size_t candidate) {
  candidates_.at(candidate).last = Last::kFailure;
}

void CoordinatorSearch::Forget() {
  for (Candidate& candidate : candidates_) candidate.last = Last::kNothing;
}

CoordinatorSearch::Decision CoordinatorSearch::Decide(TimePoint now) const {
  Decision join;
  uint64_t greatest = 0;
  bool resolved = true;  // every other candidate answered or is gone
  for (size_t i = 0; i < candidates_.size(); ++i) {
    const Candidate& candidate = candidates_[i];
    if (i == options_.own) continue;
    const bool answered = candidate.last == Last::kAnswer;
    resolved = resolved && (answered || Gone(candidate, now));
    if (!answered || candidate.incarnation <= greatest) continue;
    greatest = candidate.incarnation;
    join = {Step::kJoin, i};
  }
  if (greatest > 0) return join;
  for (size_t i = 0; i < candidates_.size(); ++i) {
    if (i == options_.own) return {resolved ? Step::kMake : Step::kWait, 0};
    if (Gone(candidates_[i], now)) continue;
    if (candidates_[i].last == Last::kAnswer) return {Step::kAsk, i};
    return {};
  }
  return {};
}

std::optional<TimePoint> CoordinatorSearch::NextGone(TimePoint now) const {
  std::optional<TimePoint> next;
  for (const Candidate& candidate : candidates_) {
    const TimePoint gone = candidate.heard + options_.failover;
    if (candidate.last != Last::kFailure || gone <= now) continue;
    next = std::min(next.value_or(gone), gone);
  }
  return next;
}

}  // namespace refitd
