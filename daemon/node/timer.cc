#include "daemon/node/timer.h"

#include <pthread.h>

namespace refitd {

Timer::~Timer() { Stop(); }

void Timer::Start() {
  thread_ = std::thread([this] { Loop(); });
}

void Timer::Wake() {
  if (host_->NextWake() < wakes_) cond_.NotifyAll();
}

void Timer::Stop() {
  {
    MutexLock lock(mutex_);
    stopping_ = true;
    cond_.NotifyAll();
  }
  if (thread_.joinable()) thread_.join();
}

void Timer::Loop() {
  pthread_setname_np(pthread_self(), "refitd-timer");
  while (true) {
    Turn turn(turns_, mutex_);
    wakes_ = host_->NextWake();
    while (!stopping_ && std::chrono::steady_clock::now() < wakes_) {
      cond_.WaitUntil(mutex_, wakes_);
      wakes_ = host_->NextWake();
    }
    if (stopping_) return;
    host_->Ring(turn, std::chrono::steady_clock::now());
  }
}

}  // namespace refitd
