#include "transport/cuda/cuda_transport.h"

#include "transport/base/failure.h"
#include "transport/base/status.h"

#if defined(REFITD_CUDA)
#include <algorithm>
#include <array>
#include <atomic>
#include <cstring>
#include <limits>
#include <map>
#include <optional>
#include <tuple>
#include <utility>
#include <vector>

#include "transport/base/mutex.h"
#include "transport/bound_moves.h"
#include "transport/cuda/api.h"
#include "transport/cuda/buffers.h"
#include "transport/cuda/call_watch.h"
#include "transport/cuda/copy_plan.h"
#include "transport/cuda/copy_task.h"
#include "transport/cuda/derive_plan.h"
#include "transport/cuda/device_queue.h"
#include "transport/cuda/nccl/broadcast.h"
#include "transport/cuda/plan_thread.h"
#include "transport/cuda/relay.h"
#include "transport/cuda/relay_plan.h"
#endif

namespace refitd {

#if defined(REFITD_CUDA)
namespace {

using Clock = std::chrono::steady_clock;

// The most bytes that are uploaded through pinned memory, so that issuing does not wait for the
// device. The driver stages larger uploads itself, and the issuing thread waits meanwhile.
constexpr int64_t kMaxPinnedUpload = 4 << 20;

// The most copies of one call to a lane of copy engines.
constexpr size_t kCopiesACall = 64;

// Every buffer and every part of one starts at a multiple of this.
constexpr int64_t kAlign = 256;
int64_t AlignUp(int64_t bytes) { return (bytes + kAlign - 1) / kAlign * kAlign; }

// The counters, `next_task` of each kernel, come before the fault (CopyLaunch::fault), and this
// before the sums. What comes back to the host begins with the fault.
constexpr int64_t kFaultAt = 24;
constexpr int64_t kSumsAt = 32;

int64_t PieceSpan(const BoundPiece& piece) {
  if (piece.box.extent.size() != piece.strides.size() || ElementCount(piece.box) == 0) return 0;
  return ByteSpan(piece.box.extent, piece.strides, ElementBytes(piece.dtype));
}

// ---- shared by the threads ----

// The parts of the transport that jobs use. Outlives the transport while a device hangs.
class Engine {
 public:
  Engine(std::shared_ptr<CudaMemory> memory, std::shared_ptr<CudaContexts> contexts,
         const CudaTransportOptions& options, std::string_view kernel)
      : memory_(std::move(memory)),
        contexts_(std::move(contexts)),
        options_(options),
        kernel_(kernel),
        lost_(std::make_shared<LostContext>(options.lost)),
        planner_(std::make_shared<PlanThread>(options.limit, lost_, [memory = memory_](int device) {
          return Name(*memory, device);
        })) {
    planner_->Start();
  }

  CudaMemory& memory() const { return *memory_; }
  const CudaTransportOptions& options() const { return options_; }
  bool has_batches() const { return contexts_->api().has_batches(); }

  // The device's queue, made when first needed, and kept. P4: work that waits on the device for a
  // slot of a broadcast has a queue of its own, so that a broadcast that hangs holds up no other
  // work. Its limit is the longer, since the broadcast's own queue watches the wait.
  std::shared_ptr<DeviceQueue> Queue(int device, bool for_slots = false) {
    MutexLock lock(&mutex_);
    std::shared_ptr<DeviceQueue>& queue = queues_[{device, for_slots}];
    if (queue == nullptr) {
      queue = std::make_shared<DeviceQueue>(
          contexts_, device,
          DeviceQueueOptions{.name = Name(*memory_, device),
                             .threads = for_slots ? fmt::format("refitd-slot{}", device) : "",
                             .kernel = kernel_,
                             .limit = for_slots ? 2 * options_.limit : options_.limit,
                             .kept_device_bytes = options_.kept_device_bytes,
                             .kept_pinned_bytes = options_.kept_pinned_bytes},
          lost_);
      if (stopped_) {
        queue->Close();
      } else {
        queue->Start();
      }
    }
    return queue;
  }

  // OK if every device reaches every other, else UNIMPLEMENTED, naming those that do not. The
  // driver is asked once.
  absl::Status AllReach() {
    MutexLock lock(&mutex_);
    if (!reach_.has_value()) reach_ = AskReach();
    return *reach_;
  }
  absl::Status AskReach() const {
    for (int device = 0; device < contexts_->devices(); ++device) {
      for (int other = 0; other < contexts_->devices(); ++other) {
        REFITD_ASSIGN_OR_RETURN(const bool reaches, contexts_->CanReach(device, other));
        if (reaches) continue;
        return Error(absl::StatusCode::kUnimplemented, "device {} can't reach memory of device {}",
                     Name(*memory_, device), Name(*memory_, other));
      }
    }
    return absl::OkStatus();
  }

  PlanThread* planner() const { return planner_.get(); }

  // Notes errors of calls outside the queues.
  absl::Status Note(const absl::Status& status) { return lost_->Note(status); }

  void Enter() {
    MutexLock lock(&mutex_);
    ++active_;
  }
  void Leave() {
    MutexLock lock(&mutex_);
    --active_;
    idle_.NotifyAll();
  }

  // Waits until nothing is active, then stops planning and the queues.
  void Stop() {
    const Clock::time_point deadline = Clock::now() + options_.limit;
    std::map<std::pair<int, bool>, std::shared_ptr<DeviceQueue>> queues;
    {
      MutexLock lock(&mutex_);
      while (active_ > 0 && idle_.WaitUntil(&mutex_, deadline)) {
      }
    }
    planner_->Stop(deadline);
    {
      MutexLock lock(&mutex_);
      stopped_ = true;
      queues = queues_;  // later jobs find the queues stopped
    }
    for (const auto& [device, queue] : queues) queue->Stop(std::max(deadline, Clock::now()));
  }

 private:
  // Returns a name such as "0 (GPU-...)".
  static std::string Name(const CudaMemory& memory, int device) {
    for (const CudaDevice& known : memory.devices()) {
      if (known.ordinal == device) return fmt::format("{} ({})", device, known.uuid);
    }
    return std::to_string(device);
  }

  const std::shared_ptr<CudaMemory> memory_;
  const std::shared_ptr<CudaContexts> contexts_;
  const CudaTransportOptions options_;
  const std::string_view kernel_;
  const std::shared_ptr<LostContext> lost_;
  const std::shared_ptr<PlanThread> planner_;
  Mutex mutex_;
  CondVar idle_;
  // By device, and whether it is for slots.
  std::map<std::pair<int, bool>, std::shared_ptr<DeviceQueue>> queues_ ABSL_GUARDED_BY(mutex_);
  int64_t active_ ABSL_GUARDED_BY(mutex_) = 0;
  bool stopped_ ABSL_GUARDED_BY(mutex_) = false;
  std::optional<absl::Status> reach_ ABSL_GUARDED_BY(mutex_);
};

// ---- plans ----

// Host bytes that a device's tasks read from `scratch`, to which the bytes are copied before each
// launch.
struct HostUpload {
  const char* from = nullptr;
  int64_t bytes = 0;
  Buffer scratch;
};

// One device's part of a plan, with the memory that the part has on the device.
struct DeviceShare {
  const DeviceTasks* tasks = nullptr;
  std::vector<HostUpload>* uploads = nullptr;
  // Used by the device's issuing thread only.
  Buffer memory;
  bool uploaded = false;
};

// A plan that can be run any number of times. It points into the transfer or job of which it was
// made.
struct Planned {
  CudaCopyPlan plan;
  std::map<int, std::vector<HostUpload>> uploads;  // by device
  std::vector<DeviceShare> parts;
  std::vector<DeviceShare> readback;

