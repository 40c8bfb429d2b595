#include "transport/cuda/nccl/communicator.h"

#include "transport/base/failure.h"

#if defined(REFITD_CUDA)
#include <fmt/format.h>
#include <fmt/ranges.h>

#include <algorithm>
#include <map>
#include <optional>
#include <utility>

#include "transport/base/status.h"
#include "transport/cuda/nccl/listener.h"
#include "transport/cuda/nccl/nccl.h"

namespace refitd {
namespace {

using Clock = Communicator::Clock;

constexpr size_t kWarmUpBytes = 16;  // of each rank

// Whether the status says that nothing was done.
bool Refuses(const absl::Status& status) {
  return absl::IsInvalidArgument(status) || absl::IsUnimplemented(status) ||
         absl::IsResourceExhausted(status);
}

// The memory and stream that a communicator's first collectives need on a device; freed at the end.
class WarmUpRank {
 public:
  WarmUpRank(const CudaApi& api, CUcontext context) : api_(api), context_(context) {}
  WarmUpRank(const WarmUpRank&) = delete;
  WarmUpRank& operator=(const WarmUpRank&) = delete;
  ~WarmUpRank() {
    const ScopedContext current(api_, context_);
    if (!current.status().ok()) return;
    if (event_ != nullptr) (void)api_.cuEventDestroy(event_);
    if (stream_ != nullptr) (void)api_.cuStreamDestroy(stream_);
    if (data_ != 0) (void)api_.cuMemFree(data_);
  }

  absl::Status Make(size_t bytes) {
    const ScopedContext current(api_, context_);
    REFITD_RETURN_IF_ERROR(current.status());
    REFITD_RETURN_IF_ERROR(REFITD_CUDA_CALL(api_, cuMemAlloc, &data_, bytes));
    REFITD_RETURN_IF_ERROR(
        REFITD_CUDA_CALL(api_, cuStreamCreate, &stream_, CU_STREAM_NON_BLOCKING));
    return REFITD_CUDA_CALL(api_, cuEventCreate, &event_, CU_EVENT_DISABLE_TIMING);
  }
  absl::Status Record() {
    const ScopedContext current(api_, context_);
    REFITD_RETURN_IF_ERROR(current.status());
    return REFITD_CUDA_CALL(api_, cuEventRecord, event_, stream_);
  }
  absl::StatusOr<bool> Ended() {
    const ScopedContext current(api_, context_);
    REFITD_RETURN_IF_ERROR(current.status());
    const CUresult result = api_.cuEventQuery(event_);
    if (result == CUDA_ERROR_NOT_READY) return false;
    REFITD_RETURN_IF_ERROR(api_.Check("cuEventQuery", result));
    return true;
  }
  // Leaves the memory allocated, because it is not known whether the device has ended the work that
  // uses it.
  void Abandon() {
    data_ = 0;
    stream_ = nullptr;
    event_ = nullptr;
  }

  char* data() const { return reinterpret_cast<char*>(data_); }
  CUstream stream() const { return stream_; }

 private:
  const CudaApi& api_;
  const CUcontext context_;
  CUdeviceptr data_ = 0;
  CUstream stream_ = nullptr;
  CUevent event_ = nullptr;
};

}  // namespace

// The state of a communicator, shared with calls on the communicator thread, which may outlive the
// communicator.
class Communicator::State : public std::enable_shared_from_this<State> {
 public:
  State(std::shared_ptr<const NcclApi> api, std::shared_ptr<CudaContexts> contexts,
        std::shared_ptr<NcclThread> thread, std::shared_ptr<LostContext> lost,
        std::chrono::milliseconds clean_up, const CommunicatorOptions& options, uint64_t number)
      : api_(std::move(api)),
        contexts_(std::move(contexts)),
        thread_(std::move(thread)),
        lost_(std::move(lost)),
        clean_up_(clean_up),
        devices_(options.devices),
        copy_engines_(options.copy_engines),
        number_(number) {}
  // If the ranks were not freed, the communicator thread ended before it could free them.
  ~State() {
    for (const auto& rank : warm_up_) rank->Abandon();
  }
  State(const State&) = delete;
  State& operator=(const State&) = delete;

  const std::vector<int>& devices() const { return devices_; }
  bool symmetric() const { return api_->ncclCommWindowRegister != nullptr; }
  int api_version() const { return api_->version; }

