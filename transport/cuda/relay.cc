#include "transport/cuda/relay.h"

#if defined(REFITD_CUDA)
#include <algorithm>
#include <map>
#include <utility>

#include "transport/base/status.h"

namespace refitd {
namespace {

// What one device hands on, and what it copies into its own slot.
struct Hop {
  CUcontext context = nullptr;
  CUstream onward = nullptr;
  CUstream own = nullptr;
  // Of the last chunk handed on. Recorded again for every chunk: a wait is for the record before
  // it, and one thread issues both.
  CUevent handed_on = nullptr;
  CUevent filled = nullptr;  // its own slot
};

}  // namespace

// Streams and events of the devices, made when first needed. Used by the issuing thread alone until
// Destroy.
class RelayQueue::Hops {
 public:
  explicit Hops(std::shared_ptr<CudaContexts> contexts) : contexts_(std::move(contexts)) {}

  absl::StatusOr<Hop*> On(int device) {
    Hop& hop = hops_[device];
    if (hop.handed_on != nullptr) return &hop;
    const CudaApi& api = contexts_->api();
    REFITD_ASSIGN_OR_RETURN(hop.context, contexts_->Get(device));
    const ScopedContext current(api, hop.context);
    REFITD_RETURN_IF_ERROR(current.status());
    for (CUstream* stream : {&hop.onward, &hop.own}) {
      if (*stream != nullptr) continue;
      REFITD_RETURN_IF_ERROR(REFITD_CUDA_CALL(api, cuStreamCreate, stream, CU_STREAM_NON_BLOCKING));
    }
    for (CUevent* event : {&hop.filled, &hop.handed_on}) {
      if (*event != nullptr) continue;
      REFITD_RETURN_IF_ERROR(REFITD_CUDA_CALL(api, cuEventCreate, event, CU_EVENT_DISABLE_TIMING));
    }
    return &hop;
  }

  // Nothing runs on them, and nobody issues any more.
  void Destroy() {
    const CudaApi& api = contexts_->api();
    for (auto& [device, hop] : hops_) {
      if (hop.context == nullptr) continue;
      const ScopedContext current(api, hop.context);
      if (!current.status().ok()) continue;
      for (CUevent event : {hop.handed_on, hop.filled}) {
        if (event != nullptr) (void)api.cuEventDestroy(event);
      }
      for (CUstream stream : {hop.onward, hop.own}) {
        if (stream != nullptr) (void)api.cuStreamDestroy(stream);
      }
    }
    hops_.clear();
  }

 private:
  const std::shared_ptr<CudaContexts> contexts_;
  std::map<int, Hop> hops_;
};

// One broadcast.
class RelayQueue::Job : public DeviceJob {
 public:
  Job(Relay relay, std::shared_ptr<CudaMemory> memory, std::shared_ptr<Hops> hops,
      std::function<void(absl::Status)> done)
      : relay_(std::move(relay)),
        memory_(std::move(memory)),
        hops_(std::move(hops)),
        done_(std::move(done)) {}

  bool Cancelled() const override { return false; }

  void Fail(const absl::Status& status) override { Finish(status); }

  void End(const absl::Status& status) override {
    relay_.keep_alive.clear();
    Finish(status);
  }

  absl::Status Issue(DeviceStreams* streams) override {
    const absl::Status issued = IssueChain(streams->api);
    // What was issued before an error still runs: the job ends after it.
    const absl::Status joined = Join(*streams);
    return joined.ok() ? issued : joined;
  }

 private:
  // One link of the chain: `from` copies to a slot, as it addresses it.
  struct Link {
    Hop* from = nullptr;
    char* source = nullptr;  // the slot that it reads; null: the source's runs
    char* slot = nullptr;
  };

  absl::Status IssueChain(const CudaApi& api) {
    REFITD_ASSIGN_OR_RETURN(const std::vector<Link> chain, MakeChain());
    if (own_.from != nullptr) REFITD_RETURN_IF_ERROR(FillOwn(api));
    for (const RelayChunk& chunk : relay_.chunks) {
      Hop* before = nullptr;
      for (const Link& link : chain) {
        REFITD_RETURN_IF_ERROR(HandOn(api, link, chunk, before));
        before = link.from;
      }
    }
    return absl::OkStatus();
  }

  absl::StatusOr<std::vector<Link>> MakeChain() {
    std::vector<Link> chain;
    REFITD_ASSIGN_OR_RETURN(Hop * at, hops_->On(relay_.source));
    int device = relay_.source;
    char* source = nullptr;
    for (const Relay::Slot& slot : relay_.slots) {
      REFITD_ASSIGN_OR_RETURN(char* const reached, Reach(slot, device));
      if (slot.device == relay_.source) {
        own_ = {at, nullptr, slot.data};
        used_.push_back({at, at->own, at->filled});
        continue;
      }
      chain.push_back({at, source, reached});
      used_.push_back({at, at->onward, at->handed_on});
      REFITD_ASSIGN_OR_RETURN(at, hops_->On(slot.device));
      device = slot.device;
      source = slot.data;
    }
    return chain;
  }

  absl::StatusOr<char*> Reach(const Relay::Slot& slot, int device) const {
    const auto region = memory_->Find(slot.data, 1);
    if (region == nullptr) return absl::InternalError("a slot is no mapped device memory");
    REFITD_ASSIGN_OR_RETURN(char* const data, region->On(device));
    return data + (slot.data - region->data());
  }