  void MakeParts() {
    for (const DeviceTasks& tasks : plan.devices) {
      parts.push_back(
          {.tasks = &tasks, .uploads = &uploads[tasks.device], .memory = {}, .uploaded = false});
    }
    for (const DeviceTasks& tasks : plan.readback) {
      readback.push_back({.tasks = &tasks, .uploads = nullptr, .memory = {}, .uploaded = false});
    }
  }
};

// The addresses of pieces in mapped memory; memory in no region counts as host memory.
class Addresses : public CopyAddresses {
 public:
  Addresses(Engine* engine, Planned* planned) : engine_(engine), planned_(planned) {}

  absl::StatusOr<int> DeviceOf(const BoundPiece& piece) override {
    const Known* const known = RegionOf(piece);
    if (known != nullptr) return known->region->device();
    // A piece that begins in a region and leaves it does not count as host memory.
    if (engine_->memory().Find(piece.data, 1) != nullptr) {
      return Error(absl::StatusCode::kInternal, "piece of \"{}\" leaves its region", piece.name);
    }
    return kHostMemory;
  }

  absl::StatusOr<uint64_t> On(int device, const BoundPiece& piece) override {
    Known* const known = RegionOf(piece);
    if (known == nullptr) return UploadAddress(device, piece.data, PieceSpan(piece));
    char*& on = known->on[device];
    if (on == nullptr) {
      const absl::StatusOr<char*> data = OnDevice(*known->region, device);
      if (!data.ok()) {
        const absl::Status noted = engine_->Note(data.status());
        return Prefixed(noted, "\"{}\"", piece.name);
      }
      on = *data;
    }
    return reinterpret_cast<uint64_t>(on + (piece.data - known->region->data()));
  }

 private:
  // A region, and its addresses on the devices that were asked for.
  struct Known {
    std::shared_ptr<const DeviceRegion> region;
    std::map<int, char*> on;
  };

  // The region that holds the piece; null: none does. Many pieces lie in few regions, so that most
  // are found without the lock of all regions.
  Known* RegionOf(const BoundPiece& piece) {
    const int64_t bytes = PieceSpan(piece);
    auto it = known_.upper_bound(piece.data);
    if (it != known_.begin() && Holds(*(--it)->second.region, piece.data, bytes))
      return &it->second;
    auto region = engine_->memory().Find(piece.data, bytes);
    if (region == nullptr) return nullptr;
    Known& known = known_[region->data()];
    known = {std::move(region), {}};
    return &known;
  }
  static bool Holds(const DeviceRegion& region, const char* data, int64_t bytes) {
    const int64_t offset = data - region.data();
    return offset <= region.bytes() && bytes <= region.bytes() - offset;
  }

  // The address on `device` to which host bytes are copied before each launch; takes memory for it
  // the first time.
  absl::StatusOr<uint64_t> UploadAddress(int device, const char* from, int64_t bytes) {
    const auto [it, added] = uploads_.try_emplace({device, from, bytes}, 0);
    if (!added) return it->second;
    absl::StatusOr<Buffer> buffer = TakeMemory(device, bytes);
    if (!buffer.ok()) return engine_->Note(buffer.status());
    it->second = buffer->address();
    planned_->uploads[device].push_back(
        {.from = from, .bytes = bytes, .scratch = *std::move(buffer)});
    return it->second;
  }

  // P4: the call is watched, because it may hang if the device hangs.
  absl::StatusOr<char*> OnDevice(const DeviceRegion& region, int device) {
    const CallWatch::Call call(engine_->planner()->calls(), device, "opening a region");
    return region.On(device);
  }
  absl::StatusOr<Buffer> TakeMemory(int device, int64_t bytes) {
    const CallWatch::Call call(engine_->planner()->calls(), device, "making device memory");
    return engine_->Queue(device)->memory()->Take(bytes);
  }

  Engine* const engine_;
  Planned* const planned_;
  std::map<std::tuple<int, const char*, int64_t>, uint64_t> uploads_;
  std::map<const char*, Known> known_;  // by the region's own address
};

// A plan that is made once. Thread-safe.
class KeptPlan {
 public:
  // Returns the plan; `make` makes it the first time, while other callers wait for it.
  absl::StatusOr<std::shared_ptr<Planned>> Get(
      Engine* engine, const std::function<absl::StatusOr<CudaCopyPlan>(CopyAddresses*)>& make) {
    MutexLock lock(&making_);
    if (std::shared_ptr<Planned> kept = Kept(); kept != nullptr) return kept;
    auto planned = std::make_shared<Planned>();
    Addresses addresses(engine, planned.get());
    REFITD_ASSIGN_OR_RETURN(planned->plan, make(&addresses));
    planned->MakeParts();
    MutexLock made(&mutex_);
    planned_ = planned;
    return planned;
  }
  // Null: no plan was made yet. Does not wait for `make`.
  std::shared_ptr<Planned> Kept() const {
    MutexLock lock(&mutex_);
    return planned_;
  }

 private:
  Mutex making_ ABSL_ACQUIRED_BEFORE(mutex_);
  mutable Mutex mutex_;
  std::shared_ptr<Planned> planned_ ABSL_GUARDED_BY(mutex_);
};

// A transfer that touches device memory. It is planned for a verification when that verification is
// first asked for.
class CudaPrepared : public PreparedTransfer {
 public:
  // `few`: one of many transfers in a row, where planning takes longer than the kernel's last
  // tasks.
  explicit CudaPrepared(Transfer of, bool few = false) : transfer(std::move(of)), few_tasks_(few) {}

  absl::StatusOr<std::shared_ptr<Planned>> Plan(Engine* engine, Verification verification) const {
    return plans_[static_cast<size_t>(verification)].Get(engine, [&](CopyAddresses* addresses) {
      CopyPlanOptions options;
      if (engine->has_batches()) options.engine_bytes = engine->options().engine_bytes;
      if (few_tasks_) options.least_task_bytes = options.most_task_bytes;
      return PlanCopies(transfer, verification, addresses, options);
    });
  }
  std::shared_ptr<Planned> Kept(Verification verification) const {
    return plans_[static_cast<size_t>(verification)].Kept();
  }

  const Transfer transfer;

