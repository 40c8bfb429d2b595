#include "transport/cuda/nccl/wire.h"

#include "transport/base/status.h"

#if defined(REFITD_CUDA)
#include <algorithm>
#include <array>
#include <atomic>
#include <cstring>
#include <future>
#include <optional>
#include <set>
#include <span>
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
// needs equal machines anyway: 4 magic "RFN1" | 8 communicator | 4 rank | 4 size | 4 rails | 128 of
// a unique id for each of kMaxRails (zeros for the others, and except for rank 0)
constexpr std::string_view kMagic = "RFN1";
struct Address {
  uint64_t communicator = 0;
  uint32_t rank = 0;
  uint32_t size = 0;
  uint32_t rails = 0;
  std::array<NcclUniqueId, kMaxRails> ids;
};
constexpr size_t kAddressBytes = 4 + 8 + 4 + 4 + 4 + kMaxRails * kNcclUniqueIdBytes;
static_assert(kAddressBytes <= kMaxWireAddressBytes);

// Each rail that takes part carries at least so many bytes, since a rail costs a launch and polls.
constexpr int64_t kLeastShare = int64_t{1} << 20;
constexpr int64_t kShareAlignment = 4096;

// How many of the rails, the first ones, carry an operation's bytes. Both ends compute this, and
// the shares, from the same numbers.
size_t RailsFor(int64_t bytes, size_t rails) {
  return std::clamp(static_cast<size_t>(bytes / kLeastShare), size_t{1}, rails);
}

struct Share {
  int64_t offset = 0;
  int64_t bytes = 0;
};
Share ShareOf(int64_t bytes, size_t rail, size_t rails) {
  const auto count = static_cast<int64_t>(RailsFor(bytes, rails));
  const int64_t pages = (bytes + count * kShareAlignment - 1) / (count * kShareAlignment);
  const int64_t each = pages * kShareAlignment;
  const int64_t offset = std::min(bytes, each * static_cast<int64_t>(rail));
  return {offset, std::min(each, bytes - offset)};
}

std::string Encode(const Address& address) {
  std::string out(kMagic);
  const auto add = [&out](const void* data, size_t bytes) {
    out.append(static_cast<const char*>(data), bytes);
  };
  add(&address.communicator, sizeof(address.communicator));
  add(&address.rank, sizeof(address.rank));
  add(&address.size, sizeof(address.size));
  add(&address.rails, sizeof(address.rails));
  for (const NcclUniqueId& id : address.ids) add(id.internal.data(), id.internal.size());
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
  take(&address.rails, sizeof(address.rails));
  for (NcclUniqueId& id : address.ids) take(id.internal.data(), id.internal.size());
  if (address.communicator != communicator.value())
    return bad(fmt::format("is of communicator {}", address.communicator));
  if (address.rank != static_cast<uint32_t>(rank)) {
    return bad(fmt::format("is of rank {}", address.rank));
  }
  if (address.size != static_cast<uint32_t>(size)) {
    return bad(fmt::format("is for {} ranks, expected {}", address.size, size));
  }
  if (address.rails < 1 || address.rails > kMaxRails) {
    return bad(fmt::format("has {} rails, expected 1 to {}", address.rails, kMaxRails));
  }
  return address;
}

// The objects that all communicators share.
struct Shared {
  std::shared_ptr<const NcclApi> nccl;
  std::shared_ptr<CudaContexts> contexts;
  NcclWireOptions options;
  std::shared_ptr<LostContext> lost;
  // Threads for calls that may hang. Aborts: as many as a communicator has rails, since all of them
  // are aborted at once.
  std::vector<std::shared_ptr<NcclThread>> watched;
  std::shared_ptr<NcclThread> opening;  // the making of ids, which takes long
  std::atomic<int64_t> abandoned{0};    // communicators that never connected
};

// ---- one end of one communicator ----

