#include "transport/wire_communicators.h"

#include <pthread.h>
#include <signal.h>

#include <algorithm>
#include <chrono>
#include <utility>

#include "transport/base/failure.h"
#include "transport/base/status.h"

namespace refitd {

using absl::StatusCode;

void EnterWireThread(const std::string& name) {
  sigset_t all;
  sigfillset(&all);
  // Signals of faults must not be blocked: a blocked one would end the process without running its
  // handler.
  for (const int signal : {SIGSEGV, SIGBUS, SIGFPE, SIGILL, SIGABRT}) sigdelset(&all, signal);
  pthread_sigmask(SIG_BLOCK, &all, nullptr);
  pthread_setname_np(pthread_self(), name.substr(0, 15).c_str());
}

// ---- one communicator ----

void WireCommunicator::Start(const std::string& thread, std::function<void()> ended) {
  thread_ = std::thread([this, thread, ended = std::move(ended)] {
    EnterWireThread(thread);
    Run();
    ended();
  });
}

absl::Status WireCommunicator::Push(WireWork* work) {
  MutexLock lock(&mutex_);
  if (closing_) return Closed();
  if (queue_.size() >= kMaxWireQueue) {
    return Error(StatusCode::kResourceExhausted, "communicator {}: {} operations are queued", id_,
                 queue_.size());
  }
  queue_.push_back(std::move(*work));
  wake_.NotifyAll();
  return absl::OkStatus();
}

void WireCommunicator::Close() {
  {
    MutexLock lock(&mutex_);
    closing_ = true;
    wake_.NotifyAll();
  }
  Interrupt();
}

std::string_view WireCommunicator::state() const {
  MutexLock lock(&mutex_);
  return closing_ ? "closing" : state_;
}

absl::Status WireCommunicator::failure() const {
  MutexLock lock(&mutex_);
  return failure_;
}

bool WireCommunicator::closing() const {
  MutexLock lock(&mutex_);
  return closing_;
}

absl::Status WireCommunicator::Closed() const {
  return Error(StatusCode::kCancelled, "communicator {} was closed", id_);
}

std::vector<WireUse> WireCommunicator::Uses() const {
  MutexLock lock(&mutex_);
  return uses_;
}

void WireCommunicator::CountUses(const std::map<int, WireUse>& uses) {
  MutexLock lock(&mutex_);
  if (uses_.empty()) uses_.resize(static_cast<size_t>(size_));
  for (const auto& [peer, use] : uses) {
    uses_[static_cast<size_t>(peer)].bytes += use.bytes;
    uses_[static_cast<size_t>(peer)].busy += use.busy;
  }
}

void WireCommunicator::Count(int64_t sent, int64_t received) {
  for (WireCounters* counters : {&counters_, totals_}) {
    counters->sent += sent;
    counters->received += received;
  }
}

void WireCommunicator::Enter(std::string_view state, const absl::Status& failure) {
  MutexLock lock(&mutex_);
  state_ = state;
  failure_ = failure;
}

void WireCommunicator::Run() {
  // P6: release the memory before the caller is told.
  const auto answer = [](WireWork* work, absl::Status status) {
    work->broadcast.reset();
    work->exchange.reset();
    work->done(std::move(status));
  };
  while (true) {
    WireWork work;
    {
      MutexLock lock(&mutex_);
      while (queue_.empty() && !closing_) wake_.Wait(&mutex_);
      if (closing_) break;
      work = std::move(queue_.front());
      queue_.pop_front();
    }
    absl::Status status = Do(work);
    answer(&work, std::move(status));
  }
  std::deque<WireWork> cancelled;  // work that is left when the communicator ends
  {
    MutexLock lock(&mutex_);
    cancelled.swap(queue_);
  }
  for (WireWork& work : cancelled) answer(&work, Closed());
  End();
}

absl::Status WireCommunicator::Do(const WireWork& work) {
  const bool connects = work.connect.has_value();
  {
    MutexLock lock(&mutex_);
    if (!failure_.ok()) {
      return WithFailureOf(failure_, Error(StatusCode::kFailedPrecondition,
                                           "communicator {} is lost: {}", id_, Message(failure_)));
    }
    if (connects == (state_ == "connected")) {
      return Error(StatusCode::kFailedPrecondition, "communicator {} is {}", id_,
                   connects ? "connected already" : "not connected");
    }
  }
  if (connects) Enter("connecting");
  bool began = false;
  absl::Status status = connects ? Connect(work, &began) : Move(work, &began);
  if (!status.ok() && began) {
    Enter("lost", status);
    Lose();
  } else if (connects) {
    Enter(status.ok() ? "connected" : "open");
  }
  return status;
}

absl::Status WireCommunicator::CheckMemory(const MemorySpan& memory) const {
  if (memory.bytes >= 0 && (memory.data != nullptr || memory.bytes == 0)) return absl::OkStatus();
  return Error(StatusCode::kInvalidArgument, "communicator {}: memory of {} bytes{}", id_,
               memory.bytes, memory.data == nullptr ? " at null" : "");
}

absl::Status WireCommunicator::CheckMove(const WireWork& work) const {
  if (work.broadcast.has_value()) {
    const WireBroadcast& broadcast = *work.broadcast;
    if (broadcast.root < 0 || broadcast.root >= size_) {
      return Error(StatusCode::kInvalidArgument,
                   "communicator {}: broadcast seq {}: root {} of {} ranks", id_, broadcast.seq,
                   broadcast.root, size_);
    }
    return CheckMemory(broadcast.memory);
  }
  const WireExchange& exchange = *work.exchange;
  for (const auto* legs : {&exchange.sends, &exchange.receives}) {
    const char* const direction = legs == &exchange.sends ? "send" : "receive";
    std::vector<bool> seen(size_, false);
    for (const WireExchange::Leg& leg : *legs) {
      if (leg.peer < 0 || leg.peer >= size_ || leg.peer == rank_ || seen[leg.peer]) {
        return Error(
            StatusCode::kInvalidArgument,
            "communicator {}: exchange seq {}: a {} names rank {}; want each rank of {} but {} "
            "at most once",
            id_, exchange.seq, direction, leg.peer, size_, rank_);
      }
      seen[leg.peer] = true;
      REFITD_RETURN_IF_ERROR(CheckMemory(leg.memory));
    }
  }
  return absl::OkStatus();
}

// ---- the table ----

CommunicatorWire::CommunicatorWire(const std::string& thread)
    : helper_([this, thread] {
        EnterWireThread(thread);
        Help();
      }) {}

CommunicatorWire::~CommunicatorWire() {
  {
    MutexLock lock(&mutex_);
    stopping_ = true;
    changed_.NotifyAll();
  }
  helper_.join();
}

absl::StatusOr<std::string> CommunicatorWire::OpenCommunicator(
    CommunicatorId id, int rank, int size, const std::string& thread,
    const std::function<std::shared_ptr<WireCommunicator>()>& make) {
  if (size < 1 || size > kMaxWireRanks || rank < 0 || rank >= size) {
    return Error(StatusCode::kInvalidArgument, "communicator {}: rank {} of {} (at most {} ranks)",
                 id, rank, size, kMaxWireRanks);
  }
  MutexLock opening(&opening_);
  {
    MutexLock lock(&mutex_);
    if (communicators_.contains(id))
      return Error(StatusCode::kAlreadyExists, "communicator {} is open", id);
    if (communicators_.size() >= kMaxWireCommunicators) {
      return Error(StatusCode::kResourceExhausted, "communicator {}: {} communicators are open", id,
                   communicators_.size());
    }
    communicators_[id] = nullptr;  // reserves the id
  }
  const std::shared_ptr<WireCommunicator> communicator = make();
  absl::StatusOr<std::string> address = communicator->Open();
  MutexLock lock(&mutex_);
  const auto it = communicators_.find(id);
  if (!address.ok()) {
    if (it != communicators_.end()) communicators_.erase(it);
    return address;
  }
  if (it != communicators_.end()) {
    it->second = communicator;
  } else {
    // Close the communicator, so that its thread ends as that of any other communicator.
    communicator->Close();
    closed_.push_back(communicator);
    address = Error(StatusCode::kCancelled, "communicator {} was closed", id);
  }
  communicator->Start(thread, [this, ended = communicator.get()] {
    // A thread can't join itself.
    Post([this, ended] {
      ended->Join();
      MutexLock guard(&mutex_);
      std::erase_if(closed_, [ended](const auto& each) { return each.get() == ended; });
      changed_.NotifyAll();
    });
  });
  return address;
}

void CommunicatorWire::Connect(CommunicatorId id, std::vector<std::string> addresses,
                               Duration timeout, Done done) {
  WireWork work;
  work.connect = std::move(addresses);
  Push(id, timeout, std::move(work), std::move(done));
}

template <typename Operation>
void CommunicatorWire::Submit(std::optional<Operation> WireWork::*kind, Operation operation,
                              Done done) {
  const CommunicatorId id = operation.communicator;
  const Duration timeout = operation.timeout;
  WireWork work;
  work.*kind = std::move(operation);
  Push(id, timeout, std::move(work), std::move(done));
}

void CommunicatorWire::Submit(WireBroadcast broadcast, Done done) {
  Submit(&WireWork::broadcast, std::move(broadcast), std::move(done));
}

void CommunicatorWire::Submit(WireExchange exchange, Done done) {
  Submit(&WireWork::exchange, std::move(exchange), std::move(done));
}

void CommunicatorWire::Push(CommunicatorId id, Duration timeout, WireWork work, Done done) {
  work.timeout = std::clamp(timeout, Duration::zero(), kMaxWireTimeout);
  work.deadline = std::chrono::steady_clock::now() + work.timeout;
  work.done = std::move(done);
  const std::shared_ptr<WireCommunicator> communicator = Find(id);
  absl::Status status = communicator != nullptr
                            ? communicator->Push(&work)
                            : Error(StatusCode::kNotFound, "communicator {} is not open", id);
  if (status.ok()) return;
  Post([refused = std::move(work.done), status = std::move(status)] { refused(status); });
}

void CommunicatorWire::Close(CommunicatorId id) {
  std::shared_ptr<WireCommunicator> communicator;
  {
    MutexLock lock(&mutex_);
    const auto it = communicators_.find(id);
    if (it == communicators_.end()) return;
    communicator = std::move(it->second);
    communicators_.erase(it);
    if (communicator == nullptr) return;
    closed_.push_back(communicator);
  }
  communicator->Close();
}

void CommunicatorWire::CloseAll() {
  std::vector<CommunicatorId> open;
  {
    MutexLock lock(&mutex_);
    for (const auto& [id, communicator] : communicators_) open.push_back(id);
  }
  for (const CommunicatorId id : open) Close(id);
  MutexLock lock(&mutex_);
  while (!closed_.empty()) changed_.Wait(&mutex_);
}

std::shared_ptr<WireCommunicator> CommunicatorWire::Find(CommunicatorId id) const {
  MutexLock lock(&mutex_);
  const auto it = communicators_.find(id);
  return it == communicators_.end() ? nullptr : it->second;
}

WireStats CommunicatorWire::Stats(CommunicatorId id) const {
  const std::shared_ptr<WireCommunicator> communicator = Find(id);
  return communicator == nullptr ? WireStats{} : communicator->Stats();
}

std::vector<WireUse> CommunicatorWire::Uses(CommunicatorId id) const {
  const std::shared_ptr<WireCommunicator> communicator = Find(id);
  return communicator == nullptr ? std::vector<WireUse>() : communicator->Uses();
}

std::vector<std::shared_ptr<const WireCommunicator>> CommunicatorWire::Communicators() const {
  std::vector<std::shared_ptr<const WireCommunicator>> all;
  MutexLock lock(&mutex_);
  for (const auto& [id, communicator] : communicators_) {
    if (communicator != nullptr) all.push_back(communicator);
  }
  all.insert(all.end(), closed_.begin(), closed_.end());
  return all;
}

void CommunicatorWire::Post(std::function<void()> call) {
  MutexLock lock(&mutex_);
  calls_.push_back(std::move(call));
  changed_.NotifyAll();
}

void CommunicatorWire::Help() {
  while (true) {
    std::function<void()> call;
    {
      MutexLock lock(&mutex_);
      while (calls_.empty() && !stopping_) changed_.Wait(&mutex_);
      if (calls_.empty()) return;
      call = std::move(calls_.front());
      calls_.pop_front();
    }
    call();
  }
}

}  // namespace refitd
