// A group over three daemons of real processes, with faults: one member or daemon is killed or
// stopped in any phase of an update, and then all answers and all weights are judged.
//
//   coordinator: engine "home"    source: trainer, engine "near"    sink: engines "far", "twin"
//
// "far" takes loader delivery, the other engines registered. A fault is judged by these promises:
//   P1, P2  an engine that believes in a version holds exactly its bytes; no engine believes in a
//           version that was not committed; an engine that was told committed believes in it
//   P4      every call ends within kCallBound, and a call that the fault ended names the victim
//   -       the next update commits on all engines within kRecoveryBound of the fault's end
//   P8      nothing is left in the daemons: members, regions, mappings, slots, nodes
// Not thread-safe; several clusters may exist at once.
#ifndef REFITD_TESTS_E2E_CHAOS_H_
#define REFITD_TESTS_E2E_CHAOS_H_

#include <chrono>
#include <cstdint>
#include <map>
#include <memory>
#include <optional>
#include <string>
#include <vector>

#include "tests/e2e/harness.h"

namespace refitd::e2e {

enum class Victim { kTrainer, kFarEngine, kNearEngine, kSource, kSink, kCoordinator };
enum class Fault { kKill, kStop };
enum class Phase {
  kPrepare,  // an engine has not answered Ready
  kData,     // the first bucket is out, and a part of it is unacknowledged
  kDecide,   // all buckets and Commit are out, and a part is unacknowledged
  kAnytime,  // the fault comes at any moment of the update
};
std::string NameOf(Victim victim);
std::string NameOf(Fault fault);
std::string NameOf(Phase phase);

struct Case {
  Victim victim;
  Fault fault;
  Phase phase;
  std::chrono::microseconds delay{0};  // kAnytime: how long after the update's start it strikes
};

struct ChaosCounts {
  int64_t updates = 0;  // updates that were begun
  int64_t committed = 0;
  int64_t aborted = 0;
  int64_t kills = 0;
  int64_t stops = 0;
  int64_t violations = 0;
  int64_t leaks = 0;
  std::vector<std::string> details;  // violations and leaks in words
};

class Cluster {
 public:
  // Attaches all members and commits one version. Throws std::runtime_error if that fails.
  explicit Cluster(int loopback_index = 0);

  // Runs one update with the fault in it, judges it, and recovers. Empty: all promises were kept.
  // `expect_commit`: whether the update must commit or abort; absent: either.
  std::vector<std::string> Run(const Case& fault, std::optional<bool> expect_commit = std::nullopt);
  const ChaosCounts& counts() const { return counts_; }

 private:
  struct Seat {
    std::string name;
    std::string role;
    int daemon = 0;
    std::vector<std::string> settings;
    std::unique_ptr<MemberProcess> process;  // null while the member is dead
  };
  enum : int { kCoordinatorAt, kSourceAt, kSinkAt, kDaemons };
  enum : int { kTrainerSeat, kHome, kNear, kFar, kTwin, kSeats };
  using Clock = std::chrono::steady_clock;

  struct Outcome {
    bool known = false;  // a member or daemon that knows how the update ended has said so
    bool committed = false;
    std::string last_answer;  // the last answer to the trainer
  };

  Daemon& daemon(int i) { return *daemons_[static_cast<size_t>(i)]; }
  Seat& seat(int i) { return seats_[static_cast<size_t>(i)]; }
  void Strike(const Case& fault);
  // Lets everything run again; daemons that died are restarted.
  void EndFault(const Case& fault);
  // Waits until the daemons and members that must go on know of the loss.
  void AwaitNoticed(const Case& fault);
  // Runs an update, which must commit if `fault` is null.
  Outcome Update(int64_t version, const Case* fault);
  void Hold(int64_t version, const Case& fault, bool commit_is_out);
  std::string Answer(const char* what);
  void AskOutcome(int64_t version, Outcome* outcome);
  void Judge(int64_t version, const Outcome& outcome);
  void CheckCulprit(const Case& fault, const Outcome& outcome);
  void Recover(Clock::time_point since);
  bool AttachMissing();
  void CheckNothingLeft();
  void Violation(const std::string& what);
  void Leak(const std::string& what);

  std::vector<std::unique_ptr<Daemon>> daemons_;
  std::vector<Seat> seats_;
  int64_t version_ = 0;
  std::vector<int64_t> committed_;  // versions that engines may believe in
  int holder_ = kFar;               // the seat that keeps an update in its phase
  bool fault_over_ = true;
  std::map<int, v1::ResourceStatus> baseline_;  // the resources of each daemon
  std::string current_;                         // names the running case
  ChaosCounts counts_;
  std::vector<std::string> problems_;  // what this Run found
};

// `rounds` faults by this seed: each one update with a fault and one that must commit after it.
ChaosCounts Chaos(uint64_t seed, int rounds, int loopback_index = 0);

}  // namespace refitd::e2e

#endif  // REFITD_TESTS_E2E_CHAOS_H_
