#include "transport/cuda/relay.h"

#if defined(REFITD_CUDA)
#include <algorithm>
#include <atomic>
#include <utility>

#include "transport/base/status.h"
#include "transport/cuda/nccl/broadcast.h"

namespace refitd {
namespace {

// One link of a chain: a device copies to a slot, by the slot's address for that device.
struct Hop {
  const RelayStream* from = nullptr;
  int to = 0;              // device
  char* source = nullptr;  // the slot that it reads; null: the source's runs
  char* slot = nullptr;
};

// Makes the links of the chain; a slot on the source's own device is filled beside them.
absl::StatusOr<std::vector<Hop>> MakeChain(const Relay& relay, RelayIssue* issue,
                                           Arrivals* arrivals) {
  std::vector<Hop> chain;
  int device = relay.source;
  char* source = nullptr;
  for (const Relay::Slot& slot : relay.slots) {
    if (slot.device == relay.source) {
      REFITD_ASSIGN_OR_RETURN(const RelayStream* const own, issue->Own(relay.source));
      REFITD_RETURN_IF_ERROR(issue->CopyRuns(*own, relay.runs, slot.data));
      REFITD_RETURN_IF_ERROR(arrivals->Record(slot.device, *own));
      continue;
    }
    REFITD_ASSIGN_OR_RETURN(char* const reached, issue->Reach(slot.data, device));
    REFITD_ASSIGN_OR_RETURN(const RelayStream* const onward, issue->Onward(device));
    chain.push_back({onward, slot.device, source, reached});
    device = slot.device;
    source = slot.data;
  }
  return chain;
}

// Returns the size of a chunk. While other broadcasts keep the links busy, few large chunks are
// fastest; alone, a broadcast is cut at least in two, so that the last device is done soon after
// the first. With one link no device waits for a chunk, and one batch of all copies is fastest.
int64_t ChunkBytes(const Relay& relay, size_t links, bool alone) {
  constexpr int64_t kLeast = 1 << 20;
  constexpr int64_t kAlignment = 4096;
  if (links < 2) return relay.slot_bytes;
  const auto divide = [](int64_t bytes, int64_t by) { return (bytes + by - 1) / by; };
  const int64_t bytes = relay.runs.back().offset + relay.runs.back().bytes;
  int64_t chunks = divide(bytes, relay.chunk_bytes);
  if (alone && bytes > kLeast) chunks = std::max<int64_t>(chunks, 2);
  // Chunks begin at multiples, as slots do.
  return std::min(divide(divide(bytes, chunks), kAlignment) * kAlignment, relay.chunk_bytes);
}

absl::Status IssueChain(const Relay& relay, bool alone, RelayIssue* issue, Arrivals* arrivals) {
  REFITD_ASSIGN_OR_RETURN(const std::vector<Hop> chain, MakeChain(relay, issue, arrivals));
  const int64_t chunk_bytes = ChunkBytes(relay, chain.size(), alone);
  for (const RelayChunk& chunk : CutIntoChunks(relay.runs, chunk_bytes)) {
    const RelayStream* before = nullptr;
    for (const Hop& hop : chain) {
      if (before == nullptr) {
        REFITD_RETURN_IF_ERROR(issue->CopyRuns(*hop.from, chunk.runs, hop.slot));
      } else {
        REFITD_RETURN_IF_ERROR(issue->Wait(*hop.from, *before));
        REFITD_RETURN_IF_ERROR(issue->Copy(*hop.from, hop.slot + chunk.begin,
                                           hop.source + chunk.begin, chunk.end - chunk.begin));
      }
      REFITD_RETURN_IF_ERROR(issue->Record(*hop.from));
      before = hop.from;
    }
  }
  for (const Hop& hop : chain) REFITD_RETURN_IF_ERROR(arrivals->Record(hop.to, *hop.from));
  return absl::OkStatus();
}

}  // namespace

// One broadcast, as a job of the queue that issues it.
class RelayQueue::Job : public DeviceJob {
 public:
  // `under_way` counts the queue's broadcasts that have not ended.
  Job(Relay relay, std::shared_ptr<std::atomic<int>> under_way, std::shared_ptr<CudaMemory> memory,
      std::shared_ptr<RelayStreams> streams, std::shared_ptr<NcclBroadcasts> nccl, RelayCalls calls)
      : relay_(std::move(relay)),
        under_way_(std::move(under_way)),
        memory_(std::move(memory)),
        streams_(std::move(streams)),
        nccl_(std::move(nccl)),
        calls_(std::move(calls)) {
    ++*under_way_;
  }
  ~Job() override { --*under_way_; }
  Job(const Job&) = delete;
  Job& operator=(const Job&) = delete;

