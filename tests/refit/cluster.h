// Daemons of one group without processes or sockets: the state machines, planners, executors, host
// transport and message conversion are real; links, wire and members are queues and memory of this
// process.
//
// Members answer at once and never fail. Every wait has a deadline (P4), after which Run returns
// false.
//
// Not thread-safe; copies run on the transport's threads.
#ifndef REFITD_TESTS_REFIT_CLUSTER_H_
#define REFITD_TESTS_REFIT_CLUSTER_H_

#include <cstdint>
#include <deque>
#include <functional>
#include <map>
#include <memory>
#include <optional>
#include <set>
#include <string>
#include <utility>
#include <vector>

#include "absl/status/status.h"
#include "daemon/execute/executor.h"
#include "daemon/group/coordinator.h"
#include "daemon/group/follower.h"
#include "transport/base/mutex.h"
#include "transport/host/host_transport.h"

namespace refitd::refit {

// One member and the region (number 1) that it shares.
struct Rank {
  int daemon = 0;
  bool engine = false;
  MemberId member;
  std::string label;
  std::shared_ptr<const Layout> layout;
  std::vector<char> memory;
  std::optional<Version> committed;
  int aborted = 0;
  bool dirty = false;  // as the last Aborted said
};

// The answer to a call.
struct Answer {
  bool came = false;
  absl::Status status;
  ReplyPayload payload;
};

class Cluster {
 public:
  // `protocols`: the versions that joined daemons agreed to, from daemon 1 on; the rest speak the
  // latest.
  Cluster(int daemons, GroupSpec spec, GroupLimits limits = {}, TransferFaults* faults = nullptr,
          const std::vector<Protocol>& protocols = {});
  ~Cluster();

  // Return the rank's number for the calls below. The layout's pieces lie in region 1; the memory
  // is as large as they need and filled with kPoison.
  int AddTrainer(int daemon, int rank, int world, Layout layout);
  int AddEngine(int daemon, const std::string& instance, int rank, int world, Layout layout);
  // Registers another layout, over new memory of its size.
  absl::Status Register(int rank, Layout layout);
  Rank& rank(int number) { return *ranks_[static_cast<size_t>(number)]; }

  // Answers come while Run runs.
  std::shared_ptr<Answer> Refit(int trainer, Version version, Verification verification,
                                int64_t bucket_count = 0);
  std::shared_ptr<Answer> Begin(int trainer, Version version, Verification verification);
  // Pushes one whole tensor of uint8 with these bytes.
  std::shared_ptr<Answer> Push(int trainer, Version version, int64_t seq, const TensorSpec& tensor,
                               std::vector<char> bytes);
  std::shared_ptr<Answer> Commit(int trainer, Version version, int64_t bucket_count);
  void Lose(int number);

  // Runs until nothing is left to do; false: that took more than a minute.
  bool Run();

  int compiled() const { return compiled_; }  // plans compiled
  int built() const { return built_; }        // node programs built
  int compared() const { return compared_; }  // comparisons of replicas, by daemon
  int64_t exchanged_bytes() const { return exchanged_bytes_; }
  int64_t sent_bytes(int daemon) const { return sent_bytes_.at(static_cast<size_t>(daemon)); }
  MachineView View() const;

  static constexpr char kPoison = '\x5a';

 private:
  struct Daemon;
  struct Exchange {
    std::map<uint32_t, StartExchange> posted;  // by rank of the epoch
  };
  struct Broadcast {
    std::map<uint32_t, StartWire> posted;
  };

  int Add(int daemon, bool engine, Layout layout, std::string label, const GroupEvent& attached,
          MemberId member);
  MemberId NextMember(int daemon);
  std::shared_ptr<Answer> Call(int trainer, GroupEvent event);
  void Post(std::function<void()> task);
  void Feed(int daemon, MachineEvent event);
  void Perform(int daemon, const MachineAction& action);
  Rank* RankOf(int daemon, MemberId member);

  template <typename Action>
  void On(int, const Action&) {}  // nothing to do
  void On(int daemon, const Reply& a);
  void On(int daemon, const SendPrepare& a);
  void On(int daemon, const SendCommitted& a);
  void On(int daemon, const SendAborted& a);
  void On(int daemon, const StartTransfer& a);
  void On(int daemon, const StartVerify& a);
  void On(int daemon, const PlanRefit& a);
  void On(int daemon, const ReleaseMember& a);
  void On(int daemon, const UpdateEnded& a);
  void On(int daemon, const SendCommand& a);
  void On(int daemon, const SendReport& a);
  void On(int daemon, const OpenEpoch& a);
  void On(int daemon, const ConnectEpoch& a);
  void On(int daemon, const CloseEpoch& a);
  void On(int daemon, const StartWire& a);
  void On(int daemon, const StartExchange& a);
  void On(int daemon, const BuildProgram& a);
  void On(int daemon, const StartMoves& a);
  void On(int daemon, const AcquireWire& a);

  const GroupSpec spec_;
  TimePoint now_{std::chrono::hours(1)};
  std::vector<std::unique_ptr<Daemon>> daemons_;
  std::vector<std::unique_ptr<Rank>> ranks_;
  uint64_t calls_ = 0;
  uint64_t updates_ = 0;
  std::map<uint64_t, Exchange> exchanges_;  // by seq; one epoch at a time
  std::map<uint64_t, Broadcast> broadcasts_;
  std::map<uint32_t, int> epoch_daemons_;  // rank -> daemon
  int compiled_ = 0;
  int built_ = 0;
  int compared_ = 0;
  int64_t exchanged_bytes_ = 0;
  std::vector<int64_t> sent_bytes_;  // over the wire, by daemon

  Mutex mutex_;
  CondVar posted_;
  std::deque<std::function<void()>> tasks_ ABSL_GUARDED_BY(mutex_);
  int jobs_ = 0;                          // the transport's unanswered jobs; used by this thread
  std::unique_ptr<Transport> transport_;  // destroyed first, when its jobs have ended
};

}  // namespace refitd::refit

#endif  // REFITD_TESTS_REFIT_CLUSTER_H_
