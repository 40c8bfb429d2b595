// Each member and daemon of an update over three daemons is killed and stopped in every phase
// (tests/e2e/chaos.h lists them, and the promises that are checked).
#include <catch2/catch.hpp>
#include <cstdlib>
#include <optional>
#include <string>

#include "tests/e2e/chaos.h"

namespace refitd::e2e {
namespace {

constexpr std::optional<bool> kCommits = true;
constexpr std::optional<bool> kAborts = false;
constexpr std::optional<bool> kEither = std::nullopt;

struct Row {
  Victim victim;
  // How the update must end, by phase: prepare, data, decide.
  std::optional<bool> outcome[3];
};

// Runs every phase of each row on one cluster.
void RunTable(Fault fault, const std::vector<Row>& rows, int loopback_index) {
  Cluster cluster(loopback_index);
  for (const Row& row : rows) {
    for (const Phase phase : {Phase::kPrepare, Phase::kData, Phase::kDecide}) {
      const std::string name = NameOf(row.victim) + " " + NameOf(fault) + " " + NameOf(phase);
      const std::vector<std::string> problems =
          cluster.Run({row.victim, fault, phase}, row.outcome[static_cast<int>(phase)]);
      std::string text;
      for (const std::string& problem : problems) text += problem + "\n";
      INFO(name << "\n" << text);
      CHECK(problems.empty());
    }
  }
  CHECK(cluster.counts().violations == 0);
  CHECK(cluster.counts().leaks == 0);
}

TEST_CASE("a member killed in any phase costs its instance or the update, nothing else") {
  RunTable(Fault::kKill,
           {
               {Victim::kTrainer, {kAborts, kAborts, kAborts}},
               {Victim::kFarEngine, {kCommits, kCommits, kCommits}},
               {Victim::kNearEngine, {kCommits, kCommits, kCommits}},
           },
           0);
}

TEST_CASE("a daemon killed in any phase aborts the update or leaves it to the rest") {
  RunTable(Fault::kKill,
           {
               {Victim::kSource, {kAborts, kAborts, kAborts}},
               // The sink has engines only: the update goes on without it, and parts that were
               // under way are sent again.
               {Victim::kSink, {kCommits, kCommits, kCommits}},
               {Victim::kCoordinator, {kAborts, kAborts, kAborts}},
           },
           1);
}

TEST_CASE("a member stopped in any phase is late by name, and welcome again") {
  RunTable(Fault::kStop,
           {
               // The trainer's Commit is out, so nothing more is asked of the trainer.
               {Victim::kTrainer, {kAborts, kAborts, kCommits}},
               {Victim::kFarEngine, {kAborts, kAborts, kAborts}},
               // This engine is registered, so nothing is asked of it after Ready.
               {Victim::kNearEngine, {kAborts, kCommits, kCommits}},
           },
           2);
}

TEST_CASE("a daemon stopped in any phase is given up in time, and welcome again") {
  RunTable(Fault::kStop,
           {
               {Victim::kSource, {kAborts, kAborts, kAborts}},
               {Victim::kSink, {kCommits, kCommits, kCommits}},
               // A coordinator that goes on may hear of the sink's loss first, and commit.
               {Victim::kCoordinator, {kAborts, kAborts, kEither}},
           },
           3);
}

// CHAOS_SEED and CHAOS_ROUNDS in the environment allow longer runs by hand.
uint64_t FromEnvironment(const char* name, uint64_t otherwise) {
  const char* const value = std::getenv(name);
  return value == nullptr ? otherwise : std::strtoull(value, nullptr, 10);
}

TEST_CASE("20 random faults violate no promise and leave nothing behind") {
  const uint64_t seed = FromEnvironment("CHAOS_SEED", 20'240'611);
  const int rounds = static_cast<int>(FromEnvironment("CHAOS_ROUNDS", 20));
  const ChaosCounts counts = Chaos(seed, rounds, 4);
  std::string details;
  for (const std::string& detail : counts.details) details += detail + "\n";
  INFO("seed " << seed << ", updates " << counts.updates << "\n" << details);
  CHECK(counts.violations == 0);
  CHECK(counts.leaks == 0);
  CHECK(counts.kills + counts.stops == rounds);
  // At least the update after each fault committed.
  CHECK(counts.committed >= rounds);
  CHECK(counts.updates == counts.committed + counts.aborted);
}

}  // namespace
}  // namespace refitd::e2e