  bool Cancelled() const override { return false; }

  void Fail(const absl::Status& status) override {
    Issued(status);
    calls_.ended(status);
  }

  void End(const absl::Status& status) override {
    // Ask for the status while the pools are held, because the communicator is not closed before
    // they are released.
    const absl::Status filled = status.ok() && by_ != nullptr ? by_->status() : status;
    by_ = nullptr;
    arrivals_ = nullptr;
    relay_.keep_alive.clear();
    if (filled.ok()) {
      Issued(nullptr);
    } else {
      Issued(filled);
    }
    calls_.ended(filled);
  }

  absl::Status Issue(DeviceStreams* streams) override {
    RelayIssue issue(streams_.get(), memory_.get());
    // A broadcast within one device needs no communicator.
    const bool within = std::all_of(relay_.slots.begin(), relay_.slots.end(),
                                    [this](const auto& s) { return s.device == relay_.source; });
    const bool chain = relay_.method == BroadcastMethod::kChain || within;
    auto arrivals = std::make_shared<Arrivals>(streams->api);
    const absl::Status issued = chain ? IssueChain(relay_, *under_way_ == 1, &issue, arrivals.get())
                                      : nccl_->Issue(relay_, &issue, &by_);
    // Work issued before an error still runs, so the job must end after it.
    const absl::Status joined = issue.Join(streams->main);
    if (!joined.ok() || !issued.ok()) return joined.ok() ? issued : joined;
    // P4: a collective may never end, and a stream that waits for it would serve nobody else.
    if (chain) {
      arrivals_ = arrivals;
      Issued(std::move(arrivals));
    }
    return absl::OkStatus();
  }

 private:
  // The first call counts.
  void Issued(absl::StatusOr<std::shared_ptr<const Arrivals>> arrivals) {
    if (!told_.exchange(true)) calls_.issued(std::move(arrivals));
  }

  Relay relay_;
  const std::shared_ptr<std::atomic<int>> under_way_;
  const std::shared_ptr<CudaMemory> memory_;
  const std::shared_ptr<RelayStreams> streams_;
  const std::shared_ptr<NcclBroadcasts> nccl_;
  const RelayCalls calls_;
  std::atomic<bool> told_ = false;
  // Kept until the events have passed: nobody else destroys one for which a device may wait.
  std::shared_ptr<const Arrivals> arrivals_;
  std::shared_ptr<const Communicator> by_;  // null: the broadcast has no collective
};

RelayQueue::RelayQueue(std::shared_ptr<CudaMemory> memory, std::shared_ptr<CudaContexts> contexts,
                       Options options)
    : memory_(std::move(memory)),
      contexts_(std::move(contexts)),
      options_(std::move(options)),
      lost_(std::make_shared<LostContext>(options_.lost)),
      streams_(std::make_shared<RelayStreams>(contexts_)) {}

RelayQueue::~RelayQueue() = default;

void RelayQueue::Submit(Relay relay, RelayCalls calls) {
  std::shared_ptr<DeviceQueue> queue;
  {
    MutexLock lock(&mutex_);
    if (queue_ == nullptr) {
      queue_ = std::make_shared<DeviceQueue>(contexts_, relay.source,
                                             DeviceQueueOptions{.name = "of broadcasts",
                                                                .threads = "refitd-relay",
                                                                .kernel = {},
                                                                .limit = options_.limit},
                                             lost_);
      if (stopped_) {
        queue_->Close();
      } else {
        queue_->Start();
      }
    }
    queue = queue_;
  }
  queue->Submit(std::make_shared<Job>(std::move(relay), under_way_, memory_, streams_,
                                      options_.nccl, std::move(calls)));
}

void RelayQueue::Stop(std::chrono::steady_clock::time_point deadline) {
  std::shared_ptr<DeviceQueue> queue;
  {
    MutexLock lock(&mutex_);
    stopped_ = true;
    queue = queue_;
  }
  if (queue == nullptr || !queue->Stop(deadline)) return;
  if (options_.nccl != nullptr) options_.nccl->Close(deadline);
  streams_->Destroy();
}

}  // namespace refitd

#endif  // REFITD_CUDA
