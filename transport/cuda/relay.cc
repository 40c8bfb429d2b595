#include "transport/cuda/relay.h"

#if defined(REFITD_CUDA)
#include <algorithm>
#include <utility>

#include "transport/base/status.h"
#include "transport/cuda/nccl/broadcast.h"

namespace refitd {
namespace {

// One link of a chain: a device copies to a slot, by the slot's address for that device.
struct Hop {
  const RelayStream* from = nullptr;
  char* source = nullptr;  // the slot that it reads; null: the source's runs
  char* slot = nullptr;
};

// Makes the links of the chain; a slot on the source's own device is filled beside them.
absl::StatusOr<std::vector<Hop>> MakeChain(const Relay& relay, RelayIssue* issue) {
  std::vector<Hop> chain;
  int device = relay.source;
  char* source = nullptr;
  for (const Relay::Slot& slot : relay.slots) {
    if (slot.device == relay.source) {
      REFITD_ASSIGN_OR_RETURN(const RelayStream* const own, issue->Own(relay.source));
      REFITD_RETURN_IF_ERROR(issue->CopyRuns(*own, relay.runs, slot.data));
      continue;
    }
    REFITD_ASSIGN_OR_RETURN(char* const reached, issue->Reach(slot.data, device));
    REFITD_ASSIGN_OR_RETURN(const RelayStream* const onward, issue->Onward(device));
    chain.push_back({onward, source, reached});
    device = slot.device;
    source = slot.data;
  }
  return chain;
}

absl::Status IssueChain(const Relay& relay, RelayIssue* issue) {
  REFITD_ASSIGN_OR_RETURN(const std::vector<Hop> chain, MakeChain(relay, issue));
  // With one link no device waits for a chunk, and one batch of all copies is fastest.
  const int64_t chunk_bytes = chain.size() > 1 ? relay.chunk_bytes : relay.slot_bytes;
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
  return absl::OkStatus();
}

}  // namespace

// One broadcast, as a job of the queue that issues it.
class RelayQueue::Job : public DeviceJob {
 public:
  Job(Relay relay, std::shared_ptr<CudaMemory> memory, std::shared_ptr<RelayStreams> streams,
      std::shared_ptr<NcclBroadcasts> nccl, std::function<void(absl::Status)> done)
      : relay_(std::move(relay)),
        memory_(std::move(memory)),
        streams_(std::move(streams)),
        nccl_(std::move(nccl)),
        done_(std::move(done)) {}

  bool Cancelled() const override { return false; }

  void Fail(const absl::Status& status) override { done_(status); }

  void End(const absl::Status& status) override {
    // Ask for the status while the pools are held, because the communicator is not closed before
    // they are released.
    const absl::Status filled = status.ok() && by_ != nullptr ? by_->status() : status;
    by_ = nullptr;
    relay_.keep_alive.clear();
    done_(filled);
  }

  absl::Status Issue(DeviceStreams* streams) override {
    RelayIssue issue(streams_.get(), memory_.get());
    // A broadcast within one device needs no communicator.
    const bool within = std::all_of(relay_.slots.begin(), relay_.slots.end(),
                                    [this](const auto& s) { return s.device == relay_.source; });
    const absl::Status issued = relay_.method == BroadcastMethod::kChain || within
                                    ? IssueChain(relay_, &issue)
                                    : nccl_->Issue(relay_, &issue, &by_);
    // Work issued before an error still runs, so the job must end after it.
    const absl::Status joined = issue.Join(streams->main);
    return joined.ok() ? issued : joined;
  }

 private:
  Relay relay_;
  const std::shared_ptr<CudaMemory> memory_;
  const std::shared_ptr<RelayStreams> streams_;
  const std::shared_ptr<NcclBroadcasts> nccl_;
  const std::function<void(absl::Status)> done_;
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

void RelayQueue::Submit(Relay relay, std::function<void(absl::Status)> done) {
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
  queue->Submit(
      std::make_shared<Job>(std::move(relay), memory_, streams_, options_.nccl, std::move(done)));
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
