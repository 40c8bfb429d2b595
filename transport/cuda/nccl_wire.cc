#include "transport/cuda/nccl_wire.h"

#include "transport/base/status.h"

#if defined(REFITD_CUDA)
#include <pthread.h>

#include <algorithm>
#include <atomic>
#include <cstring>
#include <deque>
#include <future>
#include <map>
#include <optional>
#include <string_view>
#include <thread>
#include <utility>
#include <vector>

#include "transport/base/mutex.h"
#include "transport/cuda/api.h"
#include "transport/cuda/lost_context.h"
#include "transport/cuda/nccl_api.h"
#include "transport/cuda/nccl_thread.h"
#endif

namespace refitd {

#if defined(REFITD_CUDA)
namespace {

using absl::StatusCode;
using Clock = std::chrono::steady_clock;
using Done = std::function<void(absl::Status)>;

// For NCCL to make a unique id.
constexpr auto kOpening = std::chrono::seconds(20);
// For an abort to go through (P4: a deadline plus this).
constexpr auto kCleanUp = std::chrono::milliseconds(800);
// For NCCL to make a communicator of one rank, so that it stops listening.
constexpr auto kLastRank = std::chrono::seconds(2);

// What Open returns, and what comes back from the network. Little-endian, as NCCL's own ends must
// be alike:  4 magic "RFN1" | 8 epoch | 4 rank | 4 size | 128 unique id (zeros but for rank 0)
constexpr std::string_view kMagic = "RFN1";
struct Address {
  uint64_t epoch = 0;
  uint32_t rank = 0;
  uint32_t size = 0;
  NcclUniqueId id;
};
constexpr size_t kAddressBytes = 4 + 8 + 4 + 4 + kNcclUniqueIdBytes;
static_assert(kAddressBytes <= kMaxWireAddressBytes);

std::string Encode(const Address& address) {
  std::string out(kMagic);
  const auto add = [&out](const void* data, size_t bytes) {
    out.append(static_cast<const char*>(data), bytes);
  };
  add(&address.epoch, sizeof(address.epoch));
  add(&address.rank, sizeof(address.rank));
  add(&address.size, sizeof(address.size));
  add(address.id.internal.data(), address.id.internal.size());
  return out;
}

// P10: of rank `rank` of `size`.
absl::StatusOr<Address> Decode(std::string_view in, EpochId epoch, int rank, int size) {
  const auto bad = [&](std::string_view why) {
    return Error(StatusCode::kInvalidArgument, "epoch {}: address of rank {}: {}", epoch, rank,
                 why);
  };
  if (in.size() < kMagic.size() || in.substr(0, kMagic.size()) != kMagic) {
    return bad(
        "not an address of NCCL's wire of this version: do all daemons have NCCL and the "
        "group's members on GPUs?");
  }
  if (in.size() != kAddressBytes) {
    return bad(fmt::format("{} bytes, expected {}", in.size(), kAddressBytes));
  }
  Address address;
  const char* at = in.data() + kMagic.size();
  const auto take = [&at](void* data, size_t bytes) {
    std::memcpy(data, at, bytes);
    at += bytes;
  };
  take(&address.epoch, sizeof(address.epoch));
  take(&address.rank, sizeof(address.rank));
  take(&address.size, sizeof(address.size));
  take(address.id.internal.data(), address.id.internal.size());
  if (address.epoch != epoch.value()) return bad(fmt::format("is of epoch {}", address.epoch));
  if (address.rank != static_cast<uint32_t>(rank)) {
    return bad(fmt::format("is of rank {}", address.rank));
  }
  if (address.size != static_cast<uint32_t>(size)) {
    return bad(fmt::format("is for {} ranks, expected {}", address.size, size));
  }
  return address;
}

struct Counters {
  std::atomic<int64_t> sent{0};
  std::atomic<int64_t> received{0};
  WireStats Get() const { return {sent.load(), received.load()}; }
};

// What all epochs share.
struct Shared {
  std::shared_ptr<const NcclApi> nccl;
  std::shared_ptr<CudaContexts> contexts;
  NcclWireOptions options;
  std::shared_ptr<LostContext> lost;
  // What may hang: aborts, and the making of ids, which takes its time.
  std::shared_ptr<NcclThread> watched;
  std::shared_ptr<NcclThread> opening;
  Counters totals;
  std::atomic<int64_t> abandoned{0};  // epochs
};

// One thing for an epoch's thread to do.
struct Work {
  std::optional<std::vector<std::string>> connect;  // else, one of:
  std::optional<WireBroadcast> broadcast;
  std::optional<WireExchange> exchange;
  Clock::time_point deadline;
  Done done;
};

// ---- one end of one communicator ----
//
//   opened --Connect--> connected --failure--> lost
//      \--failure--> lost                       (every state) --Close--> closed
class Epoch {
 public:
  Epoch(std::shared_ptr<Shared> shared, int device, EpochId id, int rank, int size)
      : shared_(std::move(shared)), device_(device), id_(id), rank_(rank), size_(size) {}
  Epoch(const Epoch&) = delete;
  Epoch& operator=(const Epoch&) = delete;