 private:
  const bool few_tasks_;
  mutable std::array<KeptPlan, 4> plans_;  // by verification
};

// A transfer whose pieces are all in host memory.
struct HostPrepared : PreparedTransfer {
  explicit HostPrepared(std::shared_ptr<const PreparedTransfer> transfer)
      : prepared(std::move(transfer)) {}
  const std::shared_ptr<const PreparedTransfer> prepared;
};

// ---- runs ----

// The sums that devices have computed so far.
struct Sums {
  std::vector<uint64_t> stored;
  std::vector<uint64_t> source;
  uint64_t fault = 0;  // the greatest that a device left
};

// One run of a plan: jobs on several devices, in one or two phases. Kept by its jobs.
//
// `Finish` is called once with the outcome, when all jobs ended: until then devices may read and
// write the run's memory (P6). If a device does not end its work, the end of the transport calls
// Finish earlier, and the jobs keep the run's memory.
class Run : public std::enable_shared_from_this<Run> {
 public:
  Run(std::shared_ptr<Engine> engine, std::shared_ptr<Planned> planned, std::string label,
      bool with_sums)
      : engine_(std::move(engine)),
        planned_(std::move(planned)),
        label_(std::move(label)),
        with_sums_(with_sums) {}
  virtual ~Run() = default;
  Run(const Run&) = delete;
  Run& operator=(const Run&) = delete;

  // `after`: tasks on a device wait for the device's slot; null: they need not.
  void Start(std::shared_ptr<const Arrivals> after = nullptr) {
    after_ = std::move(after);
    StartPhase(&planned_->parts, false);
  }
  const Arrivals* after() const { return after_.get(); }
  const Engine& engine() const { return *engine_; }
  const Planned& planned() const { return *planned_; }
  const std::string& label() const { return label_; }

  // True if a job failed; jobs that were not begun are then skipped.
  bool failed() const { return failed_.load(std::memory_order_relaxed); }

  // Called when the transport ends and a device has not ended its job.
  void Fail(const absl::Status& status) { FinishOnce(status, /*ended=*/false); }

  // Adds the results of one device: its fault, those of its tasks' sums, then those of their source
  // passes.
  // The source passes of a readback take the place of the stored sums (copy_plan.h).
  void Add(const DeviceTasks& tasks, bool readback, const unsigned long long* results) {
    MutexLock lock(&mutex_);
    MakeSums();
    sums_.fault = std::max(sums_.fault, uint64_t{*results++});
    const auto add = [&results](const SumRange& range, std::vector<uint64_t>* sums) {
      for (uint32_t i = 0; i < range.count; ++i) (*sums)[range.first + i] += *results++;
    };
    add(tasks.sums, &sums_.stored);
    add(tasks.proof_sums, readback ? &sums_.stored : &sums_.source);
  }

  void JobEnded(const absl::Status& status) {
    bool last = false;
    absl::Status outcome;
    if (!status.ok()) failed_.store(true, std::memory_order_relaxed);
    {
      MutexLock lock(&mutex_);
      if (status_.ok()) status_ = status;
      last = --jobs_left_ == 0;
      outcome = status_;
    }
    if (last) PhaseEnded(outcome);
  }

 protected:
  // `ended`: whether no device touches the run's memory any more.
  virtual void Finish(absl::Status status, const Sums& sums, bool ended) = 0;

 private:
  void StartPhase(std::vector<DeviceShare>* parts, bool readback);

  void PhaseEnded(const absl::Status& status) {
    if (status.ok() && !finished_ && !readback_begun_ && !planned_->readback.empty()) {
      readback_begun_ = true;
      StartPhase(&planned_->readback, true);
      return;
    }
    FinishOnce(status, /*ended=*/true);
  }

  // Allocates the sums at the first result: a run may be constructed under its caller's mutex.
  void MakeSums() ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_) {
    if (!with_sums_ || !sums_.source.empty()) return;
    sums_.stored.resize(planned_->plan.sums.size());
    sums_.source.resize(static_cast<size_t>(planned_->plan.task_sums()));
  }

  void FinishOnce(const absl::Status& status, bool ended) {
    if (finished_.exchange(true)) return;
    Sums sums;
    if (status.ok()) {
      MutexLock lock(&mutex_);
      MakeSums();
      sums = std::move(sums_);
    }
    if (status.ok() || label_.empty()) {
      Finish(status, sums, ended);
    } else {
      Finish(Prefixed(status, "{}", label_), sums, ended);
    }
  }

  const std::shared_ptr<Engine> engine_;
  const std::shared_ptr<Planned> planned_;
  const std::string label_;
  const bool with_sums_;
  std::shared_ptr<const Arrivals> after_;  // set before the first phase
  bool readback_begun_ = false;            // phases follow one another
  std::atomic<bool> failed_ = false;
  std::atomic<bool> finished_ = false;
  Mutex mutex_;
  size_t jobs_left_ ABSL_GUARDED_BY(mutex_) = 0;
  absl::Status status_ ABSL_GUARDED_BY(mutex_);
  Sums sums_ ABSL_GUARDED_BY(mutex_);
};

// A run's part on one device.
class ShareJob : public DeviceJob {
 public:
  ShareJob(std::shared_ptr<Run> run, DeviceShare* part, bool readback, DeviceQueue* queue)
      : run_(std::move(run)), part_(*part), readback_(readback), queue_(queue) {}

  bool Cancelled() const override { return run_->failed(); }

  void Fail(const absl::Status& status) override { run_->Fail(status); }

  void End(const absl::Status& status) override {
    if (status.ok() && results_at_ >= 0) {
      run_->Add(*part_.tasks, readback_,
                reinterpret_cast<const unsigned long long*>(pinned_.host() + results_at_));
    }
    // Free the buffers before `done` is called, so that the next run finds them.
    pinned_ = Buffer();
    scratch_ = Buffer();
    run_->JobEnded(status);
  }

  absl::Status Issue(DeviceStreams* streams) override {
    REFITD_RETURN_IF_ERROR(TakeBuffers());
    if (part_.uploads != nullptr) {
      for (const HostUpload& upload : *part_.uploads) {
        REFITD_RETURN_IF_ERROR(
            Upload(*streams, upload.scratch.address(), upload.from, upload.bytes));
      }
    }
    if (!part_.tasks->tasks.empty()) REFITD_RETURN_IF_ERROR(IssueTasks(streams));
    return IssueCopies(streams);
  }

 private:
  int64_t TaskBytes() const {
    return static_cast<int64_t>(part_.tasks->tasks.size() * sizeof(CopyTask));
  }
  int64_t SumBytes() const {
    return (int64_t{part_.tasks->sums.count} + part_.tasks->proof_sums.count) *
           static_cast<int64_t>(sizeof(uint64_t));
  }
  // What comes back to the host; 0: nothing.
  int64_t ResultBytes() const {
    const bool faults = part_.tasks->counts[static_cast<size_t>(CopyKernel::kDerive)] > 0;
    return SumBytes() > 0 || faults ? kSumsAt - kFaultAt + SumBytes() : 0;
  }
  static int64_t PinnedFor(int64_t bytes) { return bytes <= kMaxPinnedUpload ? AlignUp(bytes) : 0; }

