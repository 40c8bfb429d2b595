#include "transport/cuda/nccl/broadcast.h"

#if defined(REFITD_CUDA)
#include <algorithm>
#include <utility>

#include "transport/base/status.h"
#include "transport/cuda/buffers.h"
#include "transport/cuda/nccl/nccl.h"

namespace refitd {
namespace {

// The alignment of an all-gather's shares: the unit that symmetric kernels move.
constexpr int64_t kShareAlignment = 4096;
// The largest share of a round.
constexpr int64_t kMostShare = 32 << 20;

// The alignment of the second half of scratch memory, equal to that which cuMemAlloc gives the
// first.
constexpr int64_t kHalfAlignment = 256;

// P6: NCCL may still issue a collective that it did not issue in time, on memory that may have
// another owner by then. Nothing tells whether it will, so the devices count as lost. A collective
// that was not begun is never issued, and leaves its communicator usable.
absl::Status Issued(const absl::Status& status, const Communicator& by, const RelayIssue& issue) {
  if (!absl::IsDeadlineExceeded(status) || by.status().ok()) return status;
  return issue.api().Check("NCCL", CUDA_ERROR_UNKNOWN);
}

int64_t BytesOf(const Relay& relay) { return relay.runs.back().offset + relay.runs.back().bytes; }

}  // namespace

NcclBroadcasts::NcclBroadcasts(std::shared_ptr<const NcclApi> api,
                               const std::shared_ptr<CudaMemory>& memory, Options options)
    : options_(std::move(options)),
      memory_(memory),
      communicators_(std::move(api), memory,
                     CommunicatorsOptions{.limit = options_.limit, .lost = options_.lost}) {}

NcclBroadcasts::~NcclBroadcasts() {
  AllScratch scratch;
  {
    MutexLock lock(&mutex_);
    scratch.swap(scratch_);
  }
  Free(std::move(scratch));
  std::shared_ptr<NcclThread> frees;
  {
    MutexLock lock(&mutex_);
    frees = frees_;
  }
  if (frees != nullptr) frees->Stop(Clock::now() + options_.limit);
}

absl::Status NcclBroadcasts::Can(BroadcastMethod method) const {
  if (method == BroadcastMethod::kNccl || communicators_.api().version >= kNcclSymmetricFloor) {
    return absl::OkStatus();
  }
  return Error(absl::StatusCode::kUnimplemented, "broadcast symmetric: NCCL {} is older than {}",
               NcclVersionText(communicators_.api().version), NcclVersionText(kNcclSymmetricFloor));
}

absl::Status NcclBroadcasts::Issue(const Relay& relay, RelayIssue* issue,
                                   std::shared_ptr<const Communicator>* by) {
  return relay.method == BroadcastMethod::kSymmetric ? Symmetric(relay, issue, by)
                                                     : Broadcast(relay, issue, by);
}

// ---- communicators and windows ----

absl::StatusOr<NcclBroadcasts::Cached*> NcclBroadcasts::Get(const std::vector<int>& devices,
                                                            bool copy_engines, const Pools& pools) {
  const auto key = std::pair(devices, copy_engines);
  {
    MutexLock lock(&mutex_);
    const auto it = held_.find(key);
    if (it != held_.end() && it->second.communicator->status().ok()) {
      Use(&it->second, pools);
      return &it->second;
    }
    // Poisoned communicators are freed in the background.
    std::erase_if(held_, [](const auto& e) { return !e.second.communicator->status().ok(); });
    REFITD_RETURN_IF_ERROR(MakeRoom());
  }
  REFITD_ASSIGN_OR_RETURN(
      std::unique_ptr<Communicator> made,
      communicators_.Create({.devices = devices, .copy_engines = copy_engines}, Deadline()));
  MutexLock lock(&mutex_);
  Cached& held = held_[key];
  held.communicator = std::move(made);
  Use(&held, pools);
  return &held;
}

void NcclBroadcasts::Use(Cached* held, const Pools& pools) {
  for (const auto& pool : pools) held->pools.insert(pool.get());
  held->last_use = ++uses_;
}

// Keeps the number of communicators limited (P10). Nothing runs on an idle communicator, because
// all pools that it filled were given back.
absl::Status NcclBroadcasts::MakeRoom() {
  if (held_.size() < kMaxBroadcastCommunicators) return absl::OkStatus();
  auto oldest = held_.end();
  for (auto it = held_.begin(); it != held_.end(); ++it) {
    if (!it->second.pools.empty()) continue;
    if (oldest == held_.end() || it->second.last_use < oldest->second.last_use) oldest = it;
  }
  if (oldest == held_.end()) {
    return Error(absl::StatusCode::kResourceExhausted,
                 "broadcasts have {} sets of devices already, each with a communicator",
                 held_.size());
  }
  oldest->second.communicator->CloseLater(Clock::now() + options_.limit);
  held_.erase(oldest);
  return absl::OkStatus();
}

absl::StatusOr<Communicator::WindowId> NcclBroadcasts::WindowOf(Cached* held, const Pools& pools) {
  std::vector<const DeviceRegion*> key;
  for (const auto& pool : pools) key.push_back(pool.get());
  {
    MutexLock lock(&mutex_);
    const auto it = held->windows.find(key);
    if (it != held->windows.end()) return it->second;
  }
  REFITD_ASSIGN_OR_RETURN(const Communicator::WindowId window,
                          held->communicator->RegisterWindow(pools, Deadline()));
  MutexLock lock(&mutex_);
  held->windows.emplace(std::move(key), window);
  return window;
}

void NcclBroadcasts::LetGo(const DeviceRegion& pool) {
  AllScratch unused;
  {
    MutexLock lock(&mutex_);
    bool idle = true;
    for (auto& each : held_) {
      Cached& held = each.second;
      std::erase_if(held.windows, [&](const auto& entry) {
        if (std::find(entry.first.begin(), entry.first.end(), &pool) == entry.first.end()) {
          return false;
        }
        held.communicator->DeregisterLater(entry.second, Clock::now() + options_.limit);
        return true;
      });
      held.pools.erase(&pool);
      idle = idle && held.pools.empty();
    }
    if (idle) unused.swap(scratch_);  // P8: scratch memory is made again when it is needed
  }
  Free(std::move(unused));
}

// Frees scratch memory on a thread of its own. The driver frees memory only when all work of the
// device is done, and a collective of another group may wait there for a daemon that does not
// answer; no other thread must wait for that (P4, P8). If freeing hangs, that is reported as a
// loss, and the memory stays.
void NcclBroadcasts::Free(AllScratch scratch) {
  if (scratch.empty()) return;
  auto freed = std::make_shared<AllScratch>(std::move(scratch));
  std::shared_ptr<NcclThread> frees;
  {
    MutexLock lock(&mutex_);
    if (frees_ == nullptr) {
      frees_ = std::make_shared<NcclThread>(options_.limit,
                                            std::make_shared<LostContext>(options_.lost));
      frees_->Start();
    }
    frees = frees_;
  }
  frees->Post("giving back scratch of broadcasts", Clock::now() + options_.limit,
              [freed] { freed->clear(); });
}

void NcclBroadcasts::Close(Clock::time_point deadline) {
  decltype(held_) closed;
  AllScratch unused;
  {
    MutexLock lock(&mutex_);
    closed.swap(held_);
    unused.swap(scratch_);
  }
  for (const auto& [key, held] : closed) {
    for (const auto& [pools, window] : held.windows) {
      (void)held.communicator->DeregisterWindow(window, deadline);
    }
    (void)held.communicator->Close(deadline);
  }
  Free(std::move(unused));
}

// ---- one broadcast ----

absl::StatusOr<NcclBroadcasts::Scratch*> NcclBroadcasts::ScratchOf(int device, int64_t bytes) {
  const int64_t half = (bytes + kHalfAlignment - 1) / kHalfAlignment * kHalfAlignment;
  AllScratch smaller;
  {
    MutexLock lock(&mutex_);
    const auto it = scratch_.find(device);
    if (it != scratch_.end() && it->second.memory->bytes() >= 2 * half) return &it->second;
    if (it != scratch_.end()) smaller.insert(scratch_.extract(it));
  }
  Free(std::move(smaller));
  Scratch made;
  REFITD_ASSIGN_OR_RETURN(made.memory, memory_->MakeBuffer(device, 2 * half));
  MutexLock lock(&mutex_);
  return &(scratch_[device] = std::move(made));
}

absl::StatusOr<const char*> NcclBroadcasts::Packed(const Relay& relay, const RelayChunk& piece,
                                                   RelayIssue* issue) {
  if (piece.runs.size() == 1) return piece.runs.front().from;
  REFITD_ASSIGN_OR_RETURN(const RelayStream* const own, issue->Own(relay.source));
  REFITD_ASSIGN_OR_RETURN(const RelayStream* const onward, issue->Onward(relay.source));
  REFITD_ASSIGN_OR_RETURN(
      Scratch* const scratch,
      ScratchOf(relay.source, std::min(options_.piece_bytes, relay.slot_bytes)));
  if (!scratch->waited) {
    REFITD_RETURN_IF_ERROR(issue->Record(*onward));
    REFITD_RETURN_IF_ERROR(issue->Wait(*own, *onward));
  }
  scratch->waited = false;
  const bool second = std::exchange(scratch->second, !scratch->second);
  char* const half = scratch->memory->data() + (second ? scratch->memory->bytes() / 2 : 0);
  const int64_t base = piece.begin / options_.piece_bytes * options_.piece_bytes;
  std::vector<RelayRun> runs = piece.runs;
  int64_t gaps = piece.end - piece.begin;
  for (RelayRun& run : runs) {
    run.offset -= base;
    gaps -= run.bytes;
  }
  char* const packed = half + (piece.begin - base);
  // The gaps between the runs are sent too, and may hold bytes of another group, so clear them
  // (P9).
  if (gaps > 0) REFITD_RETURN_IF_ERROR(issue->Clear(*own, packed, piece.end - piece.begin));
  REFITD_RETURN_IF_ERROR(issue->CopyRuns(*own, runs, half));
  REFITD_RETURN_IF_ERROR(issue->Record(*own));
  REFITD_RETURN_IF_ERROR(issue->Wait(*onward, *own));
  // Wait for the broadcast of the piece before, the last that was recorded: its half is packed
  // next, while this piece is broadcast.
  REFITD_RETURN_IF_ERROR(issue->Wait(*own, *onward));
  scratch->waited = true;
  return packed;
}

absl::Status NcclBroadcasts::Broadcast(const Relay& relay, RelayIssue* issue,
                                       std::shared_ptr<const Communicator>* by) {
  std::vector<int> devices = {relay.source};
  Pools pools;
  for (const Relay::Slot& slot : relay.slots) {
    devices.push_back(slot.device);
    REFITD_ASSIGN_OR_RETURN(std::shared_ptr<const DeviceRegion> pool, issue->RegionOf(slot.data));
    pools.push_back(std::move(pool));
  }
  std::sort(devices.begin(), devices.end());
  devices.erase(std::unique(devices.begin(), devices.end()), devices.end());
  REFITD_ASSIGN_OR_RETURN(Cached * held, Get(devices, false, pools));
  *by = held->communicator;
  Communicator::BroadcastCall call;
  for (const int device : devices) {
    REFITD_ASSIGN_OR_RETURN(const RelayStream* const onward, issue->Onward(device));
    if (device == relay.source) call.root = static_cast<int>(call.streams.size());
    call.streams.push_back(onward->stream);
    const auto slot = std::find_if(relay.slots.begin(), relay.slots.end(),
                                   [device](const auto& s) { return s.device == device; });
    call.receive.push_back(slot == relay.slots.end() ? nullptr : slot->data);
  }
  return BroadcastPieces(relay, held->communicator.get(), std::move(call), issue);
}

absl::Status NcclBroadcasts::BroadcastPieces(const Relay& relay, Communicator* communicator,
                                             Communicator::BroadcastCall call, RelayIssue* issue) {
  REFITD_ASSIGN_OR_RETURN(const RelayStream* const onward, issue->Onward(relay.source));
  const std::vector<char*> slots = call.receive;
  const Clock::time_point deadline = Deadline();
  // A single run is never packed, so it is broadcast in one piece.
  const int64_t piece_bytes = relay.runs.size() == 1 ? relay.slot_bytes : options_.piece_bytes;
  for (const RelayChunk& piece : CutIntoChunks(relay.runs, piece_bytes)) {
    REFITD_ASSIGN_OR_RETURN(call.send, Packed(relay, piece, issue));
    call.bytes = piece.end - piece.begin;
    for (size_t rank = 0; rank < slots.size(); ++rank) {
      // The source's device receives only if it has a slot.
      call.receive[rank] =
          slots[rank] == nullptr ? const_cast<char*>(call.send) : slots[rank] + piece.begin;
    }
    REFITD_RETURN_IF_ERROR(Issued(communicator->Broadcast(call, deadline), *communicator, *issue));
    REFITD_RETURN_IF_ERROR(issue->Record(*onward));
  }
  return absl::OkStatus();
}

absl::Status NcclBroadcasts::Symmetric(const Relay& relay, RelayIssue* issue,
                                       std::shared_ptr<const Communicator>* by) {
  std::vector<Relay::Slot> receivers;
  for (const Relay::Slot& slot : relay.slots) {
    if (slot.device != relay.source) receivers.push_back(slot);
  }
  std::sort(receivers.begin(), receivers.end(),
            [](const auto& a, const auto& b) { return a.device < b.device; });
  const auto count = static_cast<int64_t>(receivers.size());
  REFITD_ASSIGN_OR_RETURN(const RelayStream* const source, issue->Onward(relay.source));
  if (receivers.size() != relay.slots.size()) {
    REFITD_ASSIGN_OR_RETURN(const RelayStream* const own, issue->Own(relay.source));
    for (const Relay::Slot& slot : relay.slots) {
      if (slot.device != relay.source) continue;
      REFITD_RETURN_IF_ERROR(issue->CopyRuns(*own, relay.runs, slot.data));
    }
  }
  std::vector<int> devices;
  Pools pools;
  std::vector<char*> reached;  // the slots' addresses for the source's device
  Communicator::AllGatherCall call;
  std::vector<const RelayStream*> onward;
  for (const Relay::Slot& slot : receivers) {
    REFITD_ASSIGN_OR_RETURN(std::shared_ptr<const DeviceRegion> pool, issue->RegionOf(slot.data));
    REFITD_ASSIGN_OR_RETURN(char* const at, issue->Reach(slot.data, relay.source));
    REFITD_ASSIGN_OR_RETURN(const RelayStream* const stream, issue->Onward(slot.device));
    devices.push_back(slot.device);
    pools.push_back(std::move(pool));
    reached.push_back(at);
    onward.push_back(stream);
    call.streams.push_back(stream->stream);
  }
  const int64_t end = BytesOf(relay);
  int64_t at = relay.runs.front().offset / kShareAlignment * kShareAlignment;
  if (count > 1) {
    REFITD_ASSIGN_OR_RETURN(Cached * held, Get(devices, options_.copy_engines, pools));
    *by = held->communicator;
    REFITD_ASSIGN_OR_RETURN(call.window, WindowOf(held, pools));
    const int64_t slot_offset = receivers[0].data - pools[0]->data();
    while (end - at >= count * kShareAlignment) {
      const int64_t share =
          std::min(kMostShare, (end - at) / count / kShareAlignment * kShareAlignment);
      for (int64_t r = 0; r < count; ++r) {
        REFITD_RETURN_IF_ERROR(
            issue->CopyRuns(*source, RunsWithin(relay.runs, at + r * share, at + (r + 1) * share),
                            reached[static_cast<size_t>(r)]));
      }
      REFITD_RETURN_IF_ERROR(issue->Record(*source));
      for (const RelayStream* stream : onward) {
        REFITD_RETURN_IF_ERROR(issue->Wait(*stream, *source));
      }
      call.byte_offset = slot_offset + at;
      call.bytes = share;
      REFITD_RETURN_IF_ERROR(
          Issued(held->communicator->AllGather(call, Deadline()), *held->communicator, *issue));
      at += count * share;
    }
  }
  // Copy the rest to every receiver directly. It is less than a page for each receiver, or there is
  // only one receiver.
  const std::vector<RelayRun> rest = RunsWithin(relay.runs, at, end);
  for (char* const slot : reached) {
    REFITD_RETURN_IF_ERROR(issue->CopyRuns(*source, rest, slot));
  }
  return absl::OkStatus();
}

}  // namespace refitd

#endif  // REFITD_CUDA