  absl::StatusOr<std::string> MakeAddress() {
    Address address;
    address.epoch = id_.value();
    address.rank = static_cast<uint32_t>(rank_);
    address.size = static_cast<uint32_t>(size_);
    if (rank_ == 0) {
      REFITD_RETURN_IF_ERROR(MakeId(&address.id));
      listens_ = address.id;
    }
    return Encode(address);
  }

  // `ended` is called last, on the epoch's thread.
  void Start(std::function<void()> ended) {
    thread_ = std::thread([this, ended = std::move(ended)] {
      (void)pthread_setname_np(pthread_self(), "refitd-nwire");
      Run();
      ended();
    });
  }
  void Join() { thread_.join(); }

  // Not OK: `work` is untouched.
  absl::Status Push(Work* work) {
    MutexLock lock(&mutex_);
    if (closing_) return Closed();
    if (queue_.size() >= kMaxWireQueue) {
      return Error(StatusCode::kResourceExhausted, "epoch {}: {} operations are queued", id_,
                   queue_.size());
    }
    queue_.push_back(std::move(*work));
    wake_.NotifyAll();
    return absl::OkStatus();
  }

  void Close() {
    MutexLock lock(&mutex_);
    closing_ = true;
    wake_.NotifyAll();
  }

  WireStats Stats() const { return counters_.Get(); }

  DeviceEpochStatus Describe() const {
    DeviceEpochStatus status{.epoch = id_,
                             .device = device_,
                             .rank = rank_,
                             .size = size_,
                             .state = {},
                             .moved = Stats(),
                             .status = {}};
    MutexLock lock(&mutex_);
    status.state = closing_ ? "closing" : state_;
    status.status = lost_;
    return status;
  }

 private:
  // NCCL looks for its networks the first time.
  absl::Status MakeId(NcclUniqueId* id) const {
    auto made = std::make_shared<NcclUniqueId>();
    bool began = false;
    const absl::Status status = shared_->opening->Run(
        "ncclGetUniqueId", Clock::now() + kOpening,
        [shared = shared_, made] {
          return REFITD_NCCL_CALL(*shared->nccl, ncclGetUniqueId, made.get());
        },
        &began);
    if (status.ok()) *id = *made;
    return status;
  }

  absl::Status Closed() const { return Error(StatusCode::kCancelled, "epoch {} was closed", id_); }

  void Run() {
    while (true) {
      Work work;
      {
        MutexLock lock(&mutex_);
        while (queue_.empty() && !closing_) wake_.Wait(&mutex_);
        if (queue_.empty()) break;
        work = std::move(queue_.front());
        queue_.pop_front();
      }
      absl::Status status = Do(&work);
      work.broadcast.reset();  // its memory is no longer held when the caller is told
      work.exchange.reset();
      work.done(std::move(status));
    }
    End();
  }