class NcclCommunicator final : public WireCommunicator {
 public:
  // `devices`: at most kMaxRails; the first has the memory, and the others reach it.
  NcclCommunicator(std::shared_ptr<Shared> shared, std::vector<int> devices, CommunicatorId id,
                   int rank, int size, WireCounters* totals)
      : WireCommunicator(id, rank, size, totals),
        shared_(std::move(shared)),
        devices_(std::move(devices)),
        moved_(devices_.size()),
        used_rails_(devices_.size()) {
    for (const int device : devices_) rails_.push_back({.device = device});
  }

  absl::StatusOr<std::string> Open() override {
    Address address;
    address.communicator = id_.value();
    address.rank = static_cast<uint32_t>(rank_);
    address.size = static_cast<uint32_t>(size_);
    address.rails = static_cast<uint32_t>(rails_.size());
    if (rank_ == 0) {
      REFITD_RETURN_IF_ERROR(MakeIds(&address.ids));
      for (size_t i = 0; i < rails_.size(); ++i) rails_[i].listens = address.ids.at(i);
    }
    return Encode(address);
  }

  DeviceCommunicatorStatus Describe() const {
    DeviceCommunicatorStatus status{.communicator = id_,
                                    .rails = {},
                                    .rank = rank_,
                                    .size = size_,
                                    .state = state(),
                                    .status = failure()};
    for (size_t i = 0; i < used_rails_; ++i) status.rails.push_back({devices_[i], moved_[i].Get()});
    return status;
  }

 private:
  // A communicator of NCCL on one device, with the same rank in each. Used by the communicator's
  // thread only.
  struct Rail {
    int device = 0;
    CUcontext context = nullptr;
    CUstream stream = nullptr;
    CUevent event = nullptr;
    NcclComm comm = nullptr;
    std::optional<NcclUniqueId> listens{};  // NCCL listens for this id, in this process
  };

  // Makes a unique id for each rail. The first time takes long, because NCCL looks for its
  // networks. Ids that nobody waits for any more when they are made are given up at once (P8).
  absl::Status MakeIds(std::array<NcclUniqueId, kMaxRails>* ids) const {
    struct Making {
      std::vector<NcclUniqueId> ids;
      // The ids were made, or nobody waits for them any more; the first of the two sets this.
      std::atomic<bool> over = false;
    };
    const auto making = std::make_shared<Making>();
    bool began = false;
    absl::Status status = shared_->opening->Run(
        "ncclGetUniqueId", Clock::now() + shared_->options.opening,
        [shared = shared_, devices = devices_, making] {
          absl::Status made;
          while (made.ok() && making->ids.size() < devices.size()) {
            NcclUniqueId id;
            made = REFITD_NCCL_CALL(*shared->nccl, ncclGetUniqueId, &id);
            if (made.ok()) making->ids.push_back(id);
          }
          // Give the ids up here instead of queueing that, because a wire that is being destroyed
          // queues nothing more.
          if (!made.ok() || making->over.exchange(true)) {
            if (!making->ids.empty()) ++shared->abandoned;
            GiveUpIds(*shared, devices.front(), making->ids);
          }
          return made;
        },
        &began);
    if (status.ok()) {
      std::copy(making->ids.begin(), making->ids.end(), ids->begin());
    } else if (making->over.exchange(true)) {
      ++shared_->abandoned;
      PostGivingUp(making->ids);
    }
    return status;
  }

  void PostGivingUp(std::vector<NcclUniqueId> ids) const {
    const auto count = static_cast<int>(ids.size());
    shared_->opening->Post("giving up unique ids", Clock::now() + count * kLastRank,
                           [shared = shared_, device = devices_.front(), ids = std::move(ids)] {
                             GiveUpIds(*shared, device, ids);
                           });
  }

