#include "transport/cuda/nccl/wire.h"

#include "transport/base/status.h"

#if defined(REFITD_CUDA)
#include <atomic>
#include <cstring>
#include <future>
#include <optional>
#include <set>
#include <string_view>
#include <utility>
#include <vector>

#include "transport/base/failure.h"
#include "transport/cuda/api.h"
#include "transport/cuda/lost_context.h"
#include "transport/cuda/nccl/api.h"
#include "transport/cuda/nccl/listener.h"
#include "transport/cuda/nccl/thread.h"
#endif

namespace refitd {

#if defined(REFITD_CUDA)
namespace {

using absl::StatusCode;
using Clock = std::chrono::steady_clock;

// The time for an abort to take effect (P4: an operation ends by its deadline plus this).
constexpr auto kCleanUp = std::chrono::milliseconds(800);
// The time for NCCL to make a communicator of one rank, which ends NCCL's listening.
constexpr auto kLastRank = std::chrono::seconds(2);

// The address that Open returns and that comes back from the network. Little-endian, since NCCL
// needs equal machines anyway: 4 magic "RFN1" | 8 communicator | 4 rank | 4 size | 128 unique id
// (zeros except for rank 0)
constexpr std::string_view kMagic = "RFN1";
struct Address {
  uint64_t communicator = 0;
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
  add(&address.communicator, sizeof(address.communicator));
  add(&address.rank, sizeof(address.rank));
  add(&address.size, sizeof(address.size));
  add(address.id.internal.data(), address.id.internal.size());
  return out;
}

// Decodes the address of rank `rank` of `size`, trusting nothing in it (P10).
absl::StatusOr<Address> Decode(std::string_view in, CommunicatorId communicator, int rank,
                               int size) {
  const auto bad = [&](std::string_view why) {
    return AboutRanks(Error(StatusCode::kInvalidArgument, "communicator {}: address of rank {}: {}",
                            communicator, rank, why),
                      {rank});
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
  take(&address.communicator, sizeof(address.communicator));
  take(&address.rank, sizeof(address.rank));
  take(&address.size, sizeof(address.size));
  take(address.id.internal.data(), address.id.internal.size());
  if (address.communicator != communicator.value())
    return bad(fmt::format("is of communicator {}", address.communicator));
  if (address.rank != static_cast<uint32_t>(rank)) {
    return bad(fmt::format("is of rank {}", address.rank));
  }
  if (address.size != static_cast<uint32_t>(size)) {
    return bad(fmt::format("is for {} ranks, expected {}", address.size, size));
  }
  return address;
}

// The objects that all communicators share.
struct Shared {
  std::shared_ptr<const NcclApi> nccl;
  std::shared_ptr<CudaContexts> contexts;
  NcclWireOptions options;
  std::shared_ptr<LostContext> lost;
  // Threads for calls that may hang: aborts, and the making of ids, which takes long.
  std::shared_ptr<NcclThread> watched;
  std::shared_ptr<NcclThread> opening;
  std::atomic<int64_t> abandoned{0};  // communicators that never connected
};

// ---- one end of one communicator ----

class NcclCommunicator final : public WireCommunicator {
 public:
  NcclCommunicator(std::shared_ptr<Shared> shared, int device, CommunicatorId id, int rank,
                   int size, WireCounters* totals)
      : WireCommunicator(id, rank, size, totals), shared_(std::move(shared)), device_(device) {}

  absl::StatusOr<std::string> Open() override {
    Address address;
    address.communicator = id_.value();
    address.rank = static_cast<uint32_t>(rank_);
    address.size = static_cast<uint32_t>(size_);
    if (rank_ == 0) {
      REFITD_RETURN_IF_ERROR(MakeId(&address.id));
      listens_ = address.id;
    }
    return Encode(address);
  }

  DeviceCommunicatorStatus Describe() const {
    return {.communicator = id_,
            .device = device_,
            .rank = rank_,
            .size = size_,
            .state = state(),
            .moved = Stats(),
            .status = failure()};
  }

 private:
  // Makes a unique id. The first time takes long, because NCCL looks for its networks. If nobody
  // waits any more when the id is made, the id is given up at once (P8).
  absl::Status MakeId(NcclUniqueId* id) const {
    struct Making {
      NcclUniqueId id;
      // The id was made, or nobody waits for it any more; the first of the two sets this.
      std::atomic<bool> over = false;
    };
    const auto making = std::make_shared<Making>();
    bool began = false;
    absl::Status status = shared_->opening->Run(
        "ncclGetUniqueId", Clock::now() + shared_->options.opening,
        [shared = shared_, device = device_, making] {
          REFITD_RETURN_IF_ERROR(REFITD_NCCL_CALL(*shared->nccl, ncclGetUniqueId, &making->id));
          // Give the id up here instead of queueing that, because a wire that is being destroyed
          // queues nothing more.
          if (making->over.exchange(true)) GiveUpId(*shared, device, making->id);
          return absl::OkStatus();
        },
        &began);
    if (status.ok()) {
      *id = making->id;
    } else if (making->over.exchange(true)) {
      shared_->opening->Post(
          "giving up a unique id", Clock::now() + kLastRank,
          [shared = shared_, device = device_, making] { GiveUpId(*shared, device, making->id); });
    }
    return status;
  }

  // Called on the thread that makes ids.
  static void GiveUpId(Shared& shared, int device, const NcclUniqueId& id) {
    ++shared.abandoned;
    const absl::StatusOr<CUcontext> context = shared.contexts->GetWithStack(device);
    if (!context.ok()) return;
    refitd::StopListening(*shared.nccl, shared.contexts->api(), *context, id, kLastRank);
  }

  // ---- connecting ----

  absl::Status Connect(const WireWork& work, bool* began) override {
    const std::vector<std::string>& addresses = *work.connect;
    if (addresses.size() != static_cast<size_t>(size_)) {
      return Error(StatusCode::kInvalidArgument, "communicator {}: {} addresses for {} ranks", id_,
                   addresses.size(), size_);
    }
    NcclUniqueId unique;
    for (int rank = 0; rank < size_; ++rank) {
      REFITD_ASSIGN_OR_RETURN(const Address address,
                              Decode(addresses[static_cast<size_t>(rank)], id_, rank, size_));
      if (rank == 0) unique = address.id;
    }
    *began = true;
    REFITD_RETURN_IF_ERROR(Initialise(unique));
    REFITD_RETURN_IF_ERROR(AwaitGroup(work.deadline, "all ranks to connect"));
    listens_.reset();
    return absl::OkStatus();
  }

  // Begins to make the communicator.
  absl::Status Initialise(const NcclUniqueId& unique) {
    REFITD_ASSIGN_OR_RETURN(context_, shared_->contexts->GetWithStack(device_));
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
    return REFITD_NCCL_CALL(*shared_->nccl, ncclCommInitRankConfig, &comm_, size_, unique, rank_,
                            &config);
  }

  // ---- operations ----

  absl::Status Move(const WireWork& work, bool* began) override {
    REFITD_RETURN_IF_ERROR(CheckRanks(work));
    *began = true;
    return work.broadcast.has_value() ? Broadcast(*work.broadcast, work.deadline)
                                      : Exchange(*work.exchange, work.deadline);
  }

  absl::Status CheckRanks(const WireWork& work) const {
    const auto check = [this](int rank, bool may_be_own) {
      if (rank >= 0 && rank < size_ && (may_be_own || rank != rank_)) return absl::OkStatus();
      return Error(StatusCode::kInvalidArgument, "communicator {}: rank {} as a peer of {} of {}",
                   id_, rank, rank_, size_);
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
    const std::vector<int> ranks =
        rank_ == op.root ? std::vector<int>() : std::vector<int>{op.root};
    REFITD_RETURN_IF_ERROR(
        AboutRanks(AwaitWork(deadline, fmt::format("broadcast seq {}: {}", op.seq, whom)), ranks));
    Count(rank_ == op.root ? op.memory.bytes : 0, rank_ == op.root ? 0 : op.memory.bytes);
    return absl::OkStatus();
  }

  // Issues all legs with bytes as one group of NCCL, and waits for its end.
  absl::Status Exchange(const WireExchange& op, Clock::time_point deadline) {
    const NcclApi& nccl = *shared_->nccl;
    const ScopedContext current(shared_->contexts->api(), context_);
    REFITD_RETURN_IF_ERROR(current.status());
    std::set<int> peers;
    absl::Status status;
    // Makes `call` for each leg that has bytes, and returns the sum of the legs' bytes.
    const auto add = [&](const std::vector<WireExchange::Leg>& legs, const auto& call) {
      int64_t bytes = 0;
      for (const WireExchange::Leg& leg : legs) {
        if (!status.ok() || leg.memory.bytes == 0) continue;
        bytes += leg.memory.bytes;
        peers.insert(leg.peer);
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
    if (peers.empty()) return absl::OkStatus();
    // NCCL does not show which peer was late, so all peers of the group are suspects.
    REFITD_RETURN_IF_ERROR(AboutRanks(
        AwaitWork(deadline,
                  fmt::format("exchange seq {}: ranks {}", op.seq, fmt::join(peers, ", "))),
        {peers.begin(), peers.end()}));
    Count(sent, received);
    return absl::OkStatus();
  }

  // ---- waiting ----

  // Waits until `ready` returns true. `what` names the awaited work in messages.
  template <typename Ready>
  absl::Status Await(Clock::time_point deadline, std::string_view what, Ready ready) {
    const Clock::time_point since = Clock::now();
    while (true) {
      REFITD_ASSIGN_OR_RETURN(const bool is_ready, ready());
      if (is_ready) return absl::OkStatus();
      if (Clock::now() >= deadline) {
        return Error(StatusCode::kDeadlineExceeded, "communicator {}: waited for {}", id_, what);
      }
      if (closing()) return Closed();
      PauseOfPoll(since);
    }
  }

  // Waits until NCCL has launched or initialised the group that was begun last.
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

  // Waits for AwaitGroup, and then for the group's work on the stream.
  absl::Status AwaitWork(Clock::time_point deadline, std::string_view what) {
    REFITD_RETURN_IF_ERROR(AwaitGroup(deadline, what));
    const CudaApi& api = shared_->contexts->api();
    REFITD_RETURN_IF_ERROR(REFITD_CUDA_CALL(api, cuEventRecord, event_, stream_));
    return Await(deadline, what, [this]() -> absl::StatusOr<bool> {
      REFITD_ASSIGN_OR_RETURN(const bool streamed, StreamEnded());
      if (streamed) return true;
      // The loss of a peer shows here.
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

  // Aborts the communicator, so that the device ends NCCL's work, and waits until it has (P6).
  void Lose() override { GiveUp(); }

  // Aborts the communicator, and waits however long that takes, because the memory may be touched
  // until then. A hang is reported as a loss by the thread that watches the call, and ends with the
  // process.
  void GiveUp() {
    if (comm_ == nullptr) return;
    Abort();
    DrainStream();
  }

  void Abort() {
    auto aborted = std::make_shared<std::promise<void>>();
    shared_->watched->Post(fmt::format("ncclCommAbort of communicator {}", id_),
                           Clock::now() + kCleanUp,
                           [shared = shared_, context = context_, comm = comm_, aborted] {
                             const ScopedContext current(shared->contexts->api(), context);
                             if (current.status().ok()) (void)shared->nccl->ncclCommAbort(comm);
                             aborted->set_value();
                           });
    aborted->get_future().wait();
    comm_ = nullptr;
  }

  void DrainStream() {
    const CudaApi& api = shared_->contexts->api();
    {
      const ScopedContext current(api, context_);
      absl::Status recorded = current.status();
      if (recorded.ok()) recorded = REFITD_CUDA_CALL(api, cuEventRecord, event_, stream_);
      if (!recorded.ok()) {
        // P6: now nothing can tell when the device is done.
        return shared_->lost->Lose(
            Error(StatusCode::kInternal, "communicator {}: {}", id_, Message(recorded)));
      }
    }
    const Clock::time_point since = Clock::now();
    while (true) {
      const absl::StatusOr<bool> ended = StreamEnded();
      if (!ended.ok() || *ended) return;
      if (Clock::now() > since + shared_->options.limit) {
        shared_->lost->Lose(Error(StatusCode::kDeadlineExceeded,
                                  "communicator {}: device {} does not end what NCCL put there",
                                  id_, device_));
      }
      PauseOfPoll(since);
    }
  }

  void StopListening() {
    if (!listens_.has_value()) return;
    ++shared_->abandoned;
    const absl::StatusOr<CUcontext> context = shared_->contexts->GetWithStack(device_);
    if (!context.ok()) return;
    context_ = *context;
    const ScopedContext current(shared_->contexts->api(), context_);
    if (!current.status().ok()) return;
    comm_ = MakeLastRank(*shared_->nccl, *listens_, kLastRank);
    if (comm_ != nullptr) Abort();
  }

  void End() override {
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

  // Used by the communicator's thread only.
  CUcontext context_ = nullptr;
  CUstream stream_ = nullptr;
  CUevent event_ = nullptr;
  NcclComm comm_ = nullptr;
  std::optional<NcclUniqueId> listens_;  // NCCL listens for this id, in this process
};

// ---- the wire ----

class NcclWire final : public DeviceWire {
 public:
  explicit NcclWire(std::shared_ptr<Shared> shared)
      : DeviceWire("refitd-nwire-a"), shared_(std::move(shared)) {}

  ~NcclWire() override {
    CloseAll();
    const Clock::time_point deadline = Clock::now() + shared_->options.limit;
    shared_->watched->Stop(deadline);
    shared_->opening->Stop(deadline);
  }

  absl::StatusOr<std::string> OpenOn(int device, CommunicatorId id, int rank, int size) override {
    if (device < 0 || device >= shared_->contexts->devices()) {
      return Error(StatusCode::kInvalidArgument, "communicator {}: no device {}", id, device);
    }
    return OpenCommunicator(id, rank, size, "refitd-nwire", [&] {
      return std::make_shared<NcclCommunicator>(shared_, device, id, rank, size, totals());
    });
  }

  std::vector<DeviceCommunicatorStatus> Describe() const override {
    std::vector<DeviceCommunicatorStatus> all;
    for (const auto& communicator : Communicators()) {
      all.push_back(static_cast<const NcclCommunicator&>(*communicator).Describe());
    }
    return all;
  }
  int64_t Abandoned() const override { return shared_->abandoned; }

 private:
  const std::shared_ptr<Shared> shared_;
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