  absl::Status Do(Work* work) {
    {
      MutexLock lock(&mutex_);
      if (closing_) return Closed();
      if (!lost_.ok()) {
        return Error(StatusCode::kFailedPrecondition, "epoch {} was lost: {}", id_, Message(lost_));
      }
    }
    if (work->connect.has_value()) return Connect(*work->connect, work->deadline);
    if (comm_ == nullptr) {
      return Error(StatusCode::kFailedPrecondition, "epoch {} is not connected", id_);
    }
    REFITD_RETURN_IF_ERROR(CheckRanks(*work));
    absl::Status status = work->broadcast.has_value() ? Broadcast(*work->broadcast, work->deadline)
                                                      : Exchange(*work->exchange, work->deadline);
    if (!status.ok()) Lose(status);
    return status;
  }

  // ---- connecting ----

  absl::Status Connect(const std::vector<std::string>& addresses, Clock::time_point deadline) {
    if (comm_ != nullptr) {
      return Error(StatusCode::kFailedPrecondition, "epoch {} is connected already", id_);
    }
    if (addresses.size() != static_cast<size_t>(size_)) {
      return Error(StatusCode::kInvalidArgument, "epoch {}: {} addresses for {} ranks", id_,
                   addresses.size(), size_);
    }
    NcclUniqueId unique;
    for (int rank = 0; rank < size_; ++rank) {
      REFITD_ASSIGN_OR_RETURN(const Address address,
                              Decode(addresses[static_cast<size_t>(rank)], id_, rank, size_));
      if (rank == 0) unique = address.id;
    }
    Enter("connecting");
    absl::Status status = Initialise(unique, rank_, size_);
    if (status.ok()) status = AwaitGroup(deadline, "all ranks to connect");
    if (!status.ok()) {
      Lose(status);
    } else {
      listens_.reset();
      Enter("connected");
    }
    return status;
  }

  void Enter(std::string_view state) {
    MutexLock lock(&mutex_);
    state_ = state;
  }

  // Begins it.
  absl::Status Initialise(const NcclUniqueId& unique, int rank, int size) {
    REFITD_ASSIGN_OR_RETURN(context_, shared_->contexts->Get(device_));
    const CudaApi& api = shared_->contexts->api();
    const ScopedContext current(api, context_);
    REFITD_RETURN_IF_ERROR(current.status());
    if (stream_ == nullptr) {
      REFITD_RETURN_IF_ERROR(
          REFITD_CUDA_CALL(api, cuStreamCreate, &stream_, CU_STREAM_NON_BLOCKING));
    }
    if (event_ == nullptr) {
      REFITD_RETURN_IF_ERROR(
          REFITD_CUDA_CALL(api, cuEventCreate, &event_, CU_EVENT_DISABLE_TIMING));
    }
    NcclConfig config;
    config.blocking = 0;
    return REFITD_NCCL_CALL(*shared_->nccl, ncclCommInitRankConfig, &comm_, size, unique, rank,
                            &config);
  }

  // ---- operations ----

  absl::Status CheckRanks(const Work& work) const {
    const auto check = [this](int rank, bool may_be_own) {
      if (rank >= 0 && rank < size_ && (may_be_own || rank != rank_)) return absl::OkStatus();
      return Error(StatusCode::kInvalidArgument, "epoch {}: rank {} as a peer of {} of {}", id_,
                   rank, rank_, size_);
    };
    if (work.broadcast.has_value()) return check(work.broadcast->root, true);
    for (const auto* legs : {&work.exchange->sends, &work.exchange->receives}) {
      for (const WireExchange::Leg& leg : *legs) REFITD_RETURN_IF_ERROR(check(leg.peer, false));
    }
    return absl::OkStatus();
  }

