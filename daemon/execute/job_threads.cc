#include "daemon/execute/job_threads.h"

#include <pthread.h>

#include <atomic>
#include <memory>
#include <utility>

#include "transport/base/status.h"

namespace refitd {

JobThreads::JobThreads(std::string name, int threads) : name_(std::move(name)) {
  REFITD_CHECK(threads > 0);
  threads_.reserve(static_cast<size_t>(threads));
  for (int i = 0; i < threads; ++i) threads_.emplace_back([this] { Work(); });
}

JobThreads::~JobThreads() { Stop(); }

void JobThreads::Submit(uint64_t owner, std::function<void()> job) {
  MutexLock lock(&mutex_);
  SubmitLocked(owner, std::move(job));
}

// Every owner that has jobs gets another behind them; the last of these to run runs `job`.
void JobThreads::SubmitBehindAll(std::function<void()> job) {
  MutexLock lock(&mutex_);
  if (queues_.empty()) return SubmitLocked(kNobody, std::move(job));
  const auto left = std::make_shared<std::atomic<size_t>>(queues_.size());
  const auto shared = std::make_shared<const std::function<void()>>(std::move(job));
  for (auto& [owner, queue] : queues_) {
    SubmitLocked(owner, [left, shared] {
      if (left->fetch_sub(1) == 1) (*shared)();
    });
  }
}

void JobThreads::SubmitLocked(uint64_t owner, std::function<void()> job) {
  if (stopping_) return;
  Queue& queue = queues_[owner];
  queue.jobs.push_back(std::move(job));
  if (queue.running || queue.jobs.size() > 1) return;  // the owner has its turn, or waits for it
  turns_.push_back(owner);
  changed_.NotifyOne();
}

void JobThreads::Stop() {
  // Dropped jobs are destroyed after the mutex was released, with all that they hold.
  std::vector<std::deque<std::function<void()>>> dropped;
  {
    MutexLock lock(&mutex_);
    stopping_ = true;
    turns_.clear();
    for (auto& [owner, queue] : queues_) dropped.push_back(std::move(queue.jobs));
    for (auto& [owner, queue] : queues_) queue.jobs.clear();
    changed_.NotifyAll();
  }
  for (std::thread& thread : threads_) {
    if (thread.joinable()) thread.join();
  }
}

void JobThreads::Work() {
  pthread_setname_np(pthread_self(), name_.c_str());
  while (true) {
    uint64_t owner = kNobody;
    std::function<void()> job;
    {
      MutexLock lock(&mutex_);
      while (!stopping_ && turns_.empty()) changed_.Wait(&mutex_);
      if (stopping_) return;
      owner = turns_.front();
      turns_.pop_front();
      Queue& queue = queues_.at(owner);
      queue.running = true;
      job = std::move(queue.jobs.front());
      queue.jobs.pop_front();
    }
    job();
    job = nullptr;  // destroyed before its owner's next job begins
    MutexLock lock(&mutex_);
    const auto queue = queues_.find(owner);
    queue->second.running = false;
    if (queue->second.jobs.empty()) {
      queues_.erase(queue);
    } else {
      turns_.push_back(owner);
      changed_.NotifyOne();
    }
  }
}

}  // namespace refitd
