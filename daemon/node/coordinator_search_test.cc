// The search alone, and a simulation of several daemons that search, make groups and give them up
// while the network between them changes. The simulation holds for both rules that it depends on,
// and fails if one of them is planted wrong.
#include "daemon/node/coordinator_search.h"

#include <algorithm>
#include <catch2/catch.hpp>
#include <chrono>
#include <memory>
#include <optional>
#include <random>
#include <string>
#include <vector>

#include "daemon/node/incarnation.h"

namespace refitd {
namespace {

using std::chrono::milliseconds;
using std::chrono::seconds;
using Step = CoordinatorSearch::Step;

const TimePoint kNow{std::chrono::hours(1)};
constexpr Duration kFailover = seconds(3);

CoordinatorSearch Begin(size_t candidates, std::optional<size_t> own, Duration searched = {}) {
  return {CoordinatorSearch::Options{candidates, own, kFailover}, kNow, searched};
}

TEST_CASE("a candidate that coordinates the group is joined, of several the greatest") {
  CoordinatorSearch search = Begin(3, 0);
  CHECK(search.Decide(kNow).step == Step::kWait);
  search.Answered(2, 5, kNow);
  CHECK(search.Decide(kNow).step == Step::kJoin);
  CHECK(search.Decide(kNow).candidate == 2);
  search.Answered(1, 9, kNow);
  CHECK(search.Decide(kNow).candidate == 1);
  search.Forget();
  CHECK(search.Decide(kNow).step == Step::kWait);
}

TEST_CASE("the first candidate that answers is asked to make the group") {
  CoordinatorSearch search = Begin(3, std::nullopt);
  search.Answered(1, 0, kNow);
  CHECK(search.Decide(kNow).step == Step::kWait);  // nothing is known of the first candidate
  search.Answered(0, 0, kNow);
  CHECK(search.Decide(kNow).step == Step::kAsk);
  CHECK(search.Decide(kNow).candidate == 0);
}

TEST_CASE("a candidate is gone when it has not answered for the limit, not before") {
  CoordinatorSearch search = Begin(3, 1);
  search.Failed(0);
  search.Answered(2, 0, kNow);
  CHECK(search.Decide(kNow).step == Step::kWait);
  CHECK(search.NextGone(kNow) == kNow + kFailover);
  CHECK(search.Decide(kNow + kFailover - milliseconds(1)).step == Step::kWait);
  CHECK(search.Decide(kNow + kFailover).step == Step::kMake);
  CHECK(search.NextGone(kNow + kFailover) == std::nullopt);
  SECTION("an answer begins its time anew") {
    search.Answered(0, 0, kNow + kFailover);
    CHECK(search.Decide(kNow + kFailover).step == Step::kAsk);
    search.Failed(0);
    CHECK(search.Decide(kNow + 2 * kFailover - milliseconds(1)).step == Step::kWait);
    CHECK(search.Decide(kNow + 2 * kFailover).step == Step::kMake);
  }
  SECTION("a candidate that was not probed is not gone") {
    search.Forget();
    CHECK(search.Decide(kNow + 9 * kFailover).step == Step::kWait);
  }
}

TEST_CASE("the first candidate makes the group only when every other answered or is gone") {
  CoordinatorSearch search = Begin(3, 0);
  search.Answered(1, 0, kNow);
  CHECK(search.Decide(kNow).step == Step::kWait);
  search.Failed(2);
  CHECK(search.Decide(kNow).step == Step::kWait);
  CHECK(search.Decide(kNow + kFailover).step == Step::kMake);
  search.Answered(2, 0, kNow);
  CHECK(search.Decide(kNow).step == Step::kMake);
}

TEST_CASE("a search for another daemon counts how long that one has searched") {
  CoordinatorSearch search = Begin(2, 1, kFailover);
  CHECK(search.Decide(kNow).step == Step::kWait);
  search.Failed(0);
  CHECK(search.Decide(kNow).step == Step::kMake);
  CHECK(search.searched(kNow) == kFailover);
}

TEST_CASE("when every candidate is gone, a daemon that is none waits") {
  CoordinatorSearch search = Begin(2, std::nullopt);
  search.Failed(0);
  search.Failed(1);
  CHECK(search.Decide(kNow + 2 * kFailover).step == Step::kWait);
}

// ---- several daemons ----

// Rules that a simulation plants wrong.
struct Planted {
  bool ignores_probes = false;   // the probed coordinator does not look at the prober's incarnation
  bool ignores_answers = false;  // the prober does not look at the probed coordinator's
  bool no_watch = false;         // coordinators do not probe
};

// Daemons 0 to kCandidates-1 are the candidates, in that order; the others have members only. A
// step is 250 ms. Each direction of each pair is open or closed.
class World {
 public:
  static constexpr size_t kCandidates = 3;
  static constexpr size_t kDaemons = 5;
  static constexpr Duration kStep = milliseconds(250);