  absl::Status TakeBuffers() {
    const bool kernel = !part_.tasks->tasks.empty();
    int64_t pinned = 0;
    if (part_.uploads != nullptr) {
      for (const HostUpload& upload : *part_.uploads) pinned += PinnedFor(upload.bytes);
    }
    if (kernel && !part_.uploaded) pinned += PinnedFor(TaskBytes());
    if (kernel && ResultBytes() > 0) {
      results_at_ = pinned;
      pinned += ResultBytes();
    }
    if (pinned > 0) {
      REFITD_ASSIGN_OR_RETURN(pinned_, queue_->pinned()->Take(pinned));
    }
    if (!kernel) return absl::OkStatus();
    if (part_.memory.empty()) {
      REFITD_ASSIGN_OR_RETURN(part_.memory, queue_->memory()->Take(TaskBytes()));
    }
    REFITD_ASSIGN_OR_RETURN(scratch_, queue_->memory()->Take(kSumsAt + SumBytes()));
    return absl::OkStatus();
  }

  absl::Status Upload(const DeviceStreams& streams, uint64_t to, const void* from, int64_t bytes) {
    const int64_t pinned = PinnedFor(bytes);
    if (pinned > 0) {
      char* const staged = pinned_.host() + staged_;
      std::memcpy(staged, from, static_cast<size_t>(bytes));
      staged_ += pinned;
      from = staged;
    }
    return REFITD_CUDA_CALL(streams.api, cuMemcpyHtoDAsync, to, from, static_cast<size_t>(bytes),
                            streams.main);
  }

  absl::Status IssueTasks(DeviceStreams* streams) {
    const CudaApi& api = streams->api;
    if (!part_.uploaded) {
      REFITD_RETURN_IF_ERROR(
          Upload(*streams, part_.memory.address(), part_.tasks->tasks.data(), TaskBytes()));
      part_.uploaded = true;
    }
    REFITD_RETURN_IF_ERROR(REFITD_CUDA_CALL(api, cuMemsetD8Async, scratch_.address(), 0,
                                            static_cast<size_t>(kSumsAt + SumBytes()),
                                            streams->main));
    if (run_->after() != nullptr) {
      REFITD_RETURN_IF_ERROR(run_->after()->Wait(part_.tasks->device, streams->main));
    }
    const CudaTransportOptions& options = run_->engine().options();
    size_t first = 0;
    for (int k = 0; k < kCopyKernels; ++k) {
      const auto kernel = static_cast<CopyKernel>(k);
      // Tasks of elements that lie apart, and of derived tensors, keep multiprocessors busy
      // whatever link their bytes cross, so they always get many blocks.
      const bool many =
          part_.tasks->local || kernel == CopyKernel::kApart || kernel == CopyKernel::kDerive;
      REFITD_RETURN_IF_ERROR(Launch(*streams, kernel, MakeLaunch(first, kernel),
                                    many ? options.local_blocks : options.blocks));
      first += part_.tasks->counts[static_cast<size_t>(k)];
    }
    if (results_at_ < 0) return absl::OkStatus();
    return REFITD_CUDA_CALL(api, cuMemcpyDtoHAsync, pinned_.host() + results_at_,
                            scratch_.address() + kFaultAt, static_cast<size_t>(ResultBytes()),
                            streams->main);
  }

  static absl::Status Launch(const DeviceStreams& streams, CopyKernel kernel, CopyLaunch launch,
                             int most_blocks) {
    if (launch.task_count == 0) return absl::OkStatus();
    void* parameters[] = {&launch};
    const auto blocks = std::min(static_cast<unsigned>(std::max(most_blocks, 1)),
                                 unsigned{launch.task_count * launch.slices});
    const auto k = static_cast<size_t>(kernel);
    return REFITD_CUDA_CALL(streams.api, cuLaunchKernel, streams.kernels[k], blocks, 1, 1,
                            static_cast<unsigned>(kCopyThreads[k]), 1, 1, 0, streams.main,
                            parameters, nullptr);
  }

  // Makes the launch of the kernel's tasks, which begin at `first`.
  CopyLaunch MakeLaunch(size_t first, CopyKernel kernel) const {
    CopyLaunch launch;
    launch.tasks = reinterpret_cast<const CopyTask*>(part_.memory.address()) + first;
    static_assert(kMaxDeviceTasks <= UINT32_MAX);
    REFITD_CHECK(part_.tasks->tasks.size() <= static_cast<size_t>(kMaxDeviceTasks));
    launch.task_count = static_cast<uint32_t>(part_.tasks->counts[static_cast<size_t>(kernel)]);
    if (kernel == CopyKernel::kPlain) launch.slices = part_.tasks->slices;
    // Each kernel has a counter of its own.
    static_assert(kCopyKernels * sizeof(uint32_t) <= kFaultAt);
    launch.next_task =
        reinterpret_cast<uint32_t*>(scratch_.address()) + static_cast<size_t>(kernel);
    // Tasks index the sums of all devices; only this device's are there.
    const auto sums_from = [](uint64_t address, const SumRange& range) {
      return reinterpret_cast<unsigned long long*>(address - range.first * sizeof(uint64_t));
    };
    const uint64_t sums = scratch_.address() + kSumsAt;
    launch.fault = reinterpret_cast<unsigned long long*>(scratch_.address() + kFaultAt);
    launch.stored_sums = sums_from(sums, part_.tasks->sums);
    launch.source_sums =
        sums_from(sums + part_.tasks->sums.count * sizeof(uint64_t), part_.tasks->proof_sums);
    return launch;
  }

  // Issues to the lanes in turns, so that no lane waits until all copies of another are issued.
  absl::Status IssueCopies(DeviceStreams* streams) {
    const std::vector<EngineCopies>& lanes = part_.tasks->lanes;
    streams->lanes_used = lanes.size();
    size_t most = 0;
    for (const EngineCopies& copies : lanes) most = std::max(most, copies.bytes.size());
    for (size_t first = 0; first < most; first += kCopiesACall) {
      for (size_t i = 0; i < lanes.size(); ++i) {
        REFITD_RETURN_IF_ERROR(IssueBatch(*streams, lanes[i], first, streams->lanes[i]));
      }
    }
    return absl::OkStatus();
  }

  static absl::Status IssueBatch(const DeviceStreams& streams, const EngineCopies& copies,
                                 size_t first, CUstream lane) {
    if (first >= copies.bytes.size()) return absl::OkStatus();
    const size_t count = std::min(kCopiesACall, copies.bytes.size() - first);
    return streams.api.CopyMany(copies.destinations.data() + first, copies.sources.data() + first,
                                copies.bytes.data() + first, count, lane);
  }

  const std::shared_ptr<Run> run_;
  DeviceShare& part_;
  const bool readback_;
  DeviceQueue* const queue_;
  Buffer pinned_;   // staged bytes, later the results
  Buffer scratch_;  // counter and sums
  int64_t staged_ = 0;
  int64_t results_at_ = -1;
};

void Run::StartPhase(std::vector<DeviceShare>* parts, bool readback) {
  if (parts->empty()) return PhaseEnded(absl::OkStatus());
  {
    MutexLock lock(&mutex_);
    jobs_left_ = parts->size();
  }
  const std::shared_ptr<Run> self = shared_from_this();
  for (DeviceShare& part : *parts) {
    const std::shared_ptr<DeviceQueue> queue =
        engine_->Queue(part.tasks->device, after_ != nullptr);
    queue->Submit(std::make_shared<ShareJob>(self, &part, readback, queue.get()));
  }
}

// ---- transfers ----

// A submitted transfer or job counts as active while this object lives.
class Activity {
 public:
  explicit Activity(std::shared_ptr<Engine> engine) : engine_(std::move(engine)) {
    engine_->Enter();
  }
  ~Activity() { engine_->Leave(); }
  Activity(const Activity&) = delete;
  Activity& operator=(const Activity&) = delete;

