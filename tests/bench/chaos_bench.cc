// tools/bench chaos: compiled refits to three engine nodes, whose daemons are killed while the data
// moves. Real processes on this host, in host memory: a daemon with the trainer, which also
// coordinates, and three with an engine each.
//
//   chaos_bench [--updates 1000] [--kills-in 2] [--seed 1] [--json]
//
// A daemon to be killed, and the moment, are random. The moment is counted in bytes that the
// trainers' daemon has sent for the update, so that a busy machine changes little. After each
// update with a kill the daemon is started anew with the same address, and an engine attaches there
// with empty memory: the group may fill it until the next Refit comes.
//
// Counted as violations:
//   P1  an engine that the Refit names as committed does not hold the version byte for byte, or an
//       engine believes in a version that it does not hold, or that was not committed
//   P4  a call or an engine's outcome that does not come by kDeadline
//   -   an instance whose daemon lives was left out of the update
// A lost update is a Refit that failed: no engine node's death may cost the others their update.
#include <CLI/CLI.hpp>
#include <chrono>
#include <memory>
#include <random>
#include <stdexcept>
#include <string>
#include <vector>

#include "fmt/format.h"
#include "tests/bench/report.h"
#include "tests/e2e/harness.h"

namespace refitd::bench {
namespace {

using Clock = std::chrono::steady_clock;

constexpr int kEngines = 3;
constexpr int kMatrices = 8;
constexpr int kRows = 1024;
constexpr int kColumns = 256;
constexpr int64_t kModelBytes = int64_t{2} * kMatrices * kRows * kColumns;  // bfloat16
constexpr int64_t kSlotBytes = 64 << 10;
constexpr int kSlots = 4;
constexpr int kShownProblems = 20;

struct Counts {
  int64_t updates = 0;
  int64_t kills = 0;     // kills before the victim had committed the update
  int64_t too_late = 0;  // kills after the victim had committed it
  int64_t resumed = 0;   // updates that went on from a later round than the first
  int64_t first = 0;     // updates that ran from the first round after the loss
  int64_t lost = 0;      // updates that failed
  int64_t violations = 0;
  std::vector<double> seconds;         // times of updates without a kill
  std::vector<double> seconds_killed;  // times of updates with a kill while their data moved
};

class Chaos {
 public:
  explicit Chaos(uint64_t seed) : random_(seed) {
    for (int node = 0; node <= kEngines; ++node) {
      daemons_.push_back(std::make_unique<e2e::Daemon>(
          std::vector<std::string>{fmt::format("--daemon-id=n{}", node),
                                   fmt::format("--listen-tcp={}:0", e2e::OwnLoopback(node))}));
    }
    trainer_ = std::make_unique<e2e::MemberProcess>(home(), "trainer", Settings());
    Must(*trainer_, "attach");
    Must(*trainer_, "register");
    engines_.resize(kEngines);
    for (int node = 1; node <= kEngines; ++node) StartEngine(node);
  }

  const Counts& counts() const { return counts_; }

  // Makes one update, with a kill or without.
  void Update(bool kill) {
    ++counts_.updates;
    ++version_;
    if (!AwaitInstances()) return;
    const int victim = kill ? 1 + static_cast<int>(random_() % kEngines) : 0;
    const int64_t moment = static_cast<int64_t>(random_() % kModelBytes);
    const int64_t sent_before = home().Resources().wire_bytes_sent();
    const size_t log_before = home().log().size();
    const auto began = Clock::now();
    trainer_->Send(fmt::format("refit {}", version_));
    if (kill) {
      AwaitSent(sent_before + moment);
      daemons_[static_cast<size_t>(victim)]->Kill();
    }
    const std::string answer = trainer_->Answer();
    const double took = std::chrono::duration<double>(Clock::now() - began).count();
    if (answer.rfind("ok ", 0) != 0) {
      ++counts_.lost;
      Problem("the update was lost: " + answer);
    }
    bool victim_committed = false;
    for (int node = 1; node <= kEngines; ++node) {
      const bool committed = Says(answer, node, "committed");
      if (node == victim) victim_committed = committed;
      if (!committed && node != victim)
        Violation(fmt::format("n{} was left out: {}", node, answer));
      Judge(node, committed, node == victim);
    }
    if (!kill) return counts_.seconds.push_back(took);
    if (victim_committed) {
      ++counts_.too_late;
    } else {
      ++counts_.kills;
      counts_.seconds_killed.push_back(took);
      NoteHow(home().log().substr(log_before));
    }
    Restart(victim);
  }

 private:
  e2e::Daemon& home() { return *daemons_[0]; }
  e2e::MemberProcess& engine(int node) { return *engines_[static_cast<size_t>(node - 1)]; }

  std::vector<std::string> Settings() {
    return {fmt::format("instances={}", kEngines), fmt::format("slot_bytes={}", kSlotBytes),
            fmt::format("slots={}", kSlots),       fmt::format("matrices={}", kMatrices),
            fmt::format("rows={}", kRows),         fmt::format("columns={}", kColumns)};
  }
  static void Must(e2e::MemberProcess& member, const std::string& command) {
    const std::string answer = member.Do(command);
    if (answer.rfind("ok", 0) != 0) throw std::runtime_error(command + ": " + answer);
  }
  void StartEngine(int node) {
    std::vector<std::string> settings = Settings();
    settings.insert(settings.end(), {fmt::format("instance=i{}", node), "auto=1", "catch_up=1",
                                     "coordinator=" + home().address()});
    auto process = std::make_unique<e2e::MemberProcess>(*daemons_[static_cast<size_t>(node)],
                                                        "engine", settings);
    Must(*process, "attach");
    engines_[static_cast<size_t>(node - 1)] = std::move(process);
  }
  void Restart(int node) {
    engines_[static_cast<size_t>(node - 1)].reset();
    daemons_[static_cast<size_t>(node)]->Restart();
    StartEngine(node);
  }