  World(uint64_t seed, Planted planted) : random_(seed), planted_(planted), daemons_(kDaemons) {
    open_.assign(kDaemons, std::vector<bool>(kDaemons, true));
  }

  void Cut() {
    for (auto& row : open_) {
      for (size_t i = 0; i < row.size(); ++i) row[i] = random_() % 3 != 0;
    }
  }
  void Heal() {
    for (auto& row : open_) std::fill(row.begin(), row.end(), true);
  }
  void Kill(size_t at) { daemons_[at] = Daemon{}; }

  void Steps(int count) {
    for (int i = 0; i < count; ++i) {
      now_ += kStep;
      for (size_t at = 0; at < kDaemons; ++at) Act(at);
    }
  }
  std::vector<size_t> Coordinators() const {
    std::vector<size_t> all;
    for (size_t at = 0; at < kDaemons; ++at) {
      if (daemons_[at].incarnation != 0) all.push_back(at);
    }
    return all;
  }
  // Whether all daemons take part in the group of this coordinator.
  bool AllIn(size_t coordinator) const {
    for (size_t at = 0; at < kDaemons; ++at) {
      if (at != coordinator && daemons_[at].follows != coordinator) return false;
    }
    return true;
  }
  bool InBoth() const {
    return std::any_of(daemons_.begin(), daemons_.end(),
                       [](const Daemon& d) { return d.incarnation != 0 && d.follows.has_value(); });
  }

 private:
  struct Daemon {
    std::unique_ptr<CoordinatorSearch> search;
    std::optional<size_t> follows;
    uint64_t incarnation = 0;  // with which it coordinates
    uint64_t known = 0;
  };

