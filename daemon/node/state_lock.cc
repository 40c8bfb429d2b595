#include "daemon/node/state_lock.h"

namespace refitd {

bool StateMutex::AnyAhead() {
  MutexLock lock(&gate_);
  return ahead_ > 0;
}

void StateMutex::LockAhead() {
  {
    MutexLock lock(&gate_);
    ++ahead_;
  }
  raw_.Lock();
  MutexLock lock(&gate_);
  if (--ahead_ == 0) none_ahead_.NotifyOne();
}

void StateMutex::LetAhead() {
  MutexLock lock(&gate_);
  const auto deadline = std::chrono::steady_clock::now() + longest_;
  while (ahead_ > 0 && none_ahead_.WaitUntil(&gate_, deadline)) {
  }
}

StateLock::StateLock(StateMutex* mutex, Order order) : mutex_(mutex) {
  if (order == Order::kAhead) {
    mutex_->LockAhead();
    return;
  }
  if (order == Order::kPush) {
    push_.emplace(&mutex_->one_push_);
    mutex_->LetAhead();
  }
  mutex_->raw_.Lock();
}

StateLock::~StateLock() {
  Drain();
  if (deadline_moved_) mutex_->handlers_.changed();
  mutex_->raw_.Unlock();
  push_.reset();
  RunEffects();
}

void StateLock::Post(std::string group, MachineEvent event) {
  events_.emplace_back(std::move(group), std::move(event));
}

void StateLock::Handle(std::string group, MachineEvent event) {
  Post(std::move(group), std::move(event));
  Drain();
}

void StateLock::Drain() {
  if (draining_ || events_.empty()) return;
  draining_ = true;
  while (!events_.empty()) {
    handled_.splice(handled_.end(), events_, events_.begin());
    auto& [group, event] = handled_.back();
    mutex_->handlers_.dispatch(*this, group, event);
  }
  draining_ = false;
  deadline_moved_ = false;
  mutex_->handlers_.changed();
}

void StateLock::RunEffects() const {
  for (const auto& session : sessions_) session->Flush();
  for (const auto& [link, refused] : links_) {
    for (PeerLink::Refused& report : link->Flush()) refused(std::move(report));
  }
  for (const auto& sink : engines_) sink->Flush();
  for (const std::function<void()>& answer : answers_) answer();
  for (const auto& sink : trainers_) sink->Flush();
  for (const std::function<void()>& run : last_) run();
}

}  // namespace refitd