  absl::Status Broadcast(const WireBroadcast& op, Clock::time_point deadline) {
    if (op.memory.bytes == 0) return absl::OkStatus();
    const std::string whom = rank_ == op.root ? "its receivers" : fmt::format("rank {}", op.root);
    const ScopedContext current(shared_->contexts->api(), context_);
    REFITD_RETURN_IF_ERROR(current.status());
    REFITD_RETURN_IF_ERROR(REFITD_NCCL_CALL(*shared_->nccl, ncclBroadcast, op.memory.data,
                                            op.memory.data, static_cast<size_t>(op.memory.bytes),
                                            NcclDataType::kInt8, op.root, comm_, stream_));
    REFITD_RETURN_IF_ERROR(AwaitWork(deadline, fmt::format("broadcast seq {}: {}", op.seq, whom)));
    Count(rank_ == op.root ? op.memory.bytes : 0, rank_ == op.root ? 0 : op.memory.bytes);
    return absl::OkStatus();
  }

  absl::Status Exchange(const WireExchange& op, Clock::time_point deadline) {
    const NcclApi& nccl = *shared_->nccl;
    const ScopedContext current(shared_->contexts->api(), context_);
    REFITD_RETURN_IF_ERROR(current.status());
    std::string whom;
    absl::Status status;
    // Returns the bytes of the legs.
    const auto add = [&](const std::vector<WireExchange::Leg>& legs, const auto& call) {
      int64_t bytes = 0;
      for (const WireExchange::Leg& leg : legs) {
        if (!status.ok() || leg.memory.bytes == 0) continue;
        bytes += leg.memory.bytes;
        whom += fmt::format("{}{}", whom.empty() ? "ranks " : ", ", leg.peer);
        status = call(leg.memory.data, static_cast<size_t>(leg.memory.bytes), leg.peer);
      }
      return bytes;
    };
    REFITD_RETURN_IF_ERROR(REFITD_NCCL_CALL(nccl, ncclGroupStart));
    const int64_t sent = add(op.sends, [&](const char* data, size_t bytes, int peer) {
      return REFITD_NCCL_CALL(nccl, ncclSend, data, bytes, NcclDataType::kInt8, peer, comm_,
                              stream_);
    });
    const int64_t received = add(op.receives, [&](char* data, size_t bytes, int peer) {
      return REFITD_NCCL_CALL(nccl, ncclRecv, data, bytes, NcclDataType::kInt8, peer, comm_,
                              stream_);
    });
    const absl::Status ended = REFITD_NCCL_CALL(nccl, ncclGroupEnd);
    REFITD_RETURN_IF_ERROR(status);
    REFITD_RETURN_IF_ERROR(ended);
    if (whom.empty()) return absl::OkStatus();
    REFITD_RETURN_IF_ERROR(AwaitWork(deadline, fmt::format("exchange seq {}: {}", op.seq, whom)));
    Count(sent, received);
    return absl::OkStatus();
  }

  void Count(int64_t sent, int64_t received) {
    for (Counters* counters : {&counters_, &shared_->totals}) {
      counters->sent += sent;
      counters->received += received;
    }
  }

  // ---- waiting ----

  // Until `ready` says true. `what` is waited for.
  template <typename Ready>
  absl::Status Await(Clock::time_point deadline, std::string_view what, Ready ready) {
    const Clock::time_point since = Clock::now();
    while (true) {
      REFITD_ASSIGN_OR_RETURN(const bool is_ready, ready());
      if (is_ready) return absl::OkStatus();
      if (Clock::now() >= deadline) {
        return Error(StatusCode::kDeadlineExceeded, "epoch {}: waited for {}", id_, what);
      }
      {
        MutexLock lock(&mutex_);
        if (closing_) return Closed();
      }
      PauseOfPoll(since);
    }
  }

  // The group that was begun last, launched or initialised.
  absl::Status AwaitGroup(Clock::time_point deadline, std::string_view what) {
    return Await(deadline, what, [this] { return GroupEnded(); });
  }

  absl::StatusOr<bool> GroupEnded() {
    NcclResult result = NcclResult::kSuccess;
    REFITD_RETURN_IF_ERROR(REFITD_NCCL_CALL(*shared_->nccl, ncclCommGetAsyncError, comm_, &result));
    if (result == NcclResult::kInProgress) return false;
    REFITD_RETURN_IF_ERROR(shared_->nccl->Check("NCCL", result));
    return true;
  }