  bool Reaches(size_t from, size_t to) const { return open_[from][to] && open_[to][from]; }
  static std::optional<size_t> Place(size_t at) {
    return at < kCandidates ? std::optional(at) : std::nullopt;
  }
  void GiveUp(Daemon* daemon, uint64_t other) {
    daemon->known = std::max({daemon->known, daemon->incarnation, other});
    daemon->incarnation = 0;
  }
  // The prober's request may arrive although the answer gets lost.
  std::optional<uint64_t> Probe(size_t from, size_t to) {
    if (!open_[from][to]) return std::nullopt;
    Daemon& probed = daemons_[to];
    const uint64_t answer = probed.incarnation;
    const uint64_t told = daemons_[from].incarnation;
    if (answer != 0 && !planted_.ignores_probes && GivesWay(answer, told)) GiveUp(&probed, told);
    if (!open_[to][from]) return std::nullopt;
    return answer;
  }
  void Act(size_t at) {
    Daemon& own = daemons_[at];
    if (own.incarnation != 0) return Watch(at);
    if (own.follows.has_value()) {
      const Daemon& to = daemons_[*own.follows];
      if (Reaches(at, *own.follows) && to.incarnation != 0) {
        own.known = std::max(own.known, to.incarnation);
        return;
      }
      own.follows.reset();
    }
    Search(at);
  }
  void Watch(size_t at) {
    if (planted_.no_watch) return;
    for (size_t i = 0; i < kCandidates; ++i) {
      if (i == at) continue;
      const std::optional<uint64_t> answer = Probe(at, i);
      Daemon& own = daemons_[at];
      if (planted_.ignores_answers || own.incarnation == 0) continue;
      if (answer.has_value() && GivesWay(own.incarnation, *answer)) return GiveUp(&own, *answer);
    }
  }
  void Search(size_t at) {
    Daemon& own = daemons_[at];
    if (own.search == nullptr) {
      own.search = std::make_unique<CoordinatorSearch>(Options(at), now_, Duration(0));
    }
    for (size_t i = 0; i < kCandidates; ++i) {
      if (i == at) continue;
      const std::optional<uint64_t> answer = Probe(at, i);
      if (answer.has_value()) {
        own.known = std::max(own.known, *answer);
        own.search->Answered(i, *answer, now_);
      } else {
        own.search->Failed(i);
      }
    }
    const CoordinatorSearch::Decision decision = own.search->Decide(now_);
    switch (decision.step) {
      case Step::kWait:
        return;
      case Step::kAsk: {
        Daemon& asked = daemons_[decision.candidate];
        if (!Reaches(at, decision.candidate) || asked.follows || asked.search) return;
        asked.known = std::max(asked.known, own.known);
        asked.search = std::make_unique<CoordinatorSearch>(
            Options(decision.candidate), now_, std::min(own.search->searched(now_), kFailover));
        return;
      }
      case Step::kJoin:
        if (!Reaches(at, decision.candidate) || daemons_[decision.candidate].incarnation == 0) {
          return;
        }
        own.follows = decision.candidate;
        break;
      case Step::kMake:
        own.incarnation = NewIncarnation(own.known);
        break;
    }
    own.search.reset();
  }
  static CoordinatorSearch::Options Options(size_t at) {
    return {kCandidates, Place(at), kFailover};
  }

  std::mt19937_64 random_;
  const Planted planted_;
  TimePoint now_ = kNow;
  std::vector<Daemon> daemons_;
  std::vector<std::vector<bool>> open_;  // by sender, receiver
};

// Runs one history; returns what was wrong, or an empty text.
std::string Run(uint64_t seed, Planted planted) {
  std::mt19937_64 random(seed * 7 + 1);
  World world(seed, planted);
  for (int phase = 0; phase < 4; ++phase) {
    if (random() % 2 == 0) world.Cut();
    if (random() % 3 == 0) world.Kill(random() % World::kDaemons);
    for (int i = 0; i < 40; ++i) {
      world.Steps(1);
      if (world.InBoth()) return "a daemon coordinates and follows";
    }
    world.Heal();
  }
  world.Steps(60);  // 15 s
  const std::vector<size_t> left = world.Coordinators();
  if (left.size() != 1) return std::to_string(left.size()) + " coordinators are left";
  if (!world.AllIn(left[0])) return "a daemon did not come back";
  // The coordinator that is left stays the coordinator.
  world.Steps(60);
  return world.Coordinators() == left ? "" : "the coordinator changed without a cause";
}

TEST_CASE("after any history of cuts and deaths one coordinator is left, with all daemons") {
  for (uint64_t seed = 1; seed <= 400; ++seed) {
    INFO("seed " << seed);
    REQUIRE(Run(seed, {}).empty());
  }
}

int Wrong(Planted planted) {
  int wrong = 0;
  for (uint64_t seed = 1; seed <= 400; ++seed) wrong += Run(seed, planted).empty() ? 0 : 1;
  return wrong;
}

TEST_CASE("the simulation finds coordinators that never look for another") {
  CHECK(Wrong({.no_watch = true}) > 0);
}

TEST_CASE("either side of a probe is enough for two coordinators to end as one") {
  CHECK(Wrong({.ignores_probes = true}) == 0);
  CHECK(Wrong({.ignores_answers = true}) == 0);
  CHECK(Wrong({.ignores_probes = true, .ignores_answers = true}) > 0);
}

}  // namespace
}  // namespace refitd
