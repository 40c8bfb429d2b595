// Threads that run tasks made of independent units.
//
// Tasks start in the order of submission; workers go on to the next task when all units of the task
// before are taken, so the tail of a task overlaps with its successor. The worker that ends a
// task's last unit calls Finish, exactly once.
//
// Thread-safe. The destructor waits for every submitted task; meanwhile only tasks that still run
// may submit.
#ifndef REFITD_TRANSPORT_HOST_WORKER_THREADS_H_
#define REFITD_TRANSPORT_HOST_WORKER_THREADS_H_

#include <atomic>
#include <cstdint>
#include <deque>
#include <memory>
#include <thread>
#include <vector>

#include "transport/base/mutex.h"

namespace refitd {

class WorkTask {
 public:
  // A task without units still finishes, on a worker.
  explicit WorkTask(int64_t units) : units_(units), left_(units > 0 ? units : 1) {}
  virtual ~WorkTask() = default;
  WorkTask(const WorkTask&) = delete;
  WorkTask& operator=(const WorkTask&) = delete;

 protected:
  // Units run concurrently, each once.
  virtual void Run(int64_t unit) = 0;
  // Called after all units have run; sees what they wrote.
  virtual void Finish() = 0;

 private:
  friend class WorkerThreads;
  const int64_t units_;
  std::atomic<int64_t> next_{0};
  std::atomic<int64_t> left_;
};

class WorkerThreads {
 public:
  // Threads are named "refitd-copy-N".
  explicit WorkerThreads(int threads);
  ~WorkerThreads();
  WorkerThreads(const WorkerThreads&) = delete;
  WorkerThreads& operator=(const WorkerThreads&) = delete;

  void Submit(std::shared_ptr<WorkTask> task);

 private:
  void Work();

  Mutex mutex_;
  CondVar changed_;
  std::deque<std::shared_ptr<WorkTask>> queue_ ABSL_GUARDED_BY(mutex_);
  bool stopping_ ABSL_GUARDED_BY(mutex_) = false;
  std::vector<std::thread> threads_;  // constant after construction
};

}  // namespace refitd

#endif  // REFITD_TRANSPORT_HOST_WORKER_THREADS_H_
