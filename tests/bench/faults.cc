#include "tests/bench/faults.h"

#include <signal.h>

#include <algorithm>
#include <chrono>
#include <cstdio>
#include <cstdlib>
#include <memory>
#include <stdexcept>
#include <string>
#include <thread>
#include <vector>

#include "fmt/format.h"
#include "tests/e2e/chaos.h"
#include "tests/e2e/harness.h"

namespace refitd::bench {
namespace {

using Clock = std::chrono::steady_clock;
using std::chrono::milliseconds;

constexpr int kKills = 25;           // kills of each member
constexpr int kRounds = 5;           // rounds of cases that take seconds
constexpr double kNoticeGoal = 100;  // ms
constexpr double kOverGoal = 1'000;
constexpr double kRecoveryGoal = 10'000;
// Limits of the daemons below, short enough that a round takes seconds.
constexpr milliseconds kLate{1'000};
constexpr milliseconds kSilence{1'000};
constexpr milliseconds kWire{3'000};
constexpr milliseconds kRetry{5};
const std::vector<int> kFirstBucket = {0, 1, 2, 3, 4, 5};
const std::vector<int> kSecondBucket = {6, 7, 8, 9, 10, 11, 12, 13, 14};

double MsSince(Clock::time_point start) {
  return std::chrono::duration<double, std::milli>(Clock::now() - start).count();
}

[[noreturn]] void Fail(const std::string& what) {
  fmt::print(stderr, "bench: {}\n", what);
  std::exit(1);
}
void Check(bool ok, const std::string& what) {
  if (!ok) Fail(what);
}
template <typename Outcome>
void CheckOk(const Outcome& outcome, const char* what) {
  Check(outcome.ok(), fmt::format("{}: {}", what, outcome.status.error_message()));
}
void Ask(e2e::MemberProcess* member, const std::string& command) {
  const std::string answer = member->Do(command);
  Check(answer.rfind("ok", 0) == 0, command + ": " + answer);
}

// Milliseconds from `start` until `condition` holds.
template <typename Condition>
double Until(Clock::time_point start, const char* what, Condition condition) {
  while (!condition()) {
    Check(MsSince(start) < 30'000, fmt::format("not {} within 30 s", what));
    std::this_thread::sleep_for(std::chrono::microseconds(500));
  }
  return MsSince(start);
}

void Add(Report* report, const std::string& name, const std::vector<double>& ms, double goal) {
  report->Add({name + ", median", Median(ms), "ms", 0, 0, goal, false});
  report->Add({fmt::format("the same, max of {}", ms.size()),
               *std::max_element(ms.begin(), ms.end()), "ms", 0, 0, goal, false});
}

v1::EngineHello Hello(const std::string& instance, const v1::GroupSpec& spec,
                      v1::Delivery delivery = v1::DELIVERY_IN_PLACE) {
  return e2e::RawEngine::Hello("g", instance, 0, 1, delivery, spec);
}

std::vector<std::string> Limits(const std::string& id) {
  const auto flag = [](const char* name, milliseconds limit) {
    return fmt::format("--{}={}", name, limit.count());
  };
  return {"--daemon-id=" + id,          flag("limits-ready-ms", kLate),
          flag("limits-ack-ms", kLate), flag("peers-silence-ms", kSilence),
          flag("peers-wire-ms", kWire), "--log-level=error"};
}

// ---- killed members ----

void BenchKilledEngine(Report* report, const e2e::Model& model) {
  const v1::GroupSpec spec = e2e::Spec();
  e2e::Daemon daemon;
  e2e::Holder survivor(daemon.Connect(), Hello("survivor", spec), e2e::HoldWhole(model));
  e2e::RawTrainer trainer(daemon.Connect(), e2e::RawTrainer::Hello("g", spec));
  Check(trainer.attached().ok(), "attaching the trainer");
  std::vector<double> ms;
  for (int64_t version = 1; version <= kKills; ++version) {
    e2e::MemberProcess victim(daemon, "engine", {"instance=victim", "auto=1"});
    Ask(&victim, "attach");
    const std::vector<std::string> bytes = e2e::BytesOf(model, version);
    CheckOk(trainer.Begin(version), "Begin");
    CheckOk(trainer.Push(version, e2e::InlineBucket(model, bytes, 0, true, kFirstBucket)), "push");
    const auto start = Clock::now();
    victim.Signal(SIGKILL);
    ms.push_back(
        Until(start, "noticed", [&] { return daemon.InstanceState("g", "victim").empty(); }));
    CheckOk(trainer.Push(version, e2e::InlineBucket(model, bytes, 1, true, kSecondBucket)), "push");
    CheckOk(trainer.Commit(version, 2), "Commit");
  }
  Add(report, "engine killed, until status says so", ms, kNoticeGoal);
}

void BenchKilledTrainer(Report* report, const e2e::Model& model) {
  e2e::Daemon daemon;
  e2e::Holder engine(daemon.Connect(), Hello("i", e2e::Spec()), e2e::HoldWhole(model));
  std::vector<double> ms;
  for (int64_t version = 1; version <= kKills; ++version) {
    e2e::MemberProcess victim(daemon, "trainer", {});
    Ask(&victim, "attach");
    Ask(&victim, fmt::format("begin {}", version));
    Ask(&victim, fmt::format("push {} 0 0 6", version));
    const auto start = Clock::now();
    victim.Signal(SIGKILL);
    ms.push_back(Until(start, "noticed", [&] { return daemon.Group("g").trainers() == 0; }));
    Until(start, "over", [&] { return daemon.Group("g").update().state() == "aborted"; });
  }
  Add(report, "trainer killed, until status says so", ms, kNoticeGoal);
}

// ---- a hung engine ----

// `loader`: the engine hangs with a part to acknowledge; else with Prepare to answer.
void BenchHungEngine(Report* report, const e2e::Model& model, bool loader) {
  const v1::GroupSpec spec = e2e::Spec();
  e2e::Daemon daemon(Limits("alone"));
  e2e::MemberProcess victim(
      daemon, "engine",
      {"instance=victim", "auto=1", loader ? "delivery=loader" : "delivery=in_place"});
  Ask(&victim, "attach");
  e2e::RawTrainer trainer(daemon.Connect(), e2e::RawTrainer::Hello("g", spec));
  Check(trainer.attached().ok(), "attaching the trainer");
  std::vector<double> over;
  for (int64_t version = 1; version <= kRounds; ++version) {
    if (loader) CheckOk(trainer.Begin(version), "Begin");
    victim.Signal(SIGSTOP);
    const auto start = Clock::now();
    grpc::Status status;
    if (loader) {
      status =
          trainer.Push(version, e2e::InlineBucket(model, e2e::BytesOf(model, version), 0, true))
              .status;
      if (status.ok()) status = trainer.Commit(version, 1).status;
    } else {
      status = trainer.Begin(version).status;
    }
    over.push_back(MsSince(start) - static_cast<double>(kLate.count()));
    victim.Signal(SIGCONT);
    Check(!status.ok(), "a hung engine was waited for by nobody");
    Until(start, "over", [&] { return daemon.Group("g").update().state() == "aborted"; });
  }
  Add(report,
      loader ? "engine hung with a part, call's end beyond `ack`"
             : "engine hung before Ready, call's end beyond `ready`",
      over, kOverGoal);
}

// ---- daemons ----

// A trainer and an engine at "alpha", which coordinates, and another engine at "beta".
class Pair {
 public:
  explicit Pair(const e2e::Model& model)
      : model_(model), spec_(e2e::Spec(1, 1)), alpha_(AlphaFlags()), beta_(Limits("beta")) {
    Recover(Clock::now());
  }
  e2e::Daemon& alpha() { return alpha_; }
  e2e::Daemon& beta() { return beta_; }

  // Begins the next version and pushes its first bucket.
  void Open() {
    ++version_;
    bytes_ = e2e::BytesOf(model_, version_);
    CheckOk(trainer_->Begin(version_), "Begin");
    CheckOk(Push(0), "push");
  }
  // Does the rest; returns the error that ends the update.
  grpc::Status Finish() {
    grpc::Status status = Push(1).status;
    if (status.ok()) status = trainer_->Commit(version_, 2).status;
    return status;
  }
  // Repeats until both engines have committed a version; members whose leases ended attach again.
  // Returns the milliseconds since `start`.
  double Recover(Clock::time_point start) {
    while (!Attach() || !Install()) {
      Check(MsSince(start) < 30'000, "no update committed within 30 s");
      std::this_thread::sleep_for(kRetry);
    }
    return MsSince(start);
  }

 private:
  static std::vector<std::string> AlphaFlags() {
    std::vector<std::string> flags = Limits("alpha");
    flags.push_back("--listen-tcp=" + e2e::OwnLoopback(0) + ":0");
    return flags;
  }
  template <typename Member>
  static bool Stands(const std::unique_ptr<Member>& member) {
    return member != nullptr && !member->events().ended();
  }
  bool AttachEngine(std::unique_ptr<e2e::Holder>* holder, const e2e::Daemon& at,
                    v1::EngineHello hello) {
    if (*holder != nullptr && !(*holder)->engine().events().ended()) return true;
    holder->reset();
    if (&at != &alpha_) hello.set_coordinator(alpha_.address());
    try {
      *holder = std::make_unique<e2e::Holder>(at.Connect(), hello, e2e::HoldWhole(model_));
    } catch (const std::runtime_error&) {
      return false;  // refused for now
    }
    return true;
  }
  bool Attach() {
    if (!AttachEngine(&near_, alpha_, Hello("near", spec_))) return false;
    if (!AttachEngine(&far_, beta_, Hello("far", spec_))) return false;
    if (Stands(trainer_)) return true;
    trainer_ =
        std::make_unique<e2e::RawTrainer>(alpha_.Connect(), e2e::RawTrainer::Hello("g", spec_));
    return trainer_->attached().ok();
  }
  bool Install() {
    ++version_;
    bytes_ = e2e::BytesOf(model_, version_);
    const auto begun = trainer_->Begin(version_);
    if (!begun.ok()) return false;
    if (begun.response.instances() < 2) {
      trainer_->Abort(version_, "an engine is missing");
      return false;
    }
    if (!Push(0).ok() || !Push(1).ok()) return false;
    const auto committed = trainer_->Commit(version_, 2);
    int instances = 0;
    for (const auto& i : committed.response.instances()) instances += i.committed() ? 1 : 0;
    return committed.ok() && instances == 2;
  }
  e2e::Outcome<v1::PushBucketResponse> Push(int64_t seq) {
    return trainer_->Push(version_, e2e::InlineBucket(model_, bytes_, seq, true,
                                                      seq == 0 ? kFirstBucket : kSecondBucket));
  }

  const e2e::Model model_;
  const v1::GroupSpec spec_;
  e2e::Daemon alpha_;
  e2e::Daemon beta_;
  int64_t version_ = 0;
  std::vector<std::string> bytes_;
  std::unique_ptr<e2e::Holder> near_;
  std::unique_ptr<e2e::Holder> far_;
  std::unique_ptr<e2e::RawTrainer> trainer_;
};

void BenchDaemons(Report* report, const e2e::Model& model) {
  Pair pair(model);
  std::vector<double> over;
  std::vector<double> continued;
  std::vector<double> restarted;
  std::vector<double> coordinator;
  for (int round = 0; round < kRounds; ++round) {
    pair.Open();
    auto start = Clock::now();
    pair.beta().Signal(SIGSTOP);
    Check(!pair.Finish().ok(), "an update went on without the daemon that had its data");
    over.push_back(MsSince(start) - static_cast<double>(kSilence.count()));
    start = Clock::now();
    pair.beta().Signal(SIGCONT);
    continued.push_back(pair.Recover(start));

    pair.Open();
    pair.beta().Kill();
    Check(!pair.Finish().ok(), "an update went on without the daemon that had its data");
    start = Clock::now();
    pair.beta().Restart();
    restarted.push_back(pair.Recover(start));

    pair.Open();
    pair.alpha().Kill();
    Check(!pair.Finish().ok(), "an update went on without its coordinator");
    start = Clock::now();
    pair.alpha().Restart();
    coordinator.push_back(pair.Recover(start));
  }
  Add(report, "far daemon hung, call's end beyond its silence", over, kOverGoal);
  Add(report, "far daemon continued, until the next commit", continued, kRecoveryGoal);
  Add(report, "far daemon started anew, until the next commit", restarted, kRecoveryGoal);
  Add(report, "coordinator started anew, until the next commit", coordinator, kRecoveryGoal);
}

}  // namespace

void BenchChaos(Report* report, uint64_t seed, int rounds) {
  const e2e::ChaosCounts counts = e2e::Chaos(seed, rounds);
  for (const std::string& detail : counts.details) fmt::print(stderr, "{}\n", detail);
  const auto count = [&](const std::string& name, int64_t value, double goal) {
    report->Add({name, static_cast<double>(value), "", 0, 0, goal, false});
  };
  count(fmt::format("{} updates, {} kills, {} stops: violations", counts.updates, counts.kills,
                    counts.stops),
        counts.violations, 0);
  count("the same: leaks", counts.leaks, 0);
  // At least one after each fault.
  report->Add({"the same: committed, against faults", static_cast<double>(counts.committed), "",
               static_cast<double>(rounds),
               static_cast<double>(counts.committed) / static_cast<double>(rounds), 1, true});
  report->Add({"the same: aborted", static_cast<double>(counts.aborted), "", 0, 0, 0, true});
}

void BenchFaults(Report* report) {
  const e2e::Model model = e2e::MixedModel();
  BenchKilledEngine(report, model);
  BenchKilledTrainer(report, model);
  BenchHungEngine(report, model, false);
  BenchHungEngine(report, model, true);
  BenchDaemons(report, model);
}

}  // namespace refitd::bench