  // Called on the thread that makes ids.
  static void GiveUpIds(const Shared& shared, int device, const std::vector<NcclUniqueId>& ids) {
    const absl::StatusOr<CUcontext> context = shared.contexts->GetWithStack(device);
    if (!context.ok()) return;
    for (const NcclUniqueId& id : ids)
      refitd::StopListening(*shared.nccl, shared.contexts->api(), *context, id, kLastRank);
  }

  // ---- connecting ----

  absl::Status Connect(const WireWork& work, bool* began) override {
    const std::vector<std::string>& addresses = *work.connect;
    if (addresses.size() != static_cast<size_t>(size_)) {
      return Error(StatusCode::kInvalidArgument, "communicator {}: {} addresses for {} ranks", id_,
                   addresses.size(), size_);
    }
    std::array<NcclUniqueId, kMaxRails> ids;
    size_t rails = kMaxRails;
    for (int rank = 0; rank < size_; ++rank) {
      REFITD_ASSIGN_OR_RETURN(const Address address,
                              Decode(addresses[static_cast<size_t>(rank)], id_, rank, size_));
      if (rank == 0) ids = address.ids;
      rails = std::min(rails, size_t{address.rails});
    }
    rails = std::min(rails, rails_.size());
    *began = true;
    DropRails(rails);
    for (size_t i = 0; i < rails; ++i) REFITD_RETURN_IF_ERROR(Initialise(ids.at(i), &rails_[i]));
    REFITD_RETURN_IF_ERROR(
        Await(work.deadline, "all ranks to connect", [this] { return GroupsEnded(rails_); }));
    for (Rail& rail : rails_) rail.listens.reset();
    return absl::OkStatus();
  }

  // Every rank has as many rails as the rank with the fewest.
  void DropRails(size_t left) {
    std::vector<NcclUniqueId> unused;
    for (size_t i = left; i < rails_.size(); ++i) {
      if (rails_[i].listens.has_value()) unused.push_back(*rails_[i].listens);
    }
    rails_.resize(left);
    used_rails_ = left;
    if (!unused.empty()) PostGivingUp(std::move(unused));
  }

  // Begins to make the communicator.
  absl::Status Initialise(const NcclUniqueId& unique, Rail* rail) {
    REFITD_ASSIGN_OR_RETURN(rail->context, shared_->contexts->GetWithStack(rail->device));
    const CudaApi& api = shared_->contexts->api();
    const ScopedContext current(api, rail->context);
    REFITD_RETURN_IF_ERROR(current.status());
    if (rail->stream == nullptr) {
      REFITD_RETURN_IF_ERROR(
          REFITD_CUDA_CALL(api, cuStreamCreate, &rail->stream, CU_STREAM_NON_BLOCKING));
    }
    if (rail->event == nullptr) {
      REFITD_RETURN_IF_ERROR(
          REFITD_CUDA_CALL(api, cuEventCreate, &rail->event, CU_EVENT_DISABLE_TIMING));
    }
    NcclConfig config;
    config.blocking = 0;
    return REFITD_NCCL_CALL(*shared_->nccl, ncclCommInitRankConfig, &rail->comm, size_, unique,
                            rank_, &config);
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
    const bool sends = rank_ == op.root;
    const std::string whom = sends ? "its receivers" : fmt::format("rank {}", op.root);
    std::vector<WireStats> shares(RailsFor(op.memory.bytes, rails_.size()));
    for (size_t i = 0; i < shares.size(); ++i) {
      const Share share = ShareOf(op.memory.bytes, i, rails_.size());
      (sends ? shares[i].bytes_sent : shares[i].bytes_received) = share.bytes;
      char* const data = op.memory.data + share.offset;
      const ScopedContext current(shared_->contexts->api(), rails_[i].context);
      REFITD_RETURN_IF_ERROR(current.status());
      REFITD_RETURN_IF_ERROR(REFITD_NCCL_CALL(*shared_->nccl, ncclBroadcast, data, data,
                                              static_cast<size_t>(share.bytes), NcclDataType::kInt8,
                                              op.root, rails_[i].comm, rails_[i].stream));
    }
    const std::vector<int> ranks = sends ? std::vector<int>() : std::vector<int>{op.root};
    REFITD_RETURN_IF_ERROR(AboutRanks(
        AwaitWork(shares.size(), deadline, fmt::format("broadcast seq {}: {}", op.seq, whom)),
        ranks));
    CountShares(shares);
    return absl::OkStatus();
  }