  absl::Status status() const {
    MutexLock lock(&mutex_);
    return status_;
  }

  CommunicatorStatus Describe() const {
    MutexLock lock(&mutex_);
    return {.number = number_,
            .devices = devices_,
            .copy_engines = copy_engines_,
            .windows = open_windows_,
            .window_bytes = open_bytes_,
            .status = status_};
  }

  // Runs `call` on the communicator thread, if the communicator is usable then; poisons the
  // communicator if the call fails or is late. `call` may go on after this returned.
  absl::Status Run(const std::string& what, Clock::time_point deadline,
                   const std::function<absl::Status(State*)>& call) {
    bool began = false;
    const std::string name = fmt::format("{} of {}", what, Name());
    const absl::Status status = thread_->Run(
        name, deadline,
        [self = shared_from_this(), call, name] {
          REFITD_RETURN_IF_ERROR(self->status());
          absl::Status done = self->lost_->Note(call(self.get()));
          if (done.ok()) return done;
          done = Prefixed(done, "{}", name);
          if (!Refuses(done)) self->Poison(done);
          return done;
        },
        &began);
    if (status.ok() || Refuses(status)) return status;
    if (began && absl::IsDeadlineExceeded(status)) Poison(status);
    return status;
  }

  // Makes the communicator unusable; it is freed after the calls that its thread has queued.
  void Poison(const absl::Status& why) {
    {
      MutexLock lock(&mutex_);
      if (!status_.ok()) return;
      status_ = Prefixed(why, "{} is no longer usable", Name());
    }
    const Clock::time_point deadline = Clock::now() + clean_up_;
    thread_->Post("the end of " + Name(), deadline, [self = shared_from_this(), deadline] {
      (void)self->GiveBack(/*idle=*/false, deadline);
    });
  }

  absl::Status Close(Clock::time_point deadline) {
    REFITD_RETURN_IF_ERROR(BeginToClose());
    bool began = false;
    const absl::Status closed = thread_->Run(
        "the end of " + Name(), deadline,
        [self = shared_from_this(), deadline] { return self->GiveBack(/*idle=*/true, deadline); },
        &began);
    if (closed.ok() || began) return closed;
    // Closing was not even begun, so post it behind everything else.
    PostEnd(Clock::now() + clean_up_);
    return closed;
  }

  void CloseLater(Clock::time_point deadline) {
    if (BeginToClose().ok()) PostEnd(deadline);
  }

  void DeregisterLater(WindowId id, Clock::time_point deadline) {
    const std::string name = fmt::format("giving back a window of {}", Name());
    thread_->Post(name, deadline, [self = shared_from_this(), id, name] {
      if (!self->status().ok()) return;  // all windows are freed with the communicator
      const absl::Status gone = self->lost_->Note(self->Deregister(id));
      if (!gone.ok()) self->Poison(Prefixed(gone, "{}", name));
    });
  }

  // Returns an error if the communicator is not usable any more.
  absl::Status BeginToClose() {
    MutexLock lock(&mutex_);
    if (!status_.ok()) return status_;
    status_ = Error(absl::StatusCode::kFailedPrecondition, "{} is closed", Name());
    return absl::OkStatus();
  }

  void PostEnd(Clock::time_point deadline) {
    thread_->Post("the end of " + Name(), deadline, [self = shared_from_this(), deadline] {
      (void)self->GiveBack(/*idle=*/true, deadline);
    });
  }

  // ---- on the communicator thread ----

  absl::Status Init(Clock::time_point deadline) {
    for (const int device : devices_) {
      REFITD_ASSIGN_OR_RETURN(const CUcontext context, contexts_->GetWithStack(device));
      ranks_.push_back({.device = device, .context = context});
    }
    NcclUniqueId id;
    REFITD_RETURN_IF_ERROR(REFITD_NCCL_CALL(*api_, ncclGetUniqueId, &id));
    listens_ = id;
    NcclConfig config;
    config.blocking = 0;
    config.max_ctas = kMostCtas;
    config.cta_policy = copy_engines_ ? kNcclPolicyZero : kNcclPolicyDefault;
    REFITD_RETURN_IF_ERROR(Grouped(deadline, "making it", [&](size_t rank) {
      return REFITD_NCCL_CALL(*api_, ncclCommInitRankConfig, &ranks_[rank].comm,
                              static_cast<int>(ranks_.size()), id, static_cast<int>(rank), &config);
    }));
    made_ = true;
    listens_.reset();
    return WarmUp(deadline);
  }

