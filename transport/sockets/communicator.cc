#include "transport/sockets/communicator.h"

#include <sys/random.h>

#include <algorithm>
#include <cerrno>
#include <map>
#include <set>
#include <utility>

#include "transport/base/failure.h"
#include "transport/base/status.h"

namespace refitd {
namespace {

using absl::StatusCode;

// The most ranks that one message names.
constexpr size_t kMaxNamed = 16;

// "rank 1, rank 4"
std::string NamesOf(const std::set<int>& peers) {
  std::string names;
  size_t named = 0;
  for (const int peer : peers) {
    if (named++ == kMaxNamed) break;
    names += fmt::format("{}rank {}", names.empty() ? "" : ", ", peer);
  }
  return names;
}

std::string NameOf(const WireWork& work) {
  if (work.connect.has_value()) return "connecting";
  if (work.broadcast.has_value()) {
    return Describe({FrameKind::kBroadcast, work.broadcast->seq.value(),
                     static_cast<uint64_t>(work.broadcast->root),
                     static_cast<uint64_t>(work.broadcast->memory.bytes)});
  }
  const WireExchange& exchange = *work.exchange;
  const auto& legs = exchange.receives.empty() ? exchange.sends : exchange.receives;
  const int64_t bytes = legs.empty() ? 0 : legs.front().memory.bytes;
  return Describe({FrameKind::kExchange, exchange.seq.value(), 0, static_cast<uint64_t>(bytes)});
}

}  // namespace

SocketCommunicator::SocketCommunicator(CommunicatorId id, int rank, int size, int streams,
                                       std::shared_ptr<WireListener> listener, TlsContexts* tls,
                                       WireCounters* totals)
    : WireCommunicator(id, rank, size, totals), streams_(streams), listener_(std::move(listener)) {
  shared_.id = id;
  shared_.rank = rank;
  shared_.size = size;
  shared_.listener = listener_.get();
  shared_.tls = tls;
  shared_.count = [this](int64_t sent, int64_t received) { Count(sent, received); };
}

SocketCommunicator::~SocketCommunicator() { CloseLanes(); }

absl::StatusOr<std::string> SocketCommunicator::Open() {
  shared_.address.communicator = id_.value();
  shared_.address.rank = static_cast<uint32_t>(rank_);
  shared_.address.size = static_cast<uint32_t>(size_);
  shared_.address.host = listener_->options().host;
  shared_.address.port = listener_->port();
  shared_.address.tls = shared_.tls != nullptr;
  shared_.address.streams = static_cast<uint8_t>(streams_);
  if (shared_.tls != nullptr) shared_.address.identity = shared_.tls->identity();
  if (shared_.tls != nullptr && shared_.address.identity.empty()) {
    return Error(StatusCode::kUnavailable, "this daemon's certificate has no identity");
  }
  if (getrandom(shared_.address.token.data(), shared_.address.token.size(), 0) !=
      static_cast<ssize_t>(shared_.address.token.size())) {
    return ErrnoError(errno, "getrandom");
  }
  encoded_ = EncodeSocketAddress(shared_.address);
  const bool threads = shared_.tls != nullptr;
  for (int first = 0; first < (threads ? streams_ : 1); ++first) {
    lanes_.push_back(std::make_unique<SocketLane>(&shared_, first, threads ? 1 : streams_));
    REFITD_RETURN_IF_ERROR(lanes_.back()->Open());
  }
  door_ = listener_->Add({id_, rank_, shared_.address.token, [this](GreetedConnection arrival) {
                            if (arrival.stream < 0 || arrival.stream >= streams_) return;
                            const size_t lane = lanes_.size() == 1 ? 0 : arrival.stream;
                            lanes_[lane]->Arrive(std::move(arrival));
                          }});
  return encoded_;
}

void SocketCommunicator::Halt() {
  shared_.halted = true;
  for (const auto& lane : lanes_) lane->Wake();
}

void SocketCommunicator::Interrupt() { Halt(); }

// No connection arrives, and no thread runs, when the lanes let go of their connections.
void SocketCommunicator::CloseLanes() {
  if (door_ != 0) listener_->Remove(door_);
  door_ = 0;
  {
    MutexLock lock(&mutex_);
    ending_ = true;
    changed_.NotifyAll();
  }
  for (std::thread& thread : threads_) thread.join();
  threads_.clear();
  for (const auto& lane : lanes_) lane->CloseLinks();
}

// ---- Connect and operations ----

absl::Status SocketCommunicator::TakeAddresses(const std::vector<std::string>& encoded) {
  if (encoded.size() != static_cast<size_t>(size_)) {
    return Error(StatusCode::kInvalidArgument, "communicator {}: {} addresses for {} ranks", id_,
                 encoded.size(), size_);
  }
  std::vector<SocketAddress> addresses;
  int streams = streams_;
  for (int rank = 0; rank < size_; ++rank) {
    REFITD_ASSIGN_OR_RETURN(SocketAddress address,
                            DecodeSocketAddress(encoded[rank], id_, rank, size_));
    if (rank == rank_ && encoded[rank] != encoded_) {
      return Error(StatusCode::kInvalidArgument,
                   "communicator {}: the address of rank {}, this one, is "
                   "not what it gave out",
                   id_, rank);
    }
    if (address.tls != shared_.address.tls) {
      return AboutRanks(Error(StatusCode::kInvalidArgument,
                              "communicator {}: rank {} {} the data plane, this rank {} {}", id_,
                              rank, address.tls ? "encrypts" : "does not encrypt", rank_,
                              shared_.address.tls ? "does" : "does not"),
                        {rank});
    }
    streams = std::min<int>(streams, address.streams);
    addresses.push_back(std::move(address));
  }
  shared_.addresses = std::move(addresses);
  shared_.streams = streams;
  return absl::OkStatus();
}

absl::Status SocketCommunicator::Connect(const WireWork& work, bool* began) {
  REFITD_RETURN_IF_ERROR(TakeAddresses(*work.connect));
  *began = true;
  StartThreads();
  return RunLanes(work);
}

absl::Status SocketCommunicator::Move(const WireWork& work, bool* began) {
  REFITD_RETURN_IF_ERROR(CheckMove(work));
  *began = true;
  absl::Status status = RunLanes(work);
  CountUses();
  for (const auto& lane : lanes_) lane->EndFlows();
  return status;
}

void SocketCommunicator::CountUses() {
  std::map<int, WireUse> sent;
  for (const auto& lane : lanes_) {
    std::map<int, WireUse> of_lane;
    lane->AddUses(&of_lane);
    for (const auto& [peer, use] : of_lane) {
      sent[peer].bytes += use.bytes;
      sent[peer].busy = std::max(sent[peer].busy, use.busy);
    }
  }
  WireCommunicator::CountUses(sent);
}

// ---- lanes ----

void SocketCommunicator::StartThreads() {
  const size_t lanes = std::min(lanes_.size(), static_cast<size_t>(shared_.streams));
  for (size_t lane = 1; lane < lanes; ++lane) {
    threads_.emplace_back([this, lane] {
      EnterWireThread(fmt::format("refitd-lane-{}", lane));
      RunThread(lane);
    });
  }
}

void SocketCommunicator::RunThread(size_t lane) {
  for (uint64_t seen = 0;;) {
    const WireWork* work = nullptr;
    {
      MutexLock lock(&mutex_);
      while (round_ == seen && !ending_) changed_.Wait(&mutex_);
      if (round_ == seen) return;
      seen = round_;
      work = work_;
    }
    RunLane(lane, *work);
    MutexLock lock(&mutex_);
    --running_;
    changed_.NotifyAll();
  }
}

absl::Status SocketCommunicator::RunLanes(const WireWork& work) {
  {
    MutexLock lock(&mutex_);
    work_ = &work;
    ++round_;
    running_ = threads_.size();
    changed_.NotifyAll();
  }
  RunLane(0, work);
  MutexLock lock(&mutex_);
  // Every lane ends by the work's deadline (P4).
  while (running_ > 0) changed_.Wait(&mutex_);
  work_ = nullptr;
  if (cause_ == Cause::kNone) return absl::OkStatus();
  return Failure(work, cause_, *lanes_[failed_]);
}

void SocketCommunicator::RunLane(size_t lane, const WireWork& work) {
  const Cause cause =
      work.connect.has_value() ? lanes_[lane]->Connect(work) : lanes_[lane]->Move(work);
  if (cause == Cause::kNone) return;
  {
    MutexLock lock(&mutex_);
    if (cause > cause_) {
      cause_ = cause;
      failed_ = lane;
    }
  }
  Halt();
}

// Names the peers that any lane waited for. All lanes have stopped.
absl::Status SocketCommunicator::Failure(const WireWork& work, Cause cause,
                                         const SocketLane& lane) const {
  if (closing()) return Closed();
  SocketLane::Awaited awaited;
  for (const auto& each : lanes_) each->AddAwaited(&awaited);
  switch (cause) {
    case Cause::kNone:
    case Cause::kHalted:
      return Closed();
    case Cause::kOverdue:
      return AboutRanks(
          Error(StatusCode::kDeadlineExceeded, "communicator {}: {}: waited {} ms for {}{}", id_,
                NameOf(work), ToMillis(work.timeout), NamesOf(awaited.peers), awaited.trouble),
          {awaited.peers.begin(), awaited.peers.end()});
    case Cause::kBroken:
      return Broken(lane, awaited);
    case Cause::kOther:
      return lane.failure();
  }
  return lane.failure();
}

// If this rank did not wait for the peer, the peer may have given up waiting for this rank, which
// passes on what others send. Then the rank to blame is among those that this rank waits for.
absl::Status SocketCommunicator::Broken(const SocketLane& lane,
                                        const SocketLane::Awaited& awaited) const {
  std::string others;
  if (!awaited.peers.contains(lane.broken_peer()) && !awaited.peers.empty()) {
    others = fmt::format(" while this rank waited for {}", NamesOf(awaited.peers));
  }
  std::set<int> ranks = awaited.peers;
  ranks.insert(lane.broken_peer());
  return AboutRanks(
      Error(StatusCode::kUnavailable, "communicator {}: the connection to rank {} broke: {}{}", id_,
            lane.broken_peer(), Message(lane.failure()), others),
      {ranks.begin(), ranks.end()});
}

}  // namespace refitd