  // And what it put on the stream.
  absl::Status AwaitWork(Clock::time_point deadline, std::string_view what) {
    REFITD_RETURN_IF_ERROR(AwaitGroup(deadline, what));
    const CudaApi& api = shared_->contexts->api();
    REFITD_RETURN_IF_ERROR(REFITD_CUDA_CALL(api, cuEventRecord, event_, stream_));
    return Await(deadline, what, [this]() -> absl::StatusOr<bool> {
      REFITD_ASSIGN_OR_RETURN(const bool streamed, StreamEnded());
      if (streamed) return true;
      // A peer that went shows here.
      REFITD_RETURN_IF_ERROR(GroupEnded().status());
      return false;
    });
  }

  absl::StatusOr<bool> StreamEnded() {
    const CudaApi& api = shared_->contexts->api();
    const ScopedContext current(api, context_);
    REFITD_RETURN_IF_ERROR(current.status());
    const CUresult result = api.cuEventQuery(event_);
    if (result == CUDA_ERROR_NOT_READY) return false;
    REFITD_RETURN_IF_ERROR(shared_->lost->Note(api.Check("cuEventQuery", result)));
    return true;
  }

  // ---- the end ----

  // Aborts, so that the device ends what NCCL put there, and waits until it has (P6).
  void Lose(const absl::Status& why) {
    {
      MutexLock lock(&mutex_);
      state_ = "lost";
      lost_ = why;
    }
    GiveUp();
  }

  // However long it takes: until then the memory may be touched. What hangs is told as a loss by
  // whoever watches it, and ends with the process.
  void GiveUp() {
    if (comm_ == nullptr) return;
    auto aborted = std::make_shared<std::promise<void>>();
    shared_->watched->Post(fmt::format("ncclCommAbort of epoch {}", id_), Clock::now() + kCleanUp,
                           [shared = shared_, context = context_, comm = comm_, aborted] {
                             const ScopedContext current(shared->contexts->api(), context);
                             if (current.status().ok()) (void)shared->nccl->ncclCommAbort(comm);
                             aborted->set_value();
                           });
    aborted->get_future().wait();
    comm_ = nullptr;
    DrainStream();
  }

  void DrainStream() {
    const CudaApi& api = shared_->contexts->api();
    {
      const ScopedContext current(api, context_);
      absl::Status recorded = current.status();
      if (recorded.ok()) recorded = REFITD_CUDA_CALL(api, cuEventRecord, event_, stream_);
      if (!recorded.ok()) {
        // P6: nothing tells any more when the device is done.
        return shared_->lost->Lose(
            Error(StatusCode::kInternal, "epoch {}: {}", id_, Message(recorded)));
      }
    }
    const Clock::time_point since = Clock::now();
    while (true) {
      const absl::StatusOr<bool> ended = StreamEnded();
      if (!ended.ok() || *ended) return;
      if (Clock::now() > since + shared_->options.limit) {
        shared_->lost->Lose(Error(StatusCode::kDeadlineExceeded,
                                  "epoch {}: device {} does not end what NCCL put there", id_,
                                  device_));
      }
      PauseOfPoll(since);
    }
  }

  // P8: NCCL has a thread that listens for the ranks of a unique id until all have come, or one
  // that can't be of them. A communicator of a single rank is always one of the two.
  void StopListening() {
    if (!listens_.has_value()) return;
    ++shared_->abandoned;
    const Clock::time_point since = Clock::now();
    absl::StatusOr<bool> came = Initialise(*listens_, 0, 1).ok() ? GroupEnded() : true;
    while (came.ok() && !*came && Clock::now() < since + kLastRank) {
      PauseOfPoll(since);
      came = GroupEnded();
    }
    GiveUp();
  }

  void End() {
    GiveUp();
    StopListening();
    const CudaApi& api = shared_->contexts->api();
    if (context_ == nullptr) return;
    const ScopedContext current(api, context_);
    if (!current.status().ok()) return;
    if (event_ != nullptr) (void)api.cuEventDestroy(event_);
    if (stream_ != nullptr) (void)api.cuStreamDestroy(stream_);
  }

