#include "tests/e2e/chaos.h"

#include <fmt/format.h>
#include <signal.h>

#include <algorithm>
#include <random>
#include <stdexcept>
#include <thread>

#include "refitd/v1/trainer.grpc.pb.h"

namespace refitd::e2e {
namespace {

using std::chrono::milliseconds;

// Short limits, but longer than a busy machine delays a live process. The longest wait of a call is
// the sum of a few of them.
constexpr milliseconds kSilence{1000};
constexpr milliseconds kWire{2000};
constexpr milliseconds kReady{2500};
constexpr milliseconds kAck{2500};
constexpr milliseconds kIdle{3500};
// How long a call may take: until the fault is noticed, then the limits of the data plane and of
// the slowest rank, clean-up, and room for a busy machine.
constexpr milliseconds kCallBound = kSilence + kWire + kReady + kIdle + milliseconds(2000);
constexpr milliseconds kRecoveryBound{10'000};
// gRPC's own descriptors and threads come and go with load; a leak of one for each fault would be
// more.
constexpr int64_t kSpareDescriptors = 16;
constexpr int64_t kSpareThreads = 10;
constexpr int kTensorsInFirst = 6;
constexpr int kTensors = 15;  // the number of tensors of MixedModel()

std::vector<std::string> Flags(const std::string& id, const std::string& host) {
  const auto flag = [](const char* name, milliseconds limit) {
    return fmt::format("--{}={}", name, limit.count());
  };
  return {"--daemon-id=" + id,
          "--listen-tcp=" + host + ":0",
          flag("peers-silence-ms", kSilence),
          flag("peers-wire-ms", kWire),
          flag("limits-ready-ms", kReady),
          flag("limits-ack-ms", kAck),
          flag("limits-idle-ms", kIdle)};
}

bool IsOk(const std::string& answer) { return answer.rfind("ok", 0) == 0; }

}  // namespace

std::string NameOf(Victim victim) {
  switch (victim) {
    case Victim::kTrainer:
      return "trainer";
    case Victim::kFarEngine:
      return "far engine";
    case Victim::kNearEngine:
      return "near engine";
    case Victim::kSource:
      return "source daemon";
    case Victim::kSink:
      return "sink daemon";
    case Victim::kCoordinator:
      return "coordinator";
  }
  return "";
}

std::string NameOf(Fault fault) { return fault == Fault::kKill ? "killed" : "stopped"; }

std::string NameOf(Phase phase) {
  switch (phase) {
    case Phase::kPrepare:
      return "before Ready";
    case Phase::kData:
      return "with a bucket out";
    case Phase::kDecide:
      return "after Commit was sent";
    case Phase::kAnytime:
      return "at any time";
  }
  return "";
}

Cluster::Cluster(int loopback_index) {
  const char* const ids[kDaemons] = {"home", "source", "sink"};
  for (int i = 0; i < kDaemons; ++i) {
    daemons_.push_back(
        std::make_unique<Daemon>(Flags(ids[i], OwnLoopback(loopback_index * kDaemons + i))));
  }
  seats_.resize(kSeats);
  seat(kTrainerSeat) = {"trainer", "trainer", kSourceAt, {}, nullptr};
  const auto engine = [](const std::string& name, int at, const std::string& delivery) {
    return Seat{
        name, "engine", at, {"instance=" + name, "delivery=" + delivery, "auto=1"}, nullptr};
  };
  seat(kHome) = engine("home", kCoordinatorAt, "in_place");
  seat(kNear) = engine("near", kSourceAt, "in_place");
  seat(kFar) = engine("far", kSinkAt, "loader");
  seat(kTwin) = engine("twin", kSinkAt, "in_place");
  Recover(Clock::now());
  for (int i = 0; i < kDaemons; ++i) baseline_[i] = daemon(i).Resources();
  if (!problems_.empty()) {
    throw std::runtime_error("the group was not brought up: " + problems_.front());
  }
}

void Cluster::Violation(const std::string& what) {
  ++counts_.violations;
  problems_.push_back(what);
  counts_.details.push_back(current_ + ": " + what);
}

void Cluster::Leak(const std::string& what) {
  ++counts_.leaks;
  problems_.push_back("left: " + what);
  counts_.details.push_back(current_ + ": left: " + what);
}

// ---- the fault ----

void Cluster::Strike(const Case& fault) {
  const auto member = [&](int at) {
    Seat& victim = seat(at);
    if (victim.process == nullptr) return;
    if (fault.fault == Fault::kKill) {
      victim.process->Kill();
    } else {
      victim.process->Signal(SIGSTOP);
    }
  };
  const auto daemon_at = [&](int at) {
    if (fault.fault == Fault::kKill) {
      daemon(at).Kill();
    } else {
      daemon(at).Signal(SIGSTOP);
    }
  };
  switch (fault.victim) {
    case Victim::kTrainer:
      return member(kTrainerSeat);
    case Victim::kFarEngine:
      return member(kFar);
    case Victim::kNearEngine:
      return member(kNear);
    case Victim::kSource:
      return daemon_at(kSourceAt);
    case Victim::kSink:
      return daemon_at(kSinkAt);
    case Victim::kCoordinator:
      return daemon_at(kCoordinatorAt);
  }
}

void Cluster::EndFault(const Case& fault) {
  if (std::exchange(fault_over_, true)) return;
  if (fault.fault == Fault::kStop) {
    for (Seat& s : seats_) {
      if (s.process != nullptr) s.process->Signal(SIGCONT);
    }
    for (const auto& d : daemons_) d->Signal(SIGCONT);
    return;
  }
  switch (fault.victim) {
    case Victim::kTrainer:
      seat(kTrainerSeat).process.reset();
      return;
    case Victim::kFarEngine:
      seat(kFar).process.reset();
      return;
    case Victim::kNearEngine:
      seat(kNear).process.reset();
      return;
    case Victim::kSource:
      return daemon(kSourceAt).Restart();
    case Victim::kSink:
      return daemon(kSinkAt).Restart();
    case Victim::kCoordinator:
      return daemon(kCoordinatorAt).Restart();
  }
}

void Cluster::AwaitNoticed(const Case& fault) {
  const auto nodes = [this] { return daemon(kCoordinatorAt).Group("g").nodes_size(); };
  bool noticed = true;
  switch (fault.victim) {
    case Victim::kSource:
    case Victim::kSink:
      noticed = Eventually([&] { return nodes() < kDaemons; });
      break;
    case Victim::kCoordinator:
      noticed = Eventually([&] { return daemon(kSourceAt).Status().groups_size() == 0; });
      break;
    case Victim::kTrainer:
      if (fault.fault == Fault::kKill) {
        noticed = Eventually([&] { return daemon(kCoordinatorAt).Group("g").trainers() == 0; });
      }
      break;
    case Victim::kFarEngine:
    case Victim::kNearEngine:
      break;  // the update itself finds a killed engine missing and a stopped one late
  }
  if (!noticed) Violation("the loss was not noticed");
}

// ---- an update ----

std::string Cluster::Answer(const char* what) {
  const auto since = Clock::now();
  const std::string answer = seat(kTrainerSeat).process->Answer();
  const auto took = std::chrono::duration_cast<milliseconds>(Clock::now() - since);
  if (took > kCallBound) {
    Violation(fmt::format("{} ended after {} ms: {}", what, took.count(), answer));
  }
  return answer;
}

// Waits until the update is in its phase, strikes, and lets everything go on that can.
void Cluster::Hold(int64_t version, const Case& fault, bool commit_is_out) {
  MemberProcess& holder = *seat(holder_).process;
  const bool prepare = fault.phase == Phase::kPrepare;
  const std::string there =
      holder.Do(fmt::format("await {} {}", prepare ? "prepare" : "part", version));
  if (!IsOk(there)) Violation(seat(holder_).name + ": " + there);
  if (commit_is_out) {
    const bool settling = Eventually(
        [&] { return daemon(kCoordinatorAt).Group("g").update().state() == "settling"; });
    if (!settling) Violation("Commit did not arrive");
  }
  fault_over_ = false;
  Strike(fault);
  AwaitNoticed(fault);
  const bool holder_struck = (holder_ == kFar && fault.victim == Victim::kFarEngine) ||
                             (holder_ == kNear && fault.victim == Victim::kNearEngine);
  if (!holder_struck) holder.Do("release");
  if (fault.fault == Fault::kKill) return;
  if (fault.victim == Victim::kTrainer) {
    // A stopped trainer says nothing: the update ends without it.
    const bool ended = Eventually([&] {
      const std::string state = daemon(kCoordinatorAt).Group("g").update().state();
      return state == "committed" || state == "aborted";
    });
    if (!ended) Violation("the update did not end");
    EndFault(fault);
  } else if (fault.victim == Victim::kSource) {
    EndFault(fault);  // no other daemon may answer the trainer
  }
}

Cluster::Outcome Cluster::Update(int64_t version, const Case* fault) {
  Outcome outcome;
  ++counts_.updates;
  MemberProcess& trainer = *seat(kTrainerSeat).process;
  const auto at = [fault](Phase phase) { return fault != nullptr && fault->phase == phase; };
  const bool trainer_dies =
      fault != nullptr && fault->victim == Victim::kTrainer && fault->fault == Fault::kKill;
  const bool held = fault != nullptr && fault->phase != Phase::kAnytime;
  if (held) {
    holder_ = at(Phase::kPrepare) && fault->victim == Victim::kNearEngine ? kNear : kFar;
    seat(holder_).process->Do(at(Phase::kPrepare) ? "hold ready" : "hold ack");
  }
  std::thread striker;
  if (at(Phase::kAnytime)) {
    fault_over_ = false;
    striker = std::thread([this, fault] {
      std::this_thread::sleep_for(fault->delay);
      Strike(*fault);
      if (fault->fault != Fault::kStop) return;
      // Sometimes long enough that the stop is noticed, sometimes not.
      std::this_thread::sleep_for(fault->delay.count() % 2 == 0 ? kSilence * 2 : kSilence / 4);
      for (Seat& s : seats_) s.process->Signal(SIGCONT);
      for (const auto& d : daemons_) d->Signal(SIGCONT);
    });
  }
  // Runs the update phase by phase; false: the update is over.
  const auto step = [&](const std::string& command, const char* what) {
    outcome.last_answer = (trainer.Send(command), Answer(what));
    return IsOk(outcome.last_answer);
  };
  const auto run = [&] {
    trainer.Send(fmt::format("begin {}", version));
    if (at(Phase::kPrepare)) Hold(version, *fault, false);
    outcome.last_answer = Answer("Begin");
    if (!IsOk(outcome.last_answer)) return false;
    if (!step(fmt::format("push {} 0 0 {}", version, kTensorsInFirst), "PushBucket")) return false;
    if (at(Phase::kData)) Hold(version, *fault, false);
    if (!step(fmt::format("push {} 1 {} {}", version, kTensorsInFirst, kTensors - kTensorsInFirst),
              "PushBucket")) {
      return false;
    }
    trainer.Send(fmt::format("commit {} 2", version));
    if (at(Phase::kDecide)) Hold(version, *fault, true);
    outcome.last_answer = Answer("Commit");
    return IsOk(outcome.last_answer);
  };
  const bool committed = run();
  if (striker.joinable()) striker.join();
  if (fault != nullptr) {
    EndFault(*fault);
    // The holder answers now, even if it could not hear the end.
    if (held && seat(holder_).process != nullptr) seat(holder_).process->Do("release");
  }
  if (committed) {
    outcome.known = outcome.committed = true;
  } else if (!trainer_dies && outcome.last_answer.empty()) {
    Violation("a call did not end");
  }
  if (!outcome.known) AskOutcome(version, &outcome);
  ++(outcome.committed ? counts_.committed : counts_.aborted);
  if (outcome.committed) committed_.push_back(version);
  return outcome;
}

// Asks by GetUpdate once the update is over.
void Cluster::AskOutcome(int64_t version, Outcome* outcome) {
  const auto stub = v1::Trainer::NewStub(daemon(kCoordinatorAt).Connect());
  const bool over = Eventually([&] {
    const v1::GroupStatus group = daemon(kCoordinatorAt).Group("g");
    const std::string& state = group.update().state();
    return group.name().empty() || state.empty() || state == "committed" || state == "aborted";
  });
  if (!over) Violation("the update did not end");
  grpc::ClientContext context;
  context.set_deadline(std::chrono::system_clock::now() + kDeadline);
  v1::GetUpdateRequest request;
  request.set_group("g");
  request.set_version(version);
  v1::GetUpdateResponse response;
  const grpc::Status status = stub->GetUpdate(&context, request, &response);
  // A restarted coordinator does not know the update.
  if (!status.ok() || response.outcome() == v1::UPDATE_OUTCOME_UNKNOWN) return;
  outcome->known = true;
  outcome->committed = response.outcome() == v1::UPDATE_OUTCOME_COMMITTED;
}

// ---- the judgement ----

void Cluster::Judge(int64_t version, const Outcome& outcome) {
  for (int at = kHome; at < kSeats; ++at) {
    Seat& s = seat(at);
    if (s.process == nullptr) continue;
    const std::string belief = s.process->Do("believe 0");
    const std::string who = fmt::format("engine {}", s.name);
    if (!IsOk(belief)) {
      Violation(who + ": " + belief);
      continue;
    }
    if (belief.rfind("ok good ", 0) != 0) continue;
    const int64_t believed = std::stoll(belief.substr(8));
    const bool may =
        believed == 0 ||
        std::find(committed_.begin(), committed_.end(), believed) != committed_.end() ||
        (believed == version && !outcome.known);
    if (!may) Violation(fmt::format("{} believes in version {}, which was aborted", who, believed));
  }
}

void Cluster::CheckCulprit(const Case& fault, const Outcome& outcome) {
  // A call to a killed daemon is ended by its socket, with a message that names no culprit.
  const bool silent = fault.victim == Victim::kSource && fault.fault == Fault::kKill;
  if (outcome.committed || outcome.last_answer.empty() || silent) return;
  if (fault.phase == Phase::kAnytime) return;  // the fault may have hit the update's start or end
  std::string culprit;
  switch (fault.victim) {
    case Victim::kTrainer:
      culprit = "trainer rank 0";
      break;
    case Victim::kFarEngine:
      culprit = "engine far rank 0";
      break;
    case Victim::kNearEngine:
      culprit = "engine near rank 0";
      break;
    case Victim::kSink:
      culprit = "daemon sink";
      break;
    // A source that goes on after a stop has lost its link, and names the coordinator.
    case Victim::kSource:
    case Victim::kCoordinator:
      culprit = "coordinator at " + daemon(kCoordinatorAt).address();
      break;
  }
  std::string said = outcome.last_answer;
  // If the lease ended between two calls, its end names the culprit.
  if (said.find("no such lease") != std::string::npos) said = seat(kTrainerSeat).process->Do("end");
  if (said.find(culprit) == std::string::npos) {
    Violation(fmt::format("\"{}\" does not name {}", said, culprit));
  }
}

bool Cluster::AttachMissing() {
  for (Seat& s : seats_) {
    if (s.process != nullptr && IsOk(s.process->Do("alive"))) continue;
    std::vector<std::string> settings = s.settings;
    // Any member may be the first to attach, so each carries the group's sizes.
    settings.push_back("slot_bytes=16384");
    settings.push_back("slots=4");
    if (s.daemon != kCoordinatorAt) {
      settings.push_back("coordinator=" + daemon(kCoordinatorAt).address());
    }
    s.process = std::make_unique<MemberProcess>(daemon(s.daemon), s.role, settings);
    if (!IsOk(s.process->Do("attach"))) {
      s.process.reset();
      return false;
    }
  }
  return true;
}

// Tries until a whole update commits on all engines. Members of a stopped daemon may learn only now
// that they were given up.
void Cluster::Recover(Clock::time_point since) {
  std::string why;
  const auto deadline = since + kRecoveryBound;
  for (int64_t attempt = 0;; ++attempt) {
    if (attempt > 0 && Clock::now() >= deadline) {
      Violation(fmt::format("no update committed within {} ms: {}", kRecoveryBound.count(), why));
      return;
    }
    if (!AttachMissing()) {
      why = "a member was refused";
      continue;
    }
    const v1::GroupStatus group = daemon(kCoordinatorAt).Group("g");
    // A killed member may still be counted.
    const auto complete = std::count_if(
        group.instances().begin(), group.instances().end(),
        [](const v1::InstanceStatus& i) { return i.state() == "clean" || i.state() == "dirty"; });
    if (complete != kSeats - 1 || group.trainers() != 1) {
      why = fmt::format("{} complete instances, {} trainers", complete, group.trainers());
      continue;
    }
    const int64_t version = ++version_;
    const Outcome outcome = Update(version, nullptr);
    if (!outcome.committed) {
      why = outcome.last_answer;
      Judge(version, outcome);
      continue;
    }
    bool all = true;
    for (int at = kHome; at < kSeats; ++at) {
      Seat& s = seat(at);
      if (s.process == nullptr || !IsOk(s.process->Do("alive"))) {
        all = false;
        why = s.name + " lost its lease";
        continue;
      }
      const std::string belief = s.process->Do(fmt::format("believe {}", version));
      if (!IsOk(belief)) Violation(fmt::format("engine {}: {}", s.name, belief));
      if (belief != fmt::format("ok good {}", version)) {
        all = false;
        why = fmt::format("engine {} took no part: {}", s.name, belief);
      }
    }
    if (all) return;
  }
}

void Cluster::CheckNothingLeft() {
  struct Expected {
    int members;
    int regions;
  };
  constexpr Expected kExpected[kDaemons] = {{1, 1}, {2, 2}, {2, 1}};
  std::string left;
  const bool nothing = Eventually([&] {
    left.clear();
    const auto check = [&left](const std::string& what, int64_t is, int64_t may) {
      if (is != may) left += fmt::format("{}: {} instead of {}; ", what, is, may);
    };
    const auto bound = [&left](const std::string& what, int64_t is, int64_t may) {
      if (is > may) left += fmt::format("{}: {}, more than {}; ", what, is, may);
    };
    for (int i = 0; i < kDaemons; ++i) {
      const v1::GetStatusResponse status = daemon(i).Status();
      const v1::ResourceStatus& now = status.resources();
      const std::string who = status.daemon_id() + "'s ";
      check(who + "members", now.members(), kExpected[i].members);
      check(who + "regions", now.regions(), kExpected[i].regions);
      // One more mapping is the staging pool.
      bound(who + "mappings", daemon(i).MemfdMappings(), kExpected[i].regions + 1);
      check(who + "groups", status.groups_size(), 1);
      if (const auto before = baseline_.find(i); before != baseline_.end()) {
        bound(who + "descriptors", now.descriptors(),
              before->second.descriptors() + kSpareDescriptors);
        bound(who + "threads", now.threads(), before->second.threads() + kSpareThreads);
      }
    }
    const v1::GroupStatus group = daemon(kCoordinatorAt).Group("g");
    check("nodes", group.nodes_size(), kDaemons);
    check("instances", group.instances_size(), kSeats - 1);
    for (const v1::SlotStatus& slot : group.slots()) {
      if (slot.state() != "free") left += fmt::format("slot {} {}; ", slot.slot(), slot.state());
    }
    return left.empty();
  });
  if (!nothing) Leak(left);
}

std::vector<std::string> Cluster::Run(const Case& fault, std::optional<bool> expect_commit) {
  problems_.clear();
  current_ =
      fmt::format("{} {} {}", NameOf(fault.victim), NameOf(fault.fault), NameOf(fault.phase));
  ++(fault.fault == Fault::kKill ? counts_.kills : counts_.stops);
  const int64_t version = ++version_;
  const Outcome outcome = Update(version, &fault);
  const auto over = Clock::now();
  if (expect_commit.has_value() && *expect_commit != outcome.committed) {
    Violation(fmt::format("the update was {}: {}",
                          outcome.committed ? "committed" : "not committed", outcome.last_answer));
  }
  CheckCulprit(fault, outcome);
  Judge(version, outcome);
  Recover(over);
  CheckNothingLeft();
  return problems_;
}

ChaosCounts Chaos(uint64_t seed, int rounds, int loopback_index) {
  std::mt19937_64 random(seed);
  const auto below = [&random](uint64_t n) { return random() % n; };
  Cluster cluster(loopback_index);
  for (int round = 0; round < rounds; ++round) {
    Case fault{};
    fault.victim = static_cast<Victim>(below(6));
    // Stops take long, since they are waited out, so most faults are kills.
    fault.fault = below(5) == 0 ? Fault::kStop : Fault::kKill;
    fault.phase = below(2) == 0 ? Phase::kAnytime : static_cast<Phase>(below(3));
    fault.delay = std::chrono::microseconds(below(30'000));
    cluster.Run(fault);
  }
  return cluster.counts();
}

}  // namespace refitd::e2e
