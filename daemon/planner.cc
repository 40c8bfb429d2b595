#include "daemon/planner.h"

#include <pthread.h>

#include <utility>

namespace refitd {

Planner::Planner(std::string name) : name_(std::move(name)) {
  thread_ = std::thread([this] { Work(); });
}

Planner::~Planner() { Stop(); }

void Planner::Submit(std::function<void()> job) {
  MutexLock lock(&mutex_);
  if (stopping_) return;
  jobs_.push_back(std::move(job));
  changed_.NotifyOne();
}

void Planner::Stop() {
  // What dropped jobs hold goes after the mutex.
  std::deque<std::function<void()>> dropped;
  {
    MutexLock lock(&mutex_);
    stopping_ = true;
    dropped.swap(jobs_);
    changed_.NotifyAll();
  }
  if (thread_.joinable()) thread_.join();
}

void Planner::Work() {
  pthread_setname_np(pthread_self(), name_.c_str());
  while (true) {
    std::function<void()> job;
    {
      MutexLock lock(&mutex_);
      while (!stopping_ && jobs_.empty()) changed_.Wait(&mutex_);
      if (stopping_) return;
      job = std::move(jobs_.front());
      jobs_.pop_front();
    }
    job();
  }
}

}  // namespace refitd