  absl::Status Register(const std::vector<std::shared_ptr<const DeviceRegion>>& regions,
                        Clock::time_point deadline, WindowId* id) {
    if (windows_.size() >= kMaxCommunicatorWindows) {
      return Error(absl::StatusCode::kResourceExhausted, "it has {} windows already",
                   windows_.size());
    }
    for (const auto& [other, window] : windows_) {
      for (size_t rank = 0; rank < regions.size(); ++rank) {
        if (window.regions[rank]->data() != regions[rank]->data()) continue;
        return Error(absl::StatusCode::kInvalidArgument,
                     "the region of device {} is in window {} already", devices_[rank], other);
      }
    }
    // Record the window before calling NCCL, so that it is freed from here whatever the call's
    // result.
    *id = next_window_++;
    Window& window = windows_[*id];
    window.regions = regions;
    window.handles.resize(ranks_.size());
    const auto bytes = static_cast<size_t>(regions[0]->bytes());
    REFITD_RETURN_IF_ERROR(Grouped(deadline, "registering a window", [&](size_t rank) {
      return REFITD_NCCL_CALL(*api_, ncclCommWindowRegister, ranks_[rank].comm,
                              regions[rank]->data(), bytes, &window.handles[rank],
                              kNcclWindowSymmetric);
    }));
    const auto none = std::count(window.handles.begin(), window.handles.end(), nullptr);
    if (none == 0) {
      CountWindows();
      return absl::OkStatus();
    }
    if (static_cast<size_t>(none) < window.handles.size()) {
      return Error(absl::StatusCode::kInternal, "NCCL made windows on some devices only");
    }
    windows_.erase(*id);
    return Error(absl::StatusCode::kUnimplemented,
                 "NCCL has no symmetric memory on devices {}: not all reach each other, or it has "
                 "been turned off",
                 fmt::join(devices_, ", "));
  }

  absl::Status Deregister(WindowId id) {
    const auto it = windows_.find(id);
    if (it == windows_.end()) return NoWindow(id);
    REFITD_RETURN_IF_ERROR(Deregister(&it->second));
    windows_.erase(it);
    CountWindows();
    return absl::OkStatus();
  }

  absl::Status Issue(const BroadcastCall& call, Clock::time_point deadline) {
    return Grouped(deadline, "a broadcast", [&](size_t rank) {
      return REFITD_NCCL_CALL(*api_, ncclBroadcast,
                              static_cast<int>(rank) == call.root ? call.send : call.receive[rank],
                              call.receive[rank], static_cast<size_t>(call.bytes),
                              NcclDataType::kInt8, call.root, ranks_[rank].comm,
                              call.streams[rank]);
    });
  }

  absl::Status Issue(const AllGatherCall& call, Clock::time_point deadline) {
    const auto it = windows_.find(call.window);
    if (it == windows_.end()) return NoWindow(call.window);
    const std::vector<std::shared_ptr<const DeviceRegion>>& regions = it->second.regions;
    const auto ranks = static_cast<int64_t>(ranks_.size());
    const int64_t size = regions[0]->bytes();
    if (call.byte_offset > size || call.bytes > (size - call.byte_offset) / ranks) {
      return Error(absl::StatusCode::kInvalidArgument,
                   "{} shares of {} bytes at {} of a window of {}", ranks, call.bytes,
                   call.byte_offset, size);
    }
    return Grouped(deadline, "an all-gather", [&](size_t rank) {
      char* const all = regions[rank]->data() + call.byte_offset;
      return REFITD_NCCL_CALL(*api_, ncclAllGather, all + static_cast<int64_t>(rank) * call.bytes,
                              all, static_cast<size_t>(call.bytes), NcclDataType::kInt8,
                              ranks_[rank].comm, call.streams[rank]);
    });
  }

 private:
  struct Rank {
    int device = 0;
    CUcontext context = nullptr;
    NcclComm comm = nullptr;
  };
  struct Window {
    std::vector<std::shared_ptr<const DeviceRegion>> regions;  // P6: held until NCCL let go of them
    std::vector<NcclWindow> handles;
  };

  std::string Name() const {
    return fmt::format("communicator {} (devices {})", number_, fmt::join(devices_, ", "));
  }

