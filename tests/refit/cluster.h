// The daemons of one group, in this process. Each daemon is whole (daemon/node/parts_test_util.h),
// with links, a wire of sockets and the host transport. Members attach by calls and share memory by
// descriptor. Engine ranks are ready at once and never fail.
//
// Every wait has a deadline (P4). Not thread-safe.
#ifndef REFITD_TESTS_REFIT_CLUSTER_H_
#define REFITD_TESTS_REFIT_CLUSTER_H_

#include <cstdint>
#include <memory>
#include <optional>
#include <span>
#include <string>
#include <string_view>
#include <vector>

#include "absl/status/status.h"
#include "daemon/node/parts_test_util.h"
#include "transport/host/host_transport.h"

namespace refitd::refit {

// One member and the region that it shares.
struct Rank {
  int daemon = 0;
  bool engine = false;
  std::string label;
  Attached attached;
  std::shared_ptr<const Layout> layout;
  std::unique_ptr<SharedMemory> shared;  // null: nothing is registered
  std::span<char> memory;                // all of `shared`

  // Each function says what the member was told last.
  std::optional<Version> committed() const {
    const auto told = attached.inbox->Last<SendCommitted>();
    return told.has_value() ? std::optional(told->version) : std::nullopt;
  }
  size_t aborted() const { return attached.inbox->All<SendAborted>().size(); }  // how often
  bool dirty() const { return attached.inbox->Last<SendAborted>()->dirty; }
};

class Cluster {
 public:
  Cluster(int daemons, GroupSpec spec, const GroupLimits& limits = {},
          TransferFaults* faults = nullptr);

  // Both return the rank's number for the calls below. The memory is as large as the layout's
  // pieces need, and filled with kPoison. A layout without pieces is not registered.
  int AddTrainer(int daemon, int rank, int world, Layout layout);
  int AddEngine(int daemon, const std::string& instance, int rank, int world, Layout layout);
  // Registers another layout, over new memory of its size.
  absl::Status Register(int rank, Layout layout);
  Rank& rank(int number) { return ranks_[static_cast<size_t>(number)]; }
  // Waits until the rank is told that the version is committed. False: it was not told in time.
  bool Commits(int number, Version version);

  Answer Refit(int trainer, Version version, Verification verification, int64_t bucket_count = 0);
  // Calls Refit of all these trainers, and returns the first answer that is not OK.
  absl::Status RefitAll(const std::vector<int>& trainers, Version version,
                        Verification verification = Verification::kReadback);
  Answer Begin(int trainer, Version version, Verification verification);
  // Pushes one whole tensor of uint8 with these bytes, which must live until the answer.
  Answer Push(int trainer, Version version, int64_t seq, const TensorSpec& tensor,
              std::string_view bytes);
  Answer Commit(int trainer, Version version, int64_t bucket_count);
  // Kills the engine rank, and waits until its group has noticed that.
  void Lose(int number);

  // The sums over all daemons.
  DataPlane::Asked asked();
  int64_t sent_bytes(int daemon);  // over the wire
  int64_t exchanged_bytes();       // by all

  static constexpr char kPoison = '\x5a';

 private:
  int Add(int daemon, Arrival arrival, std::string label, Layout layout);
  DaemonParts& DaemonOf(const Rank& rank) { return *daemons_[static_cast<size_t>(rank.daemon)]; }

  const GroupSpec spec_;
  std::vector<std::unique_ptr<DaemonParts>> daemons_;
  std::vector<Rank> ranks_;
};

}  // namespace refitd::refit

#endif  // REFITD_TESTS_REFIT_CLUSTER_H_