 private:
  const std::shared_ptr<Engine> engine_;
};

struct TransferCall {
  std::shared_ptr<Activity> activity;  // first, so that it is destroyed last
  std::shared_ptr<const CudaPrepared> prepared;
  Verification verification = Verification::kOff;
  std::string label;
  std::function<void(TransferResult)> done;
};

bool WantsSums(const Transfer& transfer, Verification verification) {
  return verification != Verification::kOff || transfer.want_source_digests;
}

bool ReadbackNow(const Transfer& transfer, uint32_t destination) {
  return destination < transfer.readback_now.size() && transfer.readback_now[destination];
}

class TransferRun : public Run {
 public:
  TransferRun(std::shared_ptr<Engine> engine, std::shared_ptr<Planned> planned, TransferCall call)
      : Run(std::move(engine), std::move(planned), call.label,
            WantsSums(call.prepared->transfer, call.verification)),
        call_(std::move(call)) {}

 private:
  void Finish(absl::Status status, const Sums& sums, bool ended) override {
    TransferResult result;
    result.status = std::move(status);
    result.bytes_written = planned().plan.bytes;
    if (result.status.ok() && sums.fault != 0) result.status = FaultOf(sums.fault);
    if (result.status.ok()) Verify(sums, &result);
    if (transfer().want_source_digests && !sums.source.empty()) {
      const auto own = static_cast<std::ptrdiff_t>(planned().plan.sums.size());
      result.source_digests.assign(sums.source.begin() + own, sums.source.end());
    }
    // The caller may close the memory once `done` was called, so release it first (P8). Memory that
    // a device may still touch is kept (P6).
    if (ended) call_.prepared.reset();
    const auto done = std::move(call_.done);
    done(std::move(result));
  }

  absl::Status FaultOf(uint64_t fault) const {
    const BoundPiece& piece = transfer().source[(fault >> 32) - 1];
    const Derivation& derivation = *piece.held->derivation;
    const Dims element = ElementAt(derivation, static_cast<uint32_t>(fault));
    return Prefixed(
        NoResult(derivation, fmt::format("block from element [{}] on", fmt::join(element, ", "))),
        "{}", label());
  }

  // P1: the digests of two passes over memory must agree.
  void Verify(const Sums& sums, TransferResult* result) const {
    if (call_.verification == Verification::kOff) return;
    const std::vector<PieceDigest>& pieces = planned().plan.sums;
    const bool readback = call_.verification == Verification::kReadback;
    for (size_t i = 0; i < pieces.size(); ++i) {
      if (readback && !ReadbackNow(transfer(), pieces[i].destination)) {
        result->expected.push_back(pieces[i]);
        result->expected.back().digest = sums.source[i];
      } else if (sums.stored[i] != sums.source[i] && result->status.ok()) {
        result->failed_destination = static_cast<int>(pieces[i].destination);
        result->status = Mismatch(pieces[i], sums.source[i], sums.stored[i]);
      }
    }
  }

  absl::Status Mismatch(const PieceDigest& at, uint64_t expected, uint64_t found) const {
    const BoundPiece& piece = transfer().destinations[at.destination][at.piece];
    const bool readback = call_.verification == Verification::kReadback;
    return Error(absl::StatusCode::kDataLoss,
                 "{}: verification of \"{}\" at destination {} failed in the piece from element "
                 "{}: digest of the source is {:016x}, {} {:016x}",
                 label(), piece.name, at.destination, FirstIndex(piece.box, piece.shape), expected,
                 readback ? "read back" : "what was stored", found);
  }

  const Transfer& transfer() const { return call_.prepared->transfer; }

  TransferCall call_;
};

TransferResult Failed(size_t destinations, absl::Status status) {
  TransferResult result;
  result.status = std::move(status);
  result.bytes_written.resize(destinations);
  return result;
}

// ---- reading back ----

// A job in two halves, for pieces on devices and for others, each with its pieces' indices in the
// job. The first run plans the half on devices.
class CudaReadback : public PreparedReadback {
 public:
  // `job` has the pieces on devices, `host` (may be null) the other pieces.
  CudaReadback(ReadbackJob job, std::vector<size_t> on_device, std::vector<size_t> on_host,
               std::shared_ptr<const PreparedReadback> host)
      : job(std::move(job)),
        on_device(std::move(on_device)),
        on_host(std::move(on_host)),
        host(std::move(host)) {}

  absl::StatusOr<std::shared_ptr<Planned>> Plan(Engine* engine) const {
    return plan_.Get(engine,
                     [this](CopyAddresses* addresses) { return PlanReadback(job, addresses); });
  }
  std::shared_ptr<Planned> Kept() const { return plan_.Kept(); }

  // Returns the entries of `all` at these indices.
  static std::vector<uint64_t> Pick(const std::vector<uint64_t>& all,
                                    const std::vector<size_t>& indices) {
    std::vector<uint64_t> picked;
    picked.reserve(indices.size());
    for (const size_t i : indices) picked.push_back(all[i]);
    return picked;
  }

  const ReadbackJob job;
  const std::vector<size_t> on_device;
  const std::vector<size_t> on_host;
  const std::shared_ptr<const PreparedReadback> host;

 private:
  mutable KeptPlan plan_;
};

struct ReadbackCall {
  std::shared_ptr<Activity> activity;  // first, so that it is destroyed last
  std::shared_ptr<const CudaReadback> readback;
  std::vector<uint64_t> expected;
  std::function<void(ReadbackResult)> done;
};

class ReadbackRun : public Run {
 public:
  ReadbackRun(std::shared_ptr<Engine> engine, std::shared_ptr<Planned> planned, ReadbackCall call)
      : Run(std::move(engine), std::move(planned), "read back", true), call_(std::move(call)) {}

 private:
  void Finish(absl::Status status, const Sums& sums, bool /*ended*/) override {
    ReadbackResult result;
    result.status = std::move(status);
    if (result.status.ok()) {
      result = CompareReadback(call_.readback->job, call_.expected, sums.source);
    }
    const auto done = std::move(call_.done);
    done(std::move(result));
  }

  ReadbackCall call_;
};

// Runs the two halves of a job, each on its transport, and calls `done` when both ended.
class SplitReadback {
 public:
  explicit SplitReadback(std::function<void(ReadbackResult)> done) : done_(std::move(done)) {}

  void Ended(ReadbackResult half) {
    {
      MutexLock lock(&mutex_);
      std::vector<uint32_t>& failed = result_.failed_destinations;
      failed.insert(failed.end(), half.failed_destinations.begin(), half.failed_destinations.end());
      // An error has more information than a difference of bytes, so it takes precedence.
      if (result_.status.ok() ||
          (result_.status.code() == absl::StatusCode::kDataLoss && !half.status.ok() &&
           half.status.code() != absl::StatusCode::kDataLoss)) {
        result_.status = half.status;
      }
      if (--left_ > 0) return;
      std::sort(failed.begin(), failed.end());
      failed.erase(std::unique(failed.begin(), failed.end()), failed.end());
    }
    done_(std::move(result_));
  }

