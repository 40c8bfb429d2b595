// Many seeds keep every promise, a seed always gives the same run, and planted bugs are found.
#include <unistd.h>

#include <catch2/catch.hpp>
#include <chrono>
#include <csignal>
#include <cstring>

#include "tests/sim/bugs.h"
#include "tests/sim/world.h"

namespace refitd::sim {
namespace {

constexpr uint64_t kSeeds = 10'000;

// A failed check of a machine aborts the process, so a signal handler prints how to replay the run.
char replay[128];
void SayReplay(int) { (void)!write(STDERR_FILENO, replay, std::strlen(replay)); }

std::string Replay(const Options& options, std::string_view bug = "") {
  return fmt::format("bazel-bin/tests/sim/sim --trace --seed={}{}{}", options.seed,
                     bug.empty() ? "" : " --bug=", bug);
}

Result RunOne(const Options& options) {
  const std::string text = "replay: " + Replay(options) + "\n";
  std::strncpy(replay, text.c_str(), sizeof(replay) - 1);
  std::signal(SIGABRT, SayReplay);
  return RunSeed(options);
}

TEST_CASE("a group over several daemons keeps every promise, whatever the seed") {
  Result sum;
  int broken = 0;
  const auto began = std::chrono::steady_clock::now();
  for (uint64_t seed = 0; seed < kSeeds && broken < 10; ++seed) {
    const Options options{.seed = seed};
    const Result result = RunOne(options);
    if (!result.ok()) {
      ++broken;
      UNSCOPED_INFO(Replay(options) << ": " << result.promise << " broken: " << result.what);
    }
    sum.trace_hash = sum.trace_hash * 31 + result.trace_hash;
    sum.committed += result.committed;
    sum.aborted += result.aborted;
    sum.events += result.events;
    sum.exchanges += result.exchanges;
    sum.forwards += result.forwards;
    sum.reruns += result.reruns;
    sum.resumes += result.resumes;
    sum.parts_again += result.parts_again;
    sum.catch_ups += result.catch_ups;
    sum.gave_way += result.gave_way;
    sum.catch_ups_failed += result.catch_ups_failed;
    sum.rollbacks += result.rollbacks;
    sum.rollbacks_refused += result.rollbacks_refused;
    sum.held += result.held;
    for (const int mixed : {0, 1}) {
      for (const int wide : {0, 1}) sum.refits[mixed][wide] += result.refits[mixed][wide];
    }
    sum.virtual_time += result.virtual_time;
    for (size_t f = 0; f < sum.faults.size(); ++f) sum.faults[f] += result.faults[f];
  }
  const double took =
      std::chrono::duration<double>(std::chrono::steady_clock::now() - began).count();
  fmt::print(
      "{} seeds, {:.0f}/s; {} updates committed, {} aborted; {} events in {:.0f} virtual "
      "hours; trace {:016x}\nfaults:",
      kSeeds, static_cast<double>(kSeeds) / took, sum.committed, sum.aborted, sum.events,
      std::chrono::duration<double>(sum.virtual_time).count() / 3600, sum.trace_hash);
  for (size_t f = 0; f < sum.faults.size(); ++f) {
    fmt::print(" {} {},", FaultName(static_cast<Fault>(f)), sum.faults[f]);
    CHECK(sum.faults[f] > 0);
  }
  fmt::print(
      "\nrefits committed: {} within daemons, {} over several; with pushes {} and {}; {} ends of "
      "exchanges; {} runs again, {} from a later round; {} parts sent again\nfills: {} committed, "
      "{} "
      "gave way, {} failed\nrollbacks: {} committed, {} refused; {} updates after a hold\n",
      sum.refits[0][0], sum.refits[0][1], sum.refits[1][0], sum.refits[1][1], sum.exchanges,
      sum.reruns, sum.resumes, sum.parts_again, sum.catch_ups, sum.gave_way, sum.catch_ups_failed,
      sum.rollbacks, sum.rollbacks_refused, sum.held);
  CHECK(broken == 0);
  // Fewer updates would mean that the scenarios test little.
  CHECK(sum.committed > static_cast<int64_t>(kSeeds));
  CHECK(sum.aborted > static_cast<int64_t>(kSeeds / 2));
  CHECK(sum.refits[0][0] > static_cast<int64_t>(kSeeds / 50));
  CHECK(sum.refits[0][1] > static_cast<int64_t>(kSeeds / 10));
  CHECK(sum.refits[1][0] > static_cast<int64_t>(kSeeds / 200));
  CHECK(sum.refits[1][1] > static_cast<int64_t>(kSeeds / 20));
  CHECK(sum.exchanges > static_cast<int64_t>(kSeeds));
  CHECK(sum.forwards > static_cast<int64_t>(kSeeds) / 10);
  CHECK(sum.reruns > static_cast<int64_t>(kSeeds) / 250);
  CHECK(sum.resumes > 0);
  CHECK(sum.parts_again > static_cast<int64_t>(kSeeds) / 500);
  CHECK(sum.catch_ups > static_cast<int64_t>(kSeeds) / 20);
  CHECK(sum.gave_way > static_cast<int64_t>(kSeeds) / 50);
  CHECK(sum.catch_ups_failed > static_cast<int64_t>(kSeeds) / 200);
  CHECK(sum.rollbacks > static_cast<int64_t>(kSeeds) / 50);
  CHECK(sum.rollbacks_refused > static_cast<int64_t>(kSeeds) / 50);
  CHECK(sum.held > static_cast<int64_t>(kSeeds) / 200);
}

TEST_CASE("the same seed is the same run") {
  for (uint64_t seed = 0; seed < 120; ++seed) {
    const Result first = RunOne({.seed = seed});
    const Result second = RunOne({.seed = seed});
    CAPTURE(seed);
    CHECK(first.trace_hash == second.trace_hash);
    CHECK(first.events == second.events);
  }
  CHECK(RunOne({.seed = 1}).trace_hash != RunOne({.seed = 7}).trace_hash);
}

TEST_CASE("every planted bug is found, by the promise that it breaks") {
  for (const Planted& planted : kPlanted) {
    Options options{.bug = planted.bug};
    Result result;
    const uint64_t end = planted.first + planted.within;
    for (options.seed = planted.first; options.seed < end; ++options.seed) {
      result = RunOne(options);
      if (!result.ok() && planted.promises.find(result.promise) != std::string_view::npos) break;
    }
    CAPTURE(planted.name);
    REQUIRE(options.seed < end);
    fmt::print("{}: seed {} broke {}: {}\n", planted.name, options.seed, result.promise,
               result.what);
  }
}

}  // namespace
}  // namespace refitd::sim