  // Waits until every instance may take part.
  bool AwaitInstances() {
    const bool all = Eventually([this] {
      const v1::GroupStatus group = home().Group("g");
      int whole = 0;
      for (const v1::InstanceStatus& i : group.instances()) {
        whole += i.state() == "clean" || i.state() == "dirty" ? 1 : 0;
      }
      return whole == kEngines && group.instances_size() == kEngines;
    });
    if (!all) Violation("the instances did not come back");
    return all;
  }

  // Waits until the trainers' daemon has sent `bytes` since its start, or the update is over.
  void AwaitSent(int64_t bytes) {
    const auto deadline = Clock::now() + e2e::kDeadline;
    while (home().Resources().wire_bytes_sent() < bytes && Clock::now() < deadline) {
      const v1::UpdateStatus update = home().Group("g").update();
      if (update.version() == version_ && update.outcome() != v1::UPDATE_OUTCOME_RUNNING) return;
    }
  }

  // Whether the answer has the words "INSTANCE=WHAT".
  static bool Says(const std::string& answer, int node, const std::string& what) {
    return answer.find(fmt::format("i{}={}", node, what)) != std::string::npos;
  }

  // Judges what the engine believes that it holds; the engine compares its bytes meanwhile (P1,
  // P2).
  void Judge(int node, bool committed, bool killed) {
    const std::string belief = engine(node).Do(fmt::format("believe {}", killed ? 0 : version_));
    const std::string good = fmt::format("ok good {}", version_);
    const bool of_this = belief == good || belief == good + " gone";
    if (belief.rfind("ok", 0) != 0 || (committed && !killed && !of_this)) {
      return Violation(fmt::format("engine of n{}: {}", node, belief));
    }
    if (of_this && !committed) {
      Violation(fmt::format("engine of n{} believes in what it was left out of", node));
    }
  }

  void NoteHow(const std::string& log) {
    const std::string words = fmt::format("the update to version {} goes on from round ", version_);
    const size_t at = log.find(words);
    const bool later = at != std::string::npos && log.compare(at + words.size(), 2, "0 ") != 0;
    ++(later ? counts_.resumed : counts_.first);
  }

  void Violation(const std::string& what) {
    ++counts_.violations;
    Problem(what);
  }
  void Problem(const std::string& what) {
    if (++problems_ <= kShownProblems) fmt::print(stderr, "version {}: {}\n", version_, what);
  }

  std::mt19937_64 random_;
  std::vector<std::unique_ptr<e2e::Daemon>> daemons_;
  std::unique_ptr<e2e::MemberProcess> trainer_;
  std::vector<std::unique_ptr<e2e::MemberProcess>> engines_;
  int64_t version_ = 0;
  int problems_ = 0;
  Counts counts_;
};

void Print(Report* report, const Counts& c) {
  const auto count = [&](const std::string& name, int64_t value) {
    report->Add({name, static_cast<double>(value), "", 0, 0, 0, false});
  };
  count(fmt::format("{} updates, {} kills in the data: violations", c.updates, c.kills),
        c.violations);
  count("the same: updates lost to an engine node's death", c.lost);
  const auto told = [&](const std::string& name, double value, const std::string& unit) {
    report->Add({name, value, unit, 0, 0, 0, true});
  };
  told("the same: went on from a later round", static_cast<double>(c.resumed), "");
  told("the same: ran from the first round", static_cast<double>(c.first), "");
  told("kills that came after the commit, not counted", static_cast<double>(c.too_late), "");
  told("an update without a kill, median", Median(c.seconds) * 1e3, "ms");
  told("an update with a kill in its data, median", Median(c.seconds_killed) * 1e3, "ms");
}

int Main(int argc, char** argv) {
  CLI::App app("refits from which engine nodes' daemons are killed");
  int updates = 1'000;
  int kills_in = 2;
  uint64_t seed = 1;
  bool json = false;
  app.add_option("--updates", updates)->check(CLI::Range(1, 1'000'000));
  app.add_option("--kills-in", kills_in, "a daemon is killed in one of so many updates")
      ->check(CLI::Range(1, 1'000));
  app.add_option("--seed", seed, "of victims and moments");
  app.add_flag("--json", json, "one object a line");
  CLI11_PARSE(app, argc, argv);
  Report report("chaos", json);
  try {
    Chaos chaos(seed);
    for (int update = 0; update < updates; ++update)
      chaos.Update(update % kills_in == kills_in - 1);
    Print(&report, chaos.counts());
  } catch (const std::runtime_error& error) {
    fmt::print(stderr, "bench: {}\n", error.what());
    return 1;
  }
  return report.all_reached() ? 0 : 1;
}

}  // namespace
}  // namespace refitd::bench

int main(int argc, char** argv) { return refitd::bench::Main(argc, argv); }