 private:
  const std::function<void(ReadbackResult)> done_;
  Mutex mutex_;
  int left_ = 2;
  ReadbackResult result_;
};

// ---- planning ----

class TransferJob : public PlanJob {
 public:
  TransferJob(std::shared_ptr<Engine> engine, TransferCall call)
      : engine_(std::move(engine)), call_(std::move(call)) {}

  void Plan() override { planned_ = call_.prepared->Plan(engine_.get(), call_.verification); }

  void Start() override {
    if (!planned_.ok()) return Fail(planned_.status());
    std::make_shared<TransferRun>(engine_, *std::move(planned_), std::move(call_))->Start();
  }

  // Nothing was issued, so release the memory first, as TransferRun::Finish does (P8).
  void Fail(const absl::Status& status) override {
    TransferResult failed = FailedBy(status);
    call_.prepared.reset();
    call_.done(std::move(failed));
  }

  void GiveUp(const absl::Status& status) override { call_.done(FailedBy(status)); }

 private:
  TransferResult FailedBy(const absl::Status& status) const {
    return Failed(call_.prepared->transfer.destinations.size(),
                  Prefixed(status, "{}", call_.label));
  }

  const std::shared_ptr<Engine> engine_;
  TransferCall call_;
  absl::StatusOr<std::shared_ptr<Planned>> planned_ = absl::UnknownError("not planned");
};

class ReadbackPlanJob : public PlanJob {
 public:
  ReadbackPlanJob(std::shared_ptr<Engine> engine, ReadbackCall call)
      : engine_(std::move(engine)), call_(std::move(call)) {}

  void Plan() override { planned_ = call_.readback->Plan(engine_.get()); }

  void Start() override {
    if (!planned_.ok()) return Fail(planned_.status());
    std::make_shared<ReadbackRun>(engine_, *std::move(planned_), std::move(call_))->Start();
  }

  void Fail(const absl::Status& status) override {
    call_.done({.status = status, .failed_destinations = {}});
  }

  void GiveUp(const absl::Status& status) override { Fail(status); }

 private:
  const std::shared_ptr<Engine> engine_;
  ReadbackCall call_;
  absl::StatusOr<std::shared_ptr<Planned>> planned_ = absl::UnknownError("not planned");
};

// ---- broadcasts through slots ----

// A broadcast: the relay and, once that was issued and the second transfer was planned, the second
// transfer, which waits on each device for the slot there. It is done when both have ended.
class BroadcastRun : public std::enable_shared_from_this<BroadcastRun> {
 public:
  BroadcastRun(std::shared_ptr<Engine> engine, const Transfer& transfer,
               std::function<void(TransferResult)> done)
      : engine_(std::move(engine)),
        label_(transfer.label),
        slots_(transfer.broadcast->slots.size()),
        wanted_(transfer.want_source_digests),
        destinations_(transfer.destinations.size()),
        done_(std::move(done)) {}

  // Called on the planning thread, before Planned(OK).
  absl::Status Plan(Transfer transfer) {
    const Verification verification = transfer.verification;
    auto prepared = std::make_shared<const CudaPrepared>(
        FromSlots(std::move(transfer), [this](const char* data) { return DeviceOf(data); }),
        /*few=*/true);
    REFITD_ASSIGN_OR_RETURN(auto planned, prepared->Plan(engine_.get(), verification));
    MutexLock lock(&mutex_);
    prepared_ = std::move(prepared);
    planned_ = std::move(planned);
    return absl::OkStatus();
  }

  // The two halves; the later one starts the second transfer, or fails it.
  void Planned(const absl::Status& status) { Arrive(status, nullptr); }
  void Issued(absl::StatusOr<std::shared_ptr<const Arrivals>> arrivals) {
    if (arrivals.ok()) {
      Arrive(absl::OkStatus(), *std::move(arrivals));
    } else {
      Arrive(arrivals.status(), nullptr);
    }
  }
  // The relay ended (RelayCalls::ended).
  void Relayed(const absl::Status& status) {
    {
      MutexLock lock(&mutex_);
      relayed_ = status;
    }
    FinishIfEnded();
  }

 private:
  // The device of an address; host memory has no device.
  int DeviceOf(const char* data) const {
    const auto region = engine_->memory().Find(data, 1);
    return region == nullptr ? CopyAddresses::kHostMemory : region->device();
  }

  void Arrive(const absl::Status& status, std::shared_ptr<const Arrivals> arrivals) {
    absl::Status outcome;
    std::shared_ptr<const CudaPrepared> prepared;
    std::shared_ptr<refitd::Planned> planned;
    {
      MutexLock lock(&mutex_);
      if (status_.ok()) status_ = status;
      if (arrivals != nullptr) arrivals_ = std::move(arrivals);
      if (++arrived_ < 2) return;
      outcome = status_;
      arrivals = std::move(arrivals_);
      prepared = std::move(prepared_);
      planned = std::move(planned_);
    }
    if (outcome.ok()) {
      return StartTransfer(std::move(prepared), std::move(planned), std::move(arrivals));
    }
    prepared.reset();  // releases memory first, as TransferJob::Fail does
    Transferred(Failed(destinations_, Prefixed(outcome, "{}", label_)));
  }

  void StartTransfer(std::shared_ptr<const CudaPrepared> prepared,
                     std::shared_ptr<refitd::Planned> planned,
                     std::shared_ptr<const Arrivals> arrivals) {
    TransferCall call{.activity = std::make_shared<Activity>(engine_),
                      .prepared = prepared,
                      .verification = prepared->transfer.verification,
                      .label = label_,
                      .done = [self = shared_from_this(), prepared](TransferResult result) mutable {
                        CompareSlots(prepared->transfer, self->slots_, self->wanted_, &result);
                        prepared.reset();  // the run keeps memory that a device may still touch
                        self->Transferred(std::move(result));
                      }};
    prepared.reset();
    std::make_shared<TransferRun>(engine_, std::move(planned), std::move(call))
        ->Start(std::move(arrivals));
  }

  void Transferred(TransferResult result) {
    {
      MutexLock lock(&mutex_);
      result_ = std::move(result);
    }
    FinishIfEnded();
  }

  // P6: a slot that no device unpacks may still be written when the second transfer has ended.
  void FinishIfEnded() {
    TransferResult result;
    {
      MutexLock lock(&mutex_);
      if (!relayed_.has_value() || !result_.has_value()) return;
      result = *std::exchange(result_, std::nullopt);
      // The relay's error is the cause: digests of a slot that was not filled differ too.
      if (!relayed_->ok()) {
        result = Failed(destinations_, Prefixed(*relayed_, "{}", label_));
      }
    }
    done_(std::move(result));
  }