  static absl::Status NoWindow(WindowId id) {
    return Error(absl::StatusCode::kInvalidArgument, "there is no window {}", id);
  }

  // Makes one call for every rank, in one group, and waits until it is done.
  absl::Status Grouped(Clock::time_point deadline, const char* what,
                       const std::function<absl::Status(size_t)>& call) {
    REFITD_RETURN_IF_ERROR(REFITD_NCCL_CALL(*api_, ncclGroupStart));
    absl::Status first;
    for (size_t rank = 0; rank < ranks_.size() && first.ok(); ++rank) {
      const ScopedContext current(contexts_->api(), ranks_[rank].context);
      first = current.status();
      if (first.ok()) first = call(rank);
      if (!first.ok()) {
        first = Prefixed(first, "device {}", ranks_[rank].device);
      }
    }
    // A group that was begun must be ended, even after an error.
    const absl::Status ended = REFITD_NCCL_CALL(*api_, ncclGroupEnd);
    REFITD_RETURN_IF_ERROR(first);
    REFITD_RETURN_IF_ERROR(ended);
    return WaitUntilReady(deadline, what);
  }

  // P4: polls, because NCCL's own threads do the work.
  absl::Status WaitUntilReady(Clock::time_point deadline, const char* what) {
    const Clock::time_point begun = Clock::now();
    for (const Rank& rank : ranks_) {
      while (true) {
        NcclResult result = NcclResult::kSuccess;
        REFITD_RETURN_IF_ERROR(REFITD_NCCL_CALL(*api_, ncclCommGetAsyncError, rank.comm, &result));
        if (result == NcclResult::kSuccess) break;
        if (result != NcclResult::kInProgress) {
          const absl::Status failed = api_->Check(what, result);
          return Prefixed(failed, "device {}", rank.device);
        }
        if (Clock::now() >= deadline) {
          return Error(absl::StatusCode::kDeadlineExceeded,
                       "{} was not done in time: NCCL waits for device {}", what, rank.device);
        }
        PauseOfPoll(begun);
      }
    }
    return absl::OkStatus();
  }

  // Runs a first collective, because NCCL connects the ranks at that, and not when a window is
  // registered.
  absl::Status WarmUp(Clock::time_point deadline) {
    for (const Rank& rank : ranks_) {
      warm_up_.push_back(std::make_unique<WarmUpRank>(contexts_->api(), rank.context));
      REFITD_RETURN_IF_ERROR(warm_up_.back()->Make(kWarmUpBytes * ranks_.size()));
    }
    REFITD_RETURN_IF_ERROR(Grouped(deadline, "the first all-gather", [this](size_t rank) {
      char* const all = warm_up_[rank]->data();
      return REFITD_NCCL_CALL(*api_, ncclAllGather, all + rank * kWarmUpBytes, all, kWarmUpBytes,
                              NcclDataType::kInt8, ranks_[rank].comm, warm_up_[rank]->stream());
    }));
    REFITD_RETURN_IF_ERROR(Grouped(deadline, "the first broadcast", [this](size_t rank) {
      char* const data = warm_up_[rank]->data();
      return REFITD_NCCL_CALL(*api_, ncclBroadcast, data, data, kWarmUpBytes, NcclDataType::kInt8,
                              0, ranks_[rank].comm, warm_up_[rank]->stream());
    }));
    REFITD_RETURN_IF_ERROR(WaitForDevices(deadline));
    warm_up_.clear();
    return absl::OkStatus();
  }

  absl::Status WaitForDevices(Clock::time_point deadline) {
    for (const auto& rank : warm_up_) REFITD_RETURN_IF_ERROR(rank->Record());
    const Clock::time_point begun = Clock::now();
    for (size_t rank = 0; rank < warm_up_.size(); ++rank) {
      while (true) {
        REFITD_ASSIGN_OR_RETURN(const bool ended, warm_up_[rank]->Ended());
        if (ended) break;
        if (Clock::now() >= deadline) {
          return Error(absl::StatusCode::kDeadlineExceeded,
                       "the first collective was not done in time: device {} is at it",
                       ranks_[rank].device);
        }
        PauseOfPoll(begun);
      }
    }
    return absl::OkStatus();
  }