  // Issues all legs with bytes as one group of NCCL a rail, and waits for their end.
  absl::Status Exchange(const WireExchange& op, Clock::time_point deadline) {
    std::set<int> peers;
    size_t rails = 1;
    for (const auto* legs : {&op.sends, &op.receives}) {
      for (const WireExchange::Leg& leg : *legs) {
        if (leg.memory.bytes > 0) peers.insert(leg.peer);
        rails = std::max(rails, RailsFor(leg.memory.bytes, rails_.size()));
      }
    }
    if (peers.empty()) return absl::OkStatus();
    std::vector<WireStats> shares(rails);
    for (size_t i = 0; i < rails; ++i) {
      REFITD_ASSIGN_OR_RETURN(shares[i], Issue(op, i));
    }
    // NCCL does not show which peer was late, so all peers of the group are suspects.
    REFITD_RETURN_IF_ERROR(AboutRanks(
        AwaitWork(rails, deadline,
                  fmt::format("exchange seq {}: ranks {}", op.seq, fmt::join(peers, ", "))),
        {peers.begin(), peers.end()}));
    CountShares(shares);
    return absl::OkStatus();
  }

  // Issues the shares of all legs that a rail carries; returns the sums of their bytes.
  absl::StatusOr<WireStats> Issue(const WireExchange& op, size_t number) {
    const NcclApi& nccl = *shared_->nccl;
    const Rail& rail = rails_[number];
    const ScopedContext current(shared_->contexts->api(), rail.context);
    REFITD_RETURN_IF_ERROR(current.status());
    absl::Status status;
    // Makes `call` for each share that has bytes, and returns their sum.
    const auto add = [&](const std::vector<WireExchange::Leg>& legs, const auto& call) {
      int64_t bytes = 0;
      for (const WireExchange::Leg& leg : legs) {
        const Share share = ShareOf(leg.memory.bytes, number, rails_.size());
        if (!status.ok() || share.bytes == 0) continue;
        bytes += share.bytes;
        status = call(leg.memory.data + share.offset, static_cast<size_t>(share.bytes), leg.peer);
      }
      return bytes;
    };
    REFITD_RETURN_IF_ERROR(REFITD_NCCL_CALL(nccl, ncclGroupStart));
    WireStats moved;
    moved.bytes_sent = add(op.sends, [&](const char* data, size_t bytes, int peer) {
      return REFITD_NCCL_CALL(nccl, ncclSend, data, bytes, NcclDataType::kInt8, peer, rail.comm,
                              rail.stream);
    });
    moved.bytes_received = add(op.receives, [&](char* data, size_t bytes, int peer) {
      return REFITD_NCCL_CALL(nccl, ncclRecv, data, bytes, NcclDataType::kInt8, peer, rail.comm,
                              rail.stream);
    });
    const absl::Status ended = REFITD_NCCL_CALL(nccl, ncclGroupEnd);
    REFITD_RETURN_IF_ERROR(status);
    REFITD_RETURN_IF_ERROR(ended);
    return moved;
  }

  void CountShares(const std::vector<WireStats>& shares) {
    for (size_t i = 0; i < shares.size(); ++i) {
      moved_[i].sent += shares[i].bytes_sent;
      moved_[i].received += shares[i].bytes_received;
      Count(shares[i].bytes_sent, shares[i].bytes_received);
    }
  }

  // ---- waiting ----