  absl::Status FillOwn(const CudaApi& api) {
    const ScopedContext current(api, own_.from->context);
    REFITD_RETURN_IF_ERROR(current.status());
    for (const RelayChunk& chunk : relay_.chunks) {
      REFITD_RETURN_IF_ERROR(CopyRuns(api, chunk.runs, own_.slot, own_.from->own));
    }
    return absl::OkStatus();
  }

  static absl::Status HandOn(const CudaApi& api, const Link& link, const RelayChunk& chunk,
                             const Hop* before) {
    const ScopedContext current(api, link.from->context);
    REFITD_RETURN_IF_ERROR(current.status());
    CUstream stream = link.from->onward;
    if (before == nullptr) {
      REFITD_RETURN_IF_ERROR(CopyRuns(api, chunk.runs, link.slot, stream));
    } else {
      REFITD_RETURN_IF_ERROR(
          REFITD_CUDA_CALL(api, cuStreamWaitEvent, stream, before->handed_on, 0));
      REFITD_RETURN_IF_ERROR(
          REFITD_CUDA_CALL(api, cuMemcpyDtoDAsync, Address(link.slot + chunk.begin),
                           Address(link.source + chunk.begin),
                           static_cast<size_t>(chunk.end - chunk.begin), stream));
    }
    return REFITD_CUDA_CALL(api, cuEventRecord, link.from->handed_on, stream);
  }

  static absl::Status CopyRuns(const CudaApi& api, const std::vector<RelayRun>& runs, char* slot,
                               CUstream stream) {
    if (runs.size() > 1 && api.has_batches()) return CopyBatch(api, runs, slot, stream);
    for (const RelayRun& run : runs) {
      REFITD_RETURN_IF_ERROR(REFITD_CUDA_CALL(api, cuMemcpyDtoDAsync, Address(slot + run.offset),
                                              Address(run.from), static_cast<size_t>(run.bytes),
                                              stream));
    }
    return absl::OkStatus();
  }

  static absl::Status CopyBatch(const CudaApi& api, const std::vector<RelayRun>& runs, char* slot,
                                CUstream stream) {
    std::vector<CUdeviceptr> to;
    std::vector<CUdeviceptr> from;
    std::vector<size_t> bytes;
    for (const RelayRun& run : runs) {
      to.push_back(Address(slot + run.offset));
      from.push_back(Address(run.from));
      bytes.push_back(static_cast<size_t>(run.bytes));
    }
    return api.CopyMany(to.data(), from.data(), bytes.data(), runs.size(), stream);
  }

  // The end of all that was issued becomes the job's. Where that can't be, nothing tells any more
  // when the devices are done: the process has lost them.
  absl::Status Join(const DeviceStreams& streams) const {
    const CudaApi& api = streams.api;
    for (const Used& used : used_) {
      const ScopedContext current(api, used.hop->context);
      absl::Status joined = current.status();
      if (joined.ok()) joined = REFITD_CUDA_CALL(api, cuEventRecord, used.event, used.stream);
      if (joined.ok()) {
        joined = REFITD_CUDA_CALL(api, cuStreamWaitEvent, streams.main, used.event, 0);
      }
      if (joined.ok()) continue;
      return IsLost(joined) ? joined : api.Check("cuEventRecord", CUDA_ERROR_UNKNOWN);
    }
    return absl::OkStatus();
  }

  static CUdeviceptr Address(const char* data) { return reinterpret_cast<CUdeviceptr>(data); }

  void Finish(const absl::Status& status) {
    const auto done = std::move(done_);
    done(status);
  }

  Relay relay_;
  const std::shared_ptr<CudaMemory> memory_;
  const std::shared_ptr<Hops> hops_;
  std::function<void(absl::Status)> done_;
  Link own_;
  struct Used {
    const Hop* hop = nullptr;
    CUstream stream = nullptr;
    CUevent event = nullptr;
  };
  std::vector<Used> used_;
};

RelayQueue::RelayQueue(std::shared_ptr<CudaMemory> memory, std::shared_ptr<CudaContexts> contexts,
                       Options options)
    : memory_(std::move(memory)),
      contexts_(std::move(contexts)),
      options_(std::move(options)),
      lost_(std::make_shared<LostContext>(options_.lost)),
      hops_(std::make_shared<Hops>(contexts_)) {}

RelayQueue::~RelayQueue() = default;

void RelayQueue::Submit(Relay relay, std::function<void(absl::Status)> done) {
  std::shared_ptr<DeviceQueue> queue;
  {
    MutexLock lock(&mutex_);
    if (queue_ == nullptr) {
      queue_ = std::make_shared<DeviceQueue>(
          contexts_, relay.source,
          DeviceQueueOptions{.name = fmt::format("{} (broadcasts)", relay.source),
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
  queue->Submit(std::make_shared<Job>(std::move(relay), memory_, hops_, std::move(done)));
}

void RelayQueue::Stop(std::chrono::steady_clock::time_point deadline) {
  std::shared_ptr<DeviceQueue> queue;
  {
    MutexLock lock(&mutex_);
    stopped_ = true;
    queue = queue_;
  }
  if (queue != nullptr && queue->Stop(deadline)) hops_->Destroy();
}

}  // namespace refitd

#endif  // REFITD_CUDA
