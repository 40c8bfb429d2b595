#include "transport/wire_epochs.h"

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

// ---- one epoch ----

void WireEpoch::Start(const std::string& thread, std::function<void()> ended) {
  thread_ = std::thread([this, thread, ended = std::move(ended)] {
    EnterWireThread(thread);
    Run();
    ended();
  });
}

absl::Status WireEpoch::Push(WireWork* work) {
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

void WireEpoch::Close() {
  {
    MutexLock lock(&mutex_);
    closing_ = true;
    wake_.NotifyAll();
  }
  Interrupt();
}

std::string_view WireEpoch::state() const {
  MutexLock lock(&mutex_);
  return closing_ ? "closing" : state_;
}

absl::Status WireEpoch::failure() const {
  MutexLock lock(&mutex_);
  return failure_;
}

bool WireEpoch::closing() const {
  MutexLock lock(&mutex_);
  return closing_;
}

absl::Status WireEpoch::Closed() const {
  return Error(StatusCode::kCancelled, "epoch {} was closed", id_);
}

std::vector<WireUse> WireEpoch::Uses() const {
  MutexLock lock(&mutex_);
  return uses_;
}

void WireEpoch::CountUses(const std::map<int, WireUse>& uses) {
  MutexLock lock(&mutex_);
  if (uses_.empty()) uses_.resize(static_cast<size_t>(size_));
  for (const auto& [peer, use] : uses) {
    uses_[static_cast<size_t>(peer)].bytes += use.bytes;
    uses_[static_cast<size_t>(peer)].busy += use.busy;
  }
}

void WireEpoch::Count(int64_t sent, int64_t received) {
  for (WireCounters* counters : {&counters_, totals_}) {
    counters->sent += sent;
    counters->received += received;
  }
}

void WireEpoch::Enter(std::string_view state, const absl::Status& failure) {
  MutexLock lock(&mutex_);
  state_ = state;
  failure_ = failure;
}

void WireEpoch::Run() {
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
  std::deque<WireWork> cancelled;  // work that is left when the epoch ends
  {
    MutexLock lock(&mutex_);
    cancelled.swap(queue_);
  }
  for (WireWork& work : cancelled) answer(&work, Closed());
  End();
}

absl::Status WireEpoch::Do(const WireWork& work) {
  const bool connects = work.connect.has_value();
  {
    MutexLock lock(&mutex_);
    if (!failure_.ok()) {
      return WithFailureOf(failure_, Error(StatusCode::kFailedPrecondition, "epoch {} is lost: {}",
                                           id_, Message(failure_)));
    }
    if (connects == (state_ == "connected")) {
      return Error(StatusCode::kFailedPrecondition, "epoch {} is {}", id_,
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

absl::Status WireEpoch::CheckMemory(const MemorySpan& memory) const {
  if (memory.bytes >= 0 && (memory.data != nullptr || memory.bytes == 0)) return absl::OkStatus();
  return Error(StatusCode::kInvalidArgument, "epoch {}: memory of {} bytes{}", id_, memory.bytes,
               memory.data == nullptr ? " at null" : "");
}

absl::Status WireEpoch::CheckMove(const WireWork& work) const {
  if (work.broadcast.has_value()) {
    const WireBroadcast& broadcast = *work.broadcast;
    if (broadcast.root < 0 || broadcast.root >= size_) {
      return Error(StatusCode::kInvalidArgument, "epoch {}: broadcast seq {}: root {} of {} ranks",
                   id_, broadcast.seq, broadcast.root, size_);
    }
    return CheckMemory(broadcast.memory);
  }
  const WireExchange& exchange = *work.exchange;
  for (const auto* legs : {&exchange.sends, &exchange.receives}) {
    const char* const direction = legs == &exchange.sends ? "send" : "receive";
    std::vector<bool> seen(size_, false);
    for (const WireExchange::Leg& leg : *legs) {
      if (leg.peer < 0 || leg.peer >= size_ || leg.peer == rank_ || seen[leg.peer]) {
        return Error(StatusCode::kInvalidArgument,
                     "epoch {}: exchange seq {}: a {} names rank {}; want each rank of {} but {} "
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

EpochWire::EpochWire(const std::string& thread)
    : helper_([this, thread] {
        EnterWireThread(thread);
        Help();
      }) {}

EpochWire::~EpochWire() {
  {
    MutexLock lock(&mutex_);
    stopping_ = true;
    changed_.NotifyAll();
  }
  helper_.join();
}

absl::StatusOr<std::string> EpochWire::OpenEpoch(
    EpochId id, int rank, int size, const std::string& thread,
    const std::function<std::shared_ptr<WireEpoch>()>& make) {
  if (size < 1 || size > kMaxWireRanks || rank < 0 || rank >= size) {
    return Error(StatusCode::kInvalidArgument, "epoch {}: rank {} of {} (at most {} ranks)", id,
                 rank, size, kMaxWireRanks);
  }
  MutexLock opening(&opening_);
  {
    MutexLock lock(&mutex_);
    if (epochs_.contains(id)) return Error(StatusCode::kAlreadyExists, "epoch {} is open", id);
    if (epochs_.size() >= kMaxWireEpochs) {
      return Error(StatusCode::kResourceExhausted, "epoch {}: {} epochs are open", id,
                   epochs_.size());
    }
    epochs_[id] = nullptr;  // reserves the id
  }
  const std::shared_ptr<WireEpoch> epoch = make();
  absl::StatusOr<std::string> address = epoch->Open();
  MutexLock lock(&mutex_);
  const auto it = epochs_.find(id);
  if (!address.ok()) {
    if (it != epochs_.end()) epochs_.erase(it);
    return address;
  }
  if (it != epochs_.end()) {
    it->second = epoch;
  } else {
    // Close the epoch, so that its thread ends as that of any other epoch.
    epoch->Close();
    closed_.push_back(epoch);
    address = Error(StatusCode::kCancelled, "epoch {} was closed", id);
  }
  epoch->Start(thread, [this, ended = epoch.get()] {
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

void EpochWire::Connect(EpochId id, std::vector<std::string> addresses, Duration timeout,
                        Done done) {
  WireWork work;
  work.connect = std::move(addresses);
  Push(id, timeout, std::move(work), std::move(done));
}

template <typename Operation>
void EpochWire::Submit(std::optional<Operation> WireWork::*kind, Operation operation, Done done) {
  const EpochId id = operation.epoch;
  const Duration timeout = operation.timeout;
  WireWork work;
  work.*kind = std::move(operation);
  Push(id, timeout, std::move(work), std::move(done));
}

void EpochWire::Submit(WireBroadcast broadcast, Done done) {
  Submit(&WireWork::broadcast, std::move(broadcast), std::move(done));
}

void EpochWire::Submit(WireExchange exchange, Done done) {
  Submit(&WireWork::exchange, std::move(exchange), std::move(done));
}

void EpochWire::Push(EpochId id, Duration timeout, WireWork work, Done done) {
  work.timeout = std::clamp(timeout, Duration::zero(), kMaxWireTimeout);
  work.deadline = std::chrono::steady_clock::now() + work.timeout;
  work.done = std::move(done);
  const std::shared_ptr<WireEpoch> epoch = Find(id);
  absl::Status status = epoch != nullptr ? epoch->Push(&work)
                                         : Error(StatusCode::kNotFound, "epoch {} is not open", id);
  if (status.ok()) return;
  Post([refused = std::move(work.done), status = std::move(status)] { refused(status); });
}

void EpochWire::Close(EpochId id) {
  std::shared_ptr<WireEpoch> epoch;
  {
    MutexLock lock(&mutex_);
    const auto it = epochs_.find(id);
    if (it == epochs_.end()) return;
    epoch = std::move(it->second);
    epochs_.erase(it);
    if (epoch == nullptr) return;
    closed_.push_back(epoch);
  }
  epoch->Close();
}

void EpochWire::CloseAll() {
  std::vector<EpochId> open;
  {
    MutexLock lock(&mutex_);
    for (const auto& [id, epoch] : epochs_) open.push_back(id);
  }
  for (const EpochId id : open) Close(id);
  MutexLock lock(&mutex_);
  while (!closed_.empty()) changed_.Wait(&mutex_);
}

std::shared_ptr<WireEpoch> EpochWire::Find(EpochId id) const {
  MutexLock lock(&mutex_);
  const auto it = epochs_.find(id);
  return it == epochs_.end() ? nullptr : it->second;
}

WireStats EpochWire::Stats(EpochId id) const {
  const std::shared_ptr<WireEpoch> epoch = Find(id);
  return epoch == nullptr ? WireStats{} : epoch->Stats();
}

std::vector<WireUse> EpochWire::Uses(EpochId id) const {
  const std::shared_ptr<WireEpoch> epoch = Find(id);
  return epoch == nullptr ? std::vector<WireUse>() : epoch->Uses();
}

std::vector<std::shared_ptr<const WireEpoch>> EpochWire::Epochs() const {
  std::vector<std::shared_ptr<const WireEpoch>> all;
  MutexLock lock(&mutex_);
  for (const auto& [id, epoch] : epochs_) {
    if (epoch != nullptr) all.push_back(epoch);
  }
  all.insert(all.end(), closed_.begin(), closed_.end());
  return all;
}

void EpochWire::Post(std::function<void()> call) {
  MutexLock lock(&mutex_);
  calls_.push_back(std::move(call));
  changed_.NotifyAll();
}

void EpochWire::Help() {
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