  // Waits until `ready` returns true. `what` names the awaited work in messages.
  template <typename Ready>
  absl::Status Await(Clock::time_point deadline, std::string_view what, Ready ready) const {
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

  // Whether NCCL has launched or initialised, on each of these rails, the group that was begun
  // last.
  absl::StatusOr<bool> GroupsEnded(std::span<const Rail> rails) const {
    bool all = true;
    for (const Rail& rail : rails) {
      NcclResult result = NcclResult::kSuccess;
      REFITD_RETURN_IF_ERROR(
          REFITD_NCCL_CALL(*shared_->nccl, ncclCommGetAsyncError, rail.comm, &result));
      if (result == NcclResult::kInProgress) {
        all = false;
        continue;
      }
      REFITD_RETURN_IF_ERROR(shared_->nccl->Check("NCCL", result));
    }
    return all;
  }

  // Waits for the groups of the first rails, and then for their work on the streams.
  absl::Status AwaitWork(size_t used, Clock::time_point deadline, std::string_view what) const {
    const std::span<const Rail> rails(rails_.data(), used);
    REFITD_RETURN_IF_ERROR(Await(deadline, what, [&] { return GroupsEnded(rails); }));
    for (const Rail& rail : rails) REFITD_RETURN_IF_ERROR(Record(rail));
    return Await(deadline, what, [&]() -> absl::StatusOr<bool> {
      bool all = true;
      for (const Rail& rail : rails) {
        REFITD_ASSIGN_OR_RETURN(const bool streamed, StreamEnded(rail));
        all = all && streamed;
      }
      if (all) return true;
      // The loss of a peer shows here.
      REFITD_RETURN_IF_ERROR(GroupsEnded(rails).status());
      return false;
    });
  }

  absl::Status Record(const Rail& rail) const {
    const CudaApi& api = shared_->contexts->api();
    const ScopedContext current(api, rail.context);
    REFITD_RETURN_IF_ERROR(current.status());
    return REFITD_CUDA_CALL(api, cuEventRecord, rail.event, rail.stream);
  }

  absl::StatusOr<bool> StreamEnded(const Rail& rail) const {
    const CudaApi& api = shared_->contexts->api();
    const ScopedContext current(api, rail.context);
    REFITD_RETURN_IF_ERROR(current.status());
    const CUresult result = api.cuEventQuery(rail.event);
    if (result == CUDA_ERROR_NOT_READY) return false;
    REFITD_RETURN_IF_ERROR(shared_->lost->Note(api.Check("cuEventQuery", result)));
    return true;
  }

  // ---- the end ----

  // Aborts the communicator, so that the devices end NCCL's work, and waits until they have (P6).
  void Lose() override { GiveUp(); }

  // Aborts the rails, all at once, and waits however long that takes, because the memory may be
  // touched until then. A hang is reported as a loss by the thread that watches the call, and ends
  // with the process.
  void GiveUp() {
    std::vector<std::pair<const Rail*, std::future<void>>> aborts;
    for (size_t i = 0; i < rails_.size(); ++i) {
      if (rails_[i].comm != nullptr) aborts.emplace_back(&rails_[i], PostAbort(i));
    }
    for (const auto& [rail, aborted] : aborts) aborted.wait();
    for (const auto& [rail, aborted] : aborts) DrainStream(*rail);
  }

  std::future<void> PostAbort(size_t number) {
    Rail& rail = rails_[number];
    auto aborted = std::make_shared<std::promise<void>>();
    shared_->watched[number % shared_->watched.size()]->Post(
        fmt::format("ncclCommAbort of communicator {}", id_), Clock::now() + kCleanUp,
        [shared = shared_, context = rail.context, comm = rail.comm, aborted] {
          const ScopedContext current(shared->contexts->api(), context);
          if (current.status().ok()) (void)shared->nccl->ncclCommAbort(comm);
          aborted->set_value();
        });
    rail.comm = nullptr;
    return aborted->get_future();
  }

  void DrainStream(const Rail& rail) {
    if (const absl::Status recorded = Record(rail); !recorded.ok()) {
      // P6: now nothing can tell when the device is done.
      return shared_->lost->Lose(
          Error(StatusCode::kInternal, "communicator {}: {}", id_, Message(recorded)));
    }
    const Clock::time_point since = Clock::now();
    while (true) {
      const absl::StatusOr<bool> ended = StreamEnded(rail);
      if (!ended.ok() || *ended) return;
      if (Clock::now() > since + shared_->options.limit) {
        shared_->lost->Lose(Error(StatusCode::kDeadlineExceeded,
                                  "communicator {}: device {} does not end what NCCL put there",
                                  id_, rail.device));
      }
      PauseOfPoll(since);
    }
  }

  void StopListening() {
    for (size_t i = 0; i < rails_.size(); ++i) {
      Rail& rail = rails_[i];
      if (!rail.listens.has_value()) continue;
      if (i == 0) ++shared_->abandoned;
      const absl::StatusOr<CUcontext> context = shared_->contexts->GetWithStack(rail.device);
      if (!context.ok()) continue;
      rail.context = *context;
      const ScopedContext current(shared_->contexts->api(), rail.context);
      if (!current.status().ok()) continue;
      rail.comm = MakeLastRank(*shared_->nccl, *rail.listens, kLastRank);
      if (rail.comm != nullptr) PostAbort(i).wait();
    }
  }

  void End() override {
    GiveUp();
    StopListening();
    const CudaApi& api = shared_->contexts->api();
    for (const Rail& rail : rails_) {
      if (rail.context == nullptr) continue;
      const ScopedContext current(api, rail.context);
      if (!current.status().ok()) continue;
      if (rail.event != nullptr) (void)api.cuEventDestroy(rail.event);
      if (rail.stream != nullptr) (void)api.cuStreamDestroy(rail.stream);
    }
  }

  const std::shared_ptr<Shared> shared_;
  const std::vector<int> devices_;
  std::vector<WireCounters> moved_;  // by device
  std::atomic<size_t> used_rails_;   // rails_.size(), for other threads
  std::vector<Rail> rails_;          // the first of devices_, as many as every rank has
};

// ---- the wire ----

class NcclWire final : public DeviceWire {
 public:
  explicit NcclWire(std::shared_ptr<Shared> shared)
      : DeviceWire("refitd-nwire-a"), shared_(std::move(shared)) {}