  absl::Status Deregister(Window* window) {
    for (size_t rank = 0; rank < ranks_.size(); ++rank) {
      if (window->handles[rank] == nullptr) continue;
      const ScopedContext current(contexts_->api(), ranks_[rank].context);
      REFITD_RETURN_IF_ERROR(current.status());
      REFITD_RETURN_IF_ERROR(REFITD_NCCL_CALL(*api_, ncclCommWindowDeregister, ranks_[rank].comm,
                                              window->handles[rank]));
      window->handles[rank] = nullptr;
    }
    return absl::OkStatus();
  }

  // Frees the communicator. `idle`: the devices have no work of it left; otherwise NCCL is told to
  // end that work.
  absl::Status GiveBack(bool idle, Clock::time_point deadline) {
    for (auto it = windows_.begin(); it != windows_.end();) {
      it = IsOpen(it->second) ? std::next(it) : windows_.erase(it);
    }
    // A window must be freed before its communicator, or its memory stays held, and must not be
    // freed while a device may use it.
    absl::Status status;
    if (!idle && !windows_.empty()) {
      status = Revoke(deadline);
      idle = status.ok();
    }
    if (status.ok()) status = DeregisterAll();
    if (status.ok()) {
      status = DestroyAll(idle && made_);
      warm_up_.clear();
      if (listens_.has_value()) {
        StopListening(*api_, contexts_->api(), ranks_[0].context, *listens_, clean_up_);
      }
      return status;
    }
    status = Prefixed(status, "the end of {}", Name());
    KeepForever();
    lost_->Lose(status);
    return status;
  }

  // NCCL 2.28.9 revokes a communicator safely only if its last group has ended well; after another
  // group it keeps a reference to memory that it frees.
  absl::Status Revoke(Clock::time_point deadline) {
    REFITD_RETURN_IF_ERROR(WaitUntilReady(deadline, "its last call"));
    return Grouped(deadline, "ending its work", [this](size_t rank) {
      return REFITD_NCCL_CALL(*api_, ncclCommRevoke, ranks_[rank].comm, kNcclRevokeDefault);
    });
  }

  static bool IsOpen(const Window& window) {
    return std::any_of(window.handles.begin(), window.handles.end(),
                       [](NcclWindow handle) { return handle != nullptr; });
  }

  absl::Status DeregisterAll() {
    for (auto& [id, window] : windows_) REFITD_RETURN_IF_ERROR(Deregister(&window));
    windows_.clear();
    CountWindows();
    return absl::OkStatus();
  }

  // Destroys the ranks one after the other; the last rank's call frees what they share.
  absl::Status DestroyAll(bool orderly) {
    absl::Status first;
    for (Rank& rank : ranks_) {
      const NcclComm comm = std::exchange(rank.comm, nullptr);
      if (comm == nullptr) continue;
      const ScopedContext current(contexts_->api(), rank.context);
      const absl::Status gone = orderly ? REFITD_NCCL_CALL(*api_, ncclCommDestroy, comm)
                                        : REFITD_NCCL_CALL(*api_, ncclCommAbort, comm);
      if (first.ok()) first = gone;
    }
    return first;
  }

  // Keeps memory that a device may still use, and the regions (P6).
  void KeepForever() {
    static Mutex* const mutex = new Mutex;
    static auto* const kept = new std::vector<std::shared_ptr<State>>;
    MutexLock lock(mutex);
    kept->push_back(shared_from_this());
  }

  void CountWindows() {
    MutexLock lock(&mutex_);
    open_windows_ = static_cast<int>(windows_.size());
    open_bytes_ = 0;
    for (const auto& [id, window] : windows_) open_bytes_ += window.regions[0]->bytes();
  }

  const std::shared_ptr<const NcclApi> api_;
  const std::shared_ptr<CudaContexts> contexts_;
  const std::shared_ptr<NcclThread> thread_;
  const std::shared_ptr<LostContext> lost_;
  const std::chrono::milliseconds clean_up_;
  const std::vector<int> devices_;
  const bool copy_engines_;
  const uint64_t number_;

  // Used by the communicator thread only.
  std::vector<Rank> ranks_;
  std::map<WindowId, Window> windows_;
  WindowId next_window_ = 1;
  bool made_ = false;
  std::optional<NcclUniqueId> listens_;  // P8: NCCL listens for this id until all ranks have come
  // Kept until the devices have ended the first collective.
  std::vector<std::unique_ptr<WarmUpRank>> warm_up_;