  const std::shared_ptr<Engine> engine_;
  const std::string label_;
  const size_t slots_;
  const bool wanted_;
  const size_t destinations_;
  const std::function<void(TransferResult)> done_;
  Mutex mutex_;
  std::shared_ptr<const CudaPrepared> prepared_ ABSL_GUARDED_BY(mutex_);
  std::shared_ptr<refitd::Planned> planned_ ABSL_GUARDED_BY(mutex_);
  std::shared_ptr<const Arrivals> arrivals_ ABSL_GUARDED_BY(mutex_);
  int arrived_ ABSL_GUARDED_BY(mutex_) = 0;
  absl::Status status_ ABSL_GUARDED_BY(mutex_);
  std::optional<absl::Status> relayed_ ABSL_GUARDED_BY(mutex_);
  std::optional<TransferResult> result_ ABSL_GUARDED_BY(mutex_);
};

// Plans the relay and submits it; the second transfer is planned while the relay runs.
class BroadcastJob : public PlanJob {
 public:
  BroadcastJob(std::shared_ptr<Engine> engine, RelayQueue* relays, Transfer transfer,
               std::function<void(TransferResult)> done)
      : engine_(std::move(engine)),
        activity_(std::make_shared<Activity>(engine_)),
        relays_(relays),
        run_(std::make_shared<BroadcastRun>(engine_, transfer, std::move(done))),
        transfer_(std::move(transfer)) {}

  void Plan() override {
    absl::StatusOr<Relay> relay = PlanRelay();
    if (!relay.ok()) {
      planned_ = relay.status();
      return;
    }
    // GiveUp may have been called meanwhile; it then reports the failure of the relay.
    if (relayed_.exchange(true)) return;
    if (relay->runs.empty() || relay->slots.empty()) {
      run_->Issued(nullptr);  // there are no bytes or no slots
      run_->Relayed(absl::OkStatus());
    } else {
      relays_->Submit(*std::move(relay),
                      {.issued = [run = run_](const auto& arrivals) { run->Issued(arrivals); },
                       .ended = [run = run_, activity = activity_](
                                    const absl::Status& status) { run->Relayed(status); }});
    }
    planned_ = run_->Plan(std::move(transfer_));
  }

  void Start() override { Fail(planned_); }

  // Releases the transfer's memory, then fails both halves of the broadcast.
  void Fail(const absl::Status& status) override {
    transfer_ = Transfer();  // releases memory first, as TransferJob::Fail does
    GiveUp(status);
  }

  void GiveUp(const absl::Status& status) override {
    if (!relayed_.exchange(true)) {
      run_->Issued(status);
      run_->Relayed(status);
    }
    run_->Planned(status);
  }

 private:
  absl::StatusOr<Relay> PlanRelay() const {
    const Broadcast& broadcast = *transfer_.broadcast;
    Relay relay;
    relay.keep_alive = transfer_.keep_alive;
    REFITD_ASSIGN_OR_RETURN(relay.source, SourceDevice());
    int64_t slot_bytes = std::numeric_limits<int64_t>::max();
    for (const MemorySpan& slot : broadcast.slots) {
      const auto region = engine_->memory().Find(slot.data, slot.bytes);
      if (region == nullptr) return absl::InternalError("a slot is not on a device");
      relay.slots.push_back({region->device(), slot.data});
      relay.keep_alive.push_back(slot.keep_alive);
      slot_bytes = std::min(slot_bytes, slot.bytes);
    }
    // All chains visit the devices in the same cyclic order, so that two chains at once use
    // different halves of the links.
    std::sort(relay.slots.begin(), relay.slots.end(), [&](const auto& a, const auto& b) {
      return std::pair(a.device < relay.source, a.device) <
             std::pair(b.device < relay.source, b.device);
    });
    relay.method = broadcast.method;
    relay.slot_bytes = slot_bytes;
    relay.chunk_bytes = engine_->options().relay_chunk_bytes;
    REFITD_ASSIGN_OR_RETURN(relay.runs,
                            RunsOf(transfer_.source, broadcast.byte_offsets, slot_bytes));
    return relay;
  }

  absl::StatusOr<int> SourceDevice() const {
    std::optional<int> device;
    for (const BoundPiece& piece : transfer_.source) {
      const int64_t bytes = PieceSpan(piece);
      if (bytes == 0) continue;
      const auto region = engine_->memory().Find(piece.data, bytes);
      if (region == nullptr || (device.has_value() && *device != region->device())) {
        return Error(absl::StatusCode::kInternal,
                     "\"{}\" is not on the device from which all is to be broadcast", piece.name);
      }
      device = region->device();
    }
    return device.value_or(0);
  }

  const std::shared_ptr<Engine> engine_;
  const std::shared_ptr<Activity> activity_;
  RelayQueue* const relays_;
  const std::shared_ptr<BroadcastRun> run_;
  Transfer transfer_;  // used by the planning thread only
  absl::Status planned_;
  std::atomic<bool> relayed_ = false;
};

// ---- the transport ----

class CudaTransport : public Transport, public CommunicatorsOwner {
 public:
  // `nccl` may be null.
  CudaTransport(std::shared_ptr<Engine> engine, std::unique_ptr<RelayQueue> relays,
                std::shared_ptr<NcclBroadcasts> nccl, std::unique_ptr<Transport> host)
      : engine_(std::move(engine)),
        relays_(std::move(relays)),
        nccl_(std::move(nccl)),
        host_(std::move(host)) {
    if (nccl_ == nullptr) return;
    engine_->memory().WatchPools(this,
                                 [nccl = nccl_](const DeviceRegion& pool) { nccl->LetGo(pool); });
  }

  ~CudaTransport() override {
    engine_->memory().UnwatchPools(this);
    const Clock::time_point deadline = Clock::now() + engine_->options().limit;
    engine_->Stop();
    // Engine::Stop waited for the devices, so a relay that still runs now hangs. If no relay runs,
    // the threads of `relays_` end at once, well within kGrace.
    constexpr auto kGrace = std::chrono::milliseconds(100);
    relays_->Stop(std::max(deadline, Clock::now() + kGrace));
    // The destructor of `host_` waits for its own work.
  }

  std::vector<CommunicatorStatus> Communicators() const override {
    return nccl_ != nullptr ? nccl_->Describe() : std::vector<CommunicatorStatus>();
  }

  absl::Status CanBroadcast(BroadcastMethod method) const override {
    if (method == BroadcastMethod::kDirect) return absl::OkStatus();
    if (method == BroadcastMethod::kChain) return engine_->AllReach();
    if (nccl_ != nullptr) return nccl_->Can(method);
    return absl::UnimplementedError(engine_->options().no_nccl);
  }

  void Submit(Transfer transfer, std::function<void(TransferResult)> done) override {
    if (transfer.broadcast.has_value()) {
      engine_->planner()->Submit(std::make_shared<BroadcastJob>(
          engine_, relays_.get(), std::move(transfer), std::move(done)));
      return;
    }
    if (AllHost(transfer)) return host_->Submit(std::move(transfer), std::move(done));
    const Verification verification = transfer.verification;
    std::string label = transfer.label;
    Start({.activity = std::make_shared<Activity>(engine_),
           .prepared = std::make_shared<const CudaPrepared>(std::move(transfer)),
           .verification = verification,
           .label = std::move(label),
           .done = std::move(done)});
  }

