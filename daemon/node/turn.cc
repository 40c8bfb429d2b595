#include "daemon/node/turn.h"

#include <type_traits>

namespace refitd {

// Without this, handled_ would copy events, which may have every tensor of a model, under the
// mutex.
static_assert(std::is_nothrow_move_constructible_v<MachineEvent>);

Turn::Turn(TurnHost* host, Mutex* mutex) : host_(host), mutex_(mutex) { mutex_->Lock(); }

Turn::Turn(const Turns& turns, Order order) : host_(turns.host), mutex_(turns.mutex) {
  if (order == Order::kAhead) {
    turns.pushes->LockAhead(mutex_);
  } else {
    if (order == Order::kPush) push_.emplace(turns.pushes);
    mutex_->Lock();
  }
}

Turn::~Turn() {
  Drain();
  mutex_->Unlock();
  push_.reset();
  RunEffects();
}

void Turn::Post(std::string group, MachineEvent event) {
  events_.emplace_back(std::move(group), std::move(event));
}

void Turn::Handle(std::string group, MachineEvent event) {
  Post(std::move(group), std::move(event));
  Drain();
}

void Turn::Drain() {
  if (draining_ || events_.empty()) return;
  draining_ = true;
  while (!events_.empty()) {
    auto [group, event] = std::move(events_.front());
    events_.pop_front();
    host_->Dispatch(*this, group, event);
    handled_.push_back(std::move(event));
  }
  draining_ = false;
  host_->Drained();
}

void Turn::RunEffects() const {
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