  const std::shared_ptr<Shared> shared_;
  const int device_;
  const EpochId id_;
  const int rank_;
  const int size_;
  Counters counters_;

  // The thread's alone.
  CUcontext context_ = nullptr;
  CUstream stream_ = nullptr;
  CUevent event_ = nullptr;
  NcclComm comm_ = nullptr;
  std::optional<NcclUniqueId> listens_;  // NCCL does, in this process

  mutable Mutex mutex_;
  CondVar wake_;
  std::deque<Work> queue_ ABSL_GUARDED_BY(mutex_);
  bool closing_ ABSL_GUARDED_BY(mutex_) = false;
  std::string_view state_ ABSL_GUARDED_BY(mutex_) = "open";
  absl::Status lost_ ABSL_GUARDED_BY(mutex_);  // why; OK: it is not
  std::thread thread_;                         // last: it uses the others
};

// ---- the wire ----

class NcclWire final : public DeviceWire {
 public:
  explicit NcclWire(std::shared_ptr<Shared> shared)
      : shared_(std::move(shared)), answers_([this] { Answer(); }) {}

  ~NcclWire() override {
    {
      MutexLock lock(&mutex_);
      for (auto& [id, epoch] : epochs_) epoch->Close();
      while (!epochs_.empty()) changed_.Wait(&mutex_);
      stopping_ = true;
      changed_.NotifyAll();
    }
    answers_.join();
    const Clock::time_point deadline = Clock::now() + shared_->options.limit;
    shared_->watched->Stop(deadline);
    shared_->opening->Stop(deadline);
  }

  absl::StatusOr<std::string> OpenOn(int device, EpochId id, int rank, int size) override {
    if (size < 1 || size > kMaxWireRanks || rank < 0 || rank >= size) {
      return Error(StatusCode::kInvalidArgument, "epoch {}: rank {} of {}", id, rank, size);
    }
    if (device < 0 || device >= shared_->contexts->devices()) {
      return Error(StatusCode::kInvalidArgument, "epoch {}: no device {}", id, device);
    }
    const auto check = [&] {
      mutex_.AssertHeld();
      if (epochs_.contains(id)) return Error(StatusCode::kAlreadyExists, "epoch {} is open", id);
      if (epochs_.size() < kMaxWireEpochs) return absl::OkStatus();
      return Error(StatusCode::kResourceExhausted, "{} epochs are open", epochs_.size());
    };
    {
      MutexLock lock(&mutex_);
      REFITD_RETURN_IF_ERROR(check());
    }
    auto epoch = std::make_unique<Epoch>(shared_, device, id, rank, size);
    REFITD_ASSIGN_OR_RETURN(std::string address, epoch->MakeAddress());
    MutexLock lock(&mutex_);
    REFITD_RETURN_IF_ERROR(check());
    epoch->Start([this, id] {
      MutexLock guard(&mutex_);
      ended_.push_back(id);
      changed_.NotifyAll();
    });
    epochs_.emplace(id, std::move(epoch));
    return address;
  }

  void Connect(EpochId id, std::vector<std::string> addresses, Duration timeout,
               Done done) override {
    Work work;
    work.connect = std::move(addresses);
    Push(id, timeout, std::move(work), std::move(done));
  }

  void Submit(WireBroadcast broadcast, Done done) override {
    const EpochId id = broadcast.epoch;
    const Duration timeout = broadcast.timeout;
    Work work;
    work.broadcast = std::move(broadcast);
    Push(id, timeout, std::move(work), std::move(done));
  }

  void Submit(WireExchange exchange, Done done) override {
    const EpochId id = exchange.epoch;
    const Duration timeout = exchange.timeout;
    Work work;
    work.exchange = std::move(exchange);
    Push(id, timeout, std::move(work), std::move(done));
  }

  void Close(EpochId id) override {
    MutexLock lock(&mutex_);
    const auto it = epochs_.find(id);
    if (it != epochs_.end()) it->second->Close();
  }