  ~NcclWire() override {
    CloseAll();
    const Clock::time_point deadline = Clock::now() + shared_->options.limit;
    for (const std::shared_ptr<NcclThread>& thread : shared_->watched) thread->Stop(deadline);
    shared_->opening->Stop(deadline);
  }

  absl::StatusOr<std::string> OpenOn(const std::vector<int>& devices, CommunicatorId id, int rank,
                                     int size) override {
    std::vector<int> rails;
    for (const int device : devices) {
      if (device < 0 || device >= shared_->contexts->devices()) {
        return Error(StatusCode::kInvalidArgument, "communicator {}: no device {}", id, device);
      }
      if (rails.size() == kMaxRails || std::count(rails.begin(), rails.end(), device) > 0) continue;
      if (!rails.empty()) {
        const absl::StatusOr<bool> reaches = shared_->contexts->CanReach(device, rails.front());
        if (!reaches.ok() || !*reaches) continue;
      }
      rails.push_back(device);
    }
    if (rails.empty())
      return Error(StatusCode::kInvalidArgument, "communicator {}: no device is named", id);
    return OpenCommunicator(id, rank, size, "refitd-nwire", [&] {
      return std::make_shared<NcclCommunicator>(shared_, rails, id, rank, size, totals());
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
  const auto devices = static_cast<size_t>(std::max(shared->contexts->devices(), 1));
  for (size_t i = 0; i < std::min(devices, kMaxRails); ++i) {
    shared->watched.push_back(std::make_shared<NcclThread>(options.limit, shared->lost));
    shared->watched.back()->Start();
  }
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
