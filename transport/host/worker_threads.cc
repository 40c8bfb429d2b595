#include "transport/host/worker_threads.h"

#include <pthread.h>

#include <algorithm>
#include <utility>

#include "transport/base/status.h"

namespace refitd {

WorkerThreads::WorkerThreads(int threads) {
  REFITD_CHECK(threads > 0);
  threads_.reserve(static_cast<size_t>(threads));
  for (int i = 0; i < threads; ++i) {
    threads_.emplace_back([this, i] {
      pthread_setname_np(pthread_self(), fmt::format("refitd-copy-{}", i).c_str());
      Work();
    });
  }
}

WorkerThreads::~WorkerThreads() {
  {
    MutexLock lock(&mutex_);
    stopping_ = true;
  }
  changed_.NotifyAll();
  for (std::thread& thread : threads_) thread.join();
}

void WorkerThreads::Submit(std::shared_ptr<WorkTask> task) {
  const bool one = task->units_ <= 1;
  {
    MutexLock lock(&mutex_);
    queue_.push_back(std::move(task));
  }
  // A small task wakes one thread only: waking costs more than its work.
  if (one) {
    changed_.NotifyOne();
  } else {
    changed_.NotifyAll();
  }
}

void WorkerThreads::Work() {
  mutex_.Lock();
  while (true) {
    while (queue_.empty() && !stopping_) changed_.Wait(&mutex_);
    if (queue_.empty()) break;
    std::shared_ptr<WorkTask> task = queue_.front();
    mutex_.Unlock();

    const int64_t units = std::max<int64_t>(task->units_, 1);
    for (int64_t unit; (unit = task->next_.fetch_add(1, std::memory_order_relaxed)) < units;) {
      if (task->units_ > 0) task->Run(unit);
      if (task->left_.fetch_sub(1, std::memory_order_acq_rel) == 1) task->Finish();
    }

    // All units are taken. The first worker that sees this removes the task from the queue, so that
    // the next task starts.
    mutex_.Lock();
    if (!queue_.empty() && queue_.front() == task) queue_.pop_front();
  }
  mutex_.Unlock();
}

}  // namespace refitd