  WireStats Stats() const override { return shared_->totals.Get(); }
  WireStats Stats(EpochId id) const override {
    MutexLock lock(&mutex_);
    const auto it = epochs_.find(id);
    return it == epochs_.end() ? WireStats() : it->second->Stats();
  }
  std::vector<DeviceEpochStatus> Epochs() const override {
    MutexLock lock(&mutex_);
    std::vector<DeviceEpochStatus> all;
    for (const auto& [id, epoch] : epochs_) all.push_back(epoch->Describe());
    return all;
  }
  int64_t Abandoned() const override { return shared_->abandoned; }

 private:
  void Push(EpochId id, Duration timeout, Work work, Done done) {
    work.deadline = Clock::now() + std::min<Duration>(timeout, kMaxWireTimeout);
    work.done = std::move(done);
    MutexLock lock(&mutex_);
    const auto it = epochs_.find(id);
    const absl::Status status = it == epochs_.end()
                                    ? Error(StatusCode::kNotFound, "epoch {} is not open", id)
                                    : it->second->Push(&work);
    if (status.ok()) return;
    refused_.emplace_back(std::move(work.done), status);
    changed_.NotifyAll();
  }

  // Answers what was refused, never inside the call; joins threads of closed epochs.
  void Answer() {
    (void)pthread_setname_np(pthread_self(), "refitd-nwire-a");
    while (true) {
      std::vector<std::pair<Done, absl::Status>> refused;
      std::vector<std::unique_ptr<Epoch>> ended;
      {
        MutexLock lock(&mutex_);
        while (refused_.empty() && ended_.empty() && !stopping_) changed_.Wait(&mutex_);
        if (refused_.empty() && ended_.empty()) return;
        refused.swap(refused_);
        for (const EpochId id : ended_) ended.push_back(std::move(epochs_.extract(id).mapped()));
        ended_.clear();
      }
      for (const auto& [done, status] : refused) done(status);
      for (const std::unique_ptr<Epoch>& epoch : ended) epoch->Join();
      ended.clear();
      MutexLock lock(&mutex_);
      changed_.NotifyAll();
    }
  }

  const std::shared_ptr<Shared> shared_;
  mutable Mutex mutex_;
  CondVar changed_;
  std::map<EpochId, std::unique_ptr<Epoch>> epochs_ ABSL_GUARDED_BY(mutex_);
  std::vector<EpochId> ended_ ABSL_GUARDED_BY(mutex_);
  std::vector<std::pair<Done, absl::Status>> refused_ ABSL_GUARDED_BY(mutex_);
  bool stopping_ ABSL_GUARDED_BY(mutex_) = false;
  std::thread answers_;  // last: it uses the others
};

}  // namespace

absl::StatusOr<std::unique_ptr<DeviceWire>> MakeNcclWire(std::shared_ptr<const NcclApi> api,
                                                         const std::shared_ptr<CudaMemory>& memory,
                                                         const NcclWireOptions& options) {
  auto* const owner = dynamic_cast<CudaContextsOwner*>(memory.get());
  if (owner == nullptr) return absl::InvalidArgumentError("not a memory of CudaMemory::Create");
  auto shared = std::make_shared<Shared>();
  shared->nccl = std::move(api);
  shared->contexts = owner->contexts();
  shared->options = options;
  shared->lost = std::make_shared<LostContext>(options.lost);
  shared->watched = std::make_shared<NcclThread>(options.limit, shared->lost);
  shared->watched->Start();
  shared->opening = std::make_shared<NcclThread>(options.limit, shared->lost);
  shared->opening->Start();
  return std::make_unique<NcclWire>(std::move(shared));
}

#else

absl::StatusOr<std::unique_ptr<DeviceWire>> MakeNcclWire(
    // NOLINTNEXTLINE(performance-unnecessary-value-param): taken where there is CUDA
    std::shared_ptr<const NcclApi> /*api*/, const std::shared_ptr<CudaMemory>& /*memory*/,
    const NcclWireOptions& /*options*/) {
  return absl::UnimplementedError(CudaBuild());
}

#endif

}  // namespace refitd