  mutable Mutex mutex_;
  absl::Status status_ ABSL_GUARDED_BY(mutex_);
  int open_windows_ ABSL_GUARDED_BY(mutex_) = 0;
  int64_t open_bytes_ ABSL_GUARDED_BY(mutex_) = 0;
};

// ---- one communicator ----

Communicator::~Communicator() { Abort(absl::CancelledError("it was not closed")); }

const std::vector<int>& Communicator::devices() const { return state_->devices(); }
absl::Status Communicator::status() const { return state_->status(); }
void Communicator::Abort(const absl::Status& why) { state_->Poison(why); }
absl::Status Communicator::Close(Clock::time_point deadline) { return state_->Close(deadline); }
void Communicator::CloseLater(Clock::time_point deadline) { state_->CloseLater(deadline); }

absl::StatusOr<Communicator::WindowId> Communicator::RegisterWindow(
    const std::vector<std::shared_ptr<const DeviceRegion>>& regions, Clock::time_point deadline) {
  if (!state_->symmetric()) {
    return Error(absl::StatusCode::kUnimplemented, "symmetric memory needs NCCL {}: this is {}",
                 NcclVersionText(kNcclSymmetricFloor), NcclVersionText(state_->api_version()));
  }
  if (regions.size() != devices().size()) {
    return Error(absl::StatusCode::kInvalidArgument, "{} regions for {} devices", regions.size(),
                 devices().size());
  }
  for (size_t rank = 0; rank < regions.size(); ++rank) {
    if (regions[rank] == nullptr || regions[rank]->device() != devices()[rank]) {
      return Error(absl::StatusCode::kInvalidArgument, "region {} is not on device {}", rank,
                   devices()[rank]);
    }
    if (regions[rank]->bytes() == regions[0]->bytes()) continue;
    return Error(absl::StatusCode::kInvalidArgument,
                 "the region of device {} has {} bytes, that of device {} {}", devices()[rank],
                 regions[rank]->bytes(), devices()[0], regions[0]->bytes());
  }
  const auto id = std::make_shared<WindowId>(0);
  REFITD_RETURN_IF_ERROR(
      state_->Run("registering a window", deadline, [regions, deadline, id](State* state) {
        return state->Register(regions, deadline, id.get());
      }));
  return *id;
}

absl::Status Communicator::DeregisterWindow(WindowId window, Clock::time_point deadline) {
  return state_->Run("giving back a window", deadline,
                     [window](State* state) { return state->Deregister(window); });
}

void Communicator::DeregisterLater(WindowId window, Clock::time_point deadline) {
  state_->DeregisterLater(window, deadline);
}

namespace {

absl::Status CheckStreams(const std::vector<CUstream>& streams, const std::vector<int>& devices) {
  if (streams.size() != devices.size()) {
    return Error(absl::StatusCode::kInvalidArgument, "{} streams for {} devices", streams.size(),
                 devices.size());
  }
  const auto null = std::find(streams.begin(), streams.end(), nullptr);
  if (null == streams.end()) return absl::OkStatus();
  return Error(absl::StatusCode::kInvalidArgument, "the stream of device {} is null",
               devices[static_cast<size_t>(null - streams.begin())]);
}

}  // namespace

absl::Status Communicator::Broadcast(const BroadcastCall& call, Clock::time_point deadline) {
  REFITD_RETURN_IF_ERROR(CheckStreams(call.streams, devices()));
  if (call.root < 0 || static_cast<size_t>(call.root) >= devices().size() || call.bytes < 0 ||
      call.send == nullptr) {
    return Error(absl::StatusCode::kInvalidArgument, "a broadcast of {} bytes from rank {} of {}{}",
                 call.bytes, call.root, devices().size(),
                 call.send == nullptr ? ", from null" : "");
  }
  if (call.receive.size() != devices().size() ||
      std::find(call.receive.begin(), call.receive.end(), nullptr) != call.receive.end()) {
    return Error(absl::StatusCode::kInvalidArgument, "{} pointers for {} devices, or one is null",
                 call.receive.size(), devices().size());
  }
  if (call.bytes == 0) return status();
  return state_->Run("a broadcast", deadline,
                     [call, deadline](State* state) { return state->Issue(call, deadline); });
}

absl::Status Communicator::AllGather(const AllGatherCall& call, Clock::time_point deadline) {
  REFITD_RETURN_IF_ERROR(CheckStreams(call.streams, devices()));
  if (call.bytes < 0 || call.byte_offset < 0 || call.bytes % kAllGatherAlignment != 0 ||
      call.byte_offset % kAllGatherAlignment != 0) {
    return Error(absl::StatusCode::kInvalidArgument,
                 "shares of {} bytes at {}, must be multiples of {}, not less than 0", call.bytes,
                 call.byte_offset, kAllGatherAlignment);
  }
  if (call.bytes == 0) return status();
  return state_->Run("an all-gather", deadline,
                     [call, deadline](State* state) { return state->Issue(call, deadline); });
}

// ---- all of them ----

Communicators::Communicators(std::shared_ptr<const NcclApi> api,
                             const std::shared_ptr<CudaMemory>& memory,
                             CommunicatorsOptions options)
    : api_(std::move(api)),
      contexts_(dynamic_cast<const CudaContextsOwner&>(*memory).contexts()),
      options_(std::move(options)),
      lost_(std::make_shared<LostContext>(options_.lost)) {}

Communicators::~Communicators() {
  std::shared_ptr<NcclThread> thread;
  {
    MutexLock lock(&mutex_);
    thread = thread_;
  }
  if (thread != nullptr) thread->Stop(Clock::now() + options_.limit);
}

std::shared_ptr<NcclThread> Communicators::Thread() {
  MutexLock lock(&mutex_);
  if (thread_ == nullptr) {
    thread_ = std::make_shared<NcclThread>(options_.limit, lost_);
    thread_->Start();
  }
  return thread_;
}

absl::Status Communicators::CheckDevices(const std::vector<int>& devices) const {
  if (devices.size() < 2 || devices.size() > kMaxCommunicatorDevices) {
    return Error(absl::StatusCode::kInvalidArgument,
                 "a communicator of {} devices, must be 2 to {}", devices.size(),
                 kMaxCommunicatorDevices);
  }
  for (size_t i = 0; i < devices.size(); ++i) {
    if (devices[i] < 0 || devices[i] >= contexts_->devices()) {
      return Error(absl::StatusCode::kInvalidArgument, "no CUDA device {}: there are {}",
                   devices[i], contexts_->devices());
    }
    if (std::find(devices.begin(), devices.begin() + static_cast<ptrdiff_t>(i), devices[i]) !=
        devices.begin() + static_cast<ptrdiff_t>(i)) {
      return Error(absl::StatusCode::kInvalidArgument, "device {} comes twice", devices[i]);
    }
  }
  return absl::OkStatus();
}

absl::StatusOr<std::unique_ptr<Communicator>> Communicators::Create(
    const CommunicatorOptions& options, Clock::time_point deadline) {
  REFITD_RETURN_IF_ERROR(CheckDevices(options.devices));
  REFITD_RETURN_IF_ERROR(lost_->status());
  const std::shared_ptr<NcclThread> thread = Thread();
  std::shared_ptr<Communicator::State> state;
  {
    MutexLock lock(&mutex_);
    state = std::make_shared<Communicator::State>(api_, contexts_, thread, lost_, options_.clean_up,
                                                  options, ++number_);
    all_.erase(
        std::remove_if(all_.begin(), all_.end(), [](const auto& each) { return each.expired(); }),
        all_.end());
    all_.push_back(state);
  }
  // If this is destroyed, it frees whatever was made.
  std::unique_ptr<Communicator> made(new Communicator(state));
  const absl::Status begun =
      state->Run("the first call", deadline,
                 [deadline](Communicator::State* self) { return self->Init(deadline); });
  if (begun.ok()) return made;
  made = nullptr;
  bool waited = false;
  // Free the ranks, then end NCCL's listening for them.
  (void)thread->Run(
      "waiting for the end of a communicator", Clock::now() + 2 * options_.clean_up,
      [] { return absl::OkStatus(); }, &waited);
  return begun;
}

std::vector<CommunicatorStatus> Communicators::Describe() const {
  std::vector<CommunicatorStatus> all;
  MutexLock lock(&mutex_);
  for (const std::weak_ptr<Communicator::State>& weak : all_) {
    const std::shared_ptr<Communicator::State> state = weak.lock();
    if (state != nullptr) all.push_back(state->Describe());
  }
  return all;
}

}  // namespace refitd

#endif  // REFITD_CUDA