  absl::StatusOr<std::shared_ptr<const PreparedTransfer>> Prepare(Transfer transfer) override {
    if (AllHost(transfer)) {
      REFITD_ASSIGN_OR_RETURN(auto prepared, host_->Prepare(std::move(transfer)));
      return std::make_shared<const HostPrepared>(std::move(prepared));
    }
    const Verification verification = transfer.verification;
    auto prepared = std::make_shared<const CudaPrepared>(std::move(transfer));
    REFITD_RETURN_IF_ERROR(prepared->Plan(engine_.get(), verification).status());
    return prepared;
  }

  void Replay(const std::shared_ptr<const PreparedTransfer>& prepared, Verification verification,
              std::string label, std::function<void(TransferResult)> done) override {
    if (const auto* host = dynamic_cast<const HostPrepared*>(prepared.get())) {
      return host_->Replay(host->prepared, verification, std::move(label), std::move(done));
    }
    Start({.activity = std::make_shared<Activity>(engine_),
           .prepared = std::static_pointer_cast<const CudaPrepared>(prepared),
           .verification = verification,
           .label = std::move(label),
           .done = std::move(done)});
  }

  void Submit(ReadbackJob job, std::function<void(ReadbackResult)> done) override {
    std::vector<uint64_t> expected;
    expected.reserve(job.pieces.size());
    for (const ReadbackPiece& piece : job.pieces) expected.push_back(piece.expected);
    Replay(Prepare(std::move(job)), std::move(expected), std::move(done));
  }

  std::shared_ptr<const PreparedReadback> Prepare(ReadbackJob job) override {
    ReadbackJob device_job{.pieces = {}, .keep_alive = job.keep_alive};
    ReadbackJob host_job{.pieces = {}, .keep_alive = std::move(job.keep_alive)};
    std::vector<size_t> on_device;
    std::vector<size_t> on_host;
    for (size_t i = 0; i < job.pieces.size(); ++i) {
      const bool host = OnHost(job.pieces[i].piece);
      (host ? host_job : device_job).pieces.push_back(std::move(job.pieces[i]));
      (host ? on_host : on_device).push_back(i);
    }
    std::shared_ptr<const PreparedReadback> host;
    if (!on_host.empty() || on_device.empty()) host = host_->Prepare(std::move(host_job));
    return std::make_shared<const CudaReadback>(std::move(device_job), std::move(on_device),
                                                std::move(on_host), std::move(host));
  }

  void Replay(const std::shared_ptr<const PreparedReadback>& prepared,
              std::vector<uint64_t> expected, std::function<void(ReadbackResult)> done) override {
    auto readback = std::static_pointer_cast<const CudaReadback>(prepared);
    REFITD_CHECK(expected.size() == readback->on_device.size() + readback->on_host.size());
    if (readback->on_device.empty()) {
      return host_->Replay(readback->host, std::move(expected), std::move(done));
    }
    if (readback->host == nullptr) {
      return Start(std::move(readback), std::move(expected), std::move(done));
    }
    auto split = std::make_shared<SplitReadback>(std::move(done));
    const auto half = [split](ReadbackResult result) { split->Ended(std::move(result)); };
    host_->Replay(readback->host, CudaReadback::Pick(expected, readback->on_host), half);
    std::vector<uint64_t> of_devices = CudaReadback::Pick(expected, readback->on_device);
    Start(std::move(readback), std::move(of_devices), half);
  }

 private:
  bool OnHost(const BoundPiece& piece) const {
    if (piece.held != nullptr) {
      const std::vector<BoundPiece>& shards = piece.held->shards;
      return std::all_of(shards.begin(), shards.end(),
                         [this](const BoundPiece& shard) { return OnHost(shard); });
    }
    return PieceSpan(piece) == 0 || engine_->memory().Find(piece.data, 1) == nullptr;
  }

  bool AllHost(const Transfer& transfer) const {
    const auto all = [this](const std::vector<BoundPiece>& pieces) {
      return std::all_of(pieces.begin(), pieces.end(),
                         [this](const BoundPiece& piece) { return OnHost(piece); });
    };
    return all(transfer.source) &&
           std::all_of(transfer.destinations.begin(), transfer.destinations.end(), all);
  }

  // Whether the caller's thread may start the run: the plan is kept, and has parts. Without parts
  // `done` would be called on the caller's thread.
  static bool CanStart(const std::shared_ptr<Planned>& planned) {
    return planned != nullptr && !planned->parts.empty();
  }

  void Start(TransferCall call) {
    if (auto planned = call.prepared->Kept(call.verification); CanStart(planned)) {
      return std::make_shared<TransferRun>(engine_, std::move(planned), std::move(call))->Start();
    }
    engine_->planner()->Submit(std::make_shared<TransferJob>(engine_, std::move(call)));
  }

  void Start(std::shared_ptr<const CudaReadback> readback, std::vector<uint64_t> expected,
             std::function<void(ReadbackResult)> done) {
    ReadbackCall call{std::make_shared<Activity>(engine_), std::move(readback), std::move(expected),
                      std::move(done)};
    if (auto planned = call.readback->Kept(); CanStart(planned)) {
      return std::make_shared<ReadbackRun>(engine_, std::move(planned), std::move(call))->Start();
    }
    engine_->planner()->Submit(std::make_shared<ReadbackPlanJob>(engine_, std::move(call)));
  }

  const std::shared_ptr<Engine> engine_;
  const std::unique_ptr<RelayQueue> relays_;
  const std::shared_ptr<NcclBroadcasts> nccl_;
  const std::unique_ptr<Transport> host_;
};

}  // namespace

absl::StatusOr<std::unique_ptr<Transport>> MakeCudaTransport(std::shared_ptr<CudaMemory> memory,
                                                             std::unique_ptr<Transport> host,
                                                             const CudaTransportOptions& options,
                                                             std::string_view kernel) {
  if (kernel.empty())
    return absl::UnimplementedError("built without nvcc: there is no copy kernel");
  auto* const owner = dynamic_cast<CudaContextsOwner*>(memory.get());
  if (owner == nullptr) return absl::InvalidArgumentError("not a memory of CudaMemory::Create");
  std::shared_ptr<CudaContexts> contexts = owner->contexts();
  std::shared_ptr<NcclBroadcasts> nccl;
  if (options.nccl != nullptr) {
    nccl = std::make_shared<NcclBroadcasts>(
        options.nccl, memory,
        NcclBroadcasts::Options{.limit = options.limit,
                                .copy_engines = options.symmetric_copy_engines,
                                .lost = options.lost});
  }
  auto relays = std::make_unique<RelayQueue>(
      memory, contexts,
      RelayQueue::Options{.limit = options.limit, .lost = options.lost, .nccl = nccl});
  return std::make_unique<CudaTransport>(
      std::make_shared<Engine>(std::move(memory), std::move(contexts), options, kernel),
      std::move(relays), std::move(nccl), std::move(host));
}

#else

absl::StatusOr<std::unique_ptr<Transport>> MakeCudaTransport(
    // NOLINTNEXTLINE(performance-unnecessary-value-param): taken where there is CUDA
    std::shared_ptr<CudaMemory> /*memory*/, std::unique_ptr<Transport> /*host*/,
    const CudaTransportOptions& /*options*/, std::string_view /*kernel*/) {
  return absl::UnimplementedError(CudaBuild());
}

#endif

}  // namespace refitd
