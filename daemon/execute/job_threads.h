// Threads for work that takes up to seconds and must not hold the node's mutex: compiling plans and
// node programs, binding moves, opening communicators.
//
// Each job has an owner: a group, or nobody (kNobody). One owner's jobs run one after the other, in
// the order of submission. Owners take turns, one job each, so that an owner with many jobs delays
// another by at most one job a thread. With several threads, an owner's long job keeps only one of
// them busy.
//
// Thread-safe.
#ifndef REFITD_DAEMON_EXECUTE_JOB_THREADS_H_
#define REFITD_DAEMON_EXECUTE_JOB_THREADS_H_

#include <cstdint>
#include <deque>
#include <functional>
#include <map>
#include <string>
#include <thread>
#include <vector>

#include "absl/base/thread_annotations.h"
#include "transport/base/mutex.h"

namespace refitd {

class JobThreads {
 public:
  static constexpr uint64_t kNobody = 0;

  // `name`: of its threads, at most 15 characters.
  explicit JobThreads(std::string name, int threads = 1);
  // Calls Stop.
  ~JobThreads();
  JobThreads(const JobThreads&) = delete;
  JobThreads& operator=(const JobThreads&) = delete;

  // Never waits. After Stop jobs are dropped.
  void Submit(uint64_t owner, std::function<void()> job);
  void Submit(std::function<void()> job) { Submit(kNobody, std::move(job)); }
  // Runs the job once, after all jobs that any owner has submitted before.
  void SubmitBehindAll(std::function<void()> job);
  // Waits for running jobs and drops the others. Must not be called from a job.
  void Stop();

 private:
  struct Queue {
    std::deque<std::function<void()>> jobs;
    bool running = false;
  };

  void SubmitLocked(uint64_t owner, std::function<void()> job)
      ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_);
  void Work();

  const std::string name_;
  Mutex mutex_;
  CondVar changed_;
  std::map<uint64_t, Queue> queues_ ABSL_GUARDED_BY(mutex_);  // by owner; only owners with jobs
  std::deque<uint64_t> turns_ ABSL_GUARDED_BY(mutex_);        // owners that wait, in order
  bool stopping_ ABSL_GUARDED_BY(mutex_) = false;
  std::vector<std::thread> threads_;
};

}  // namespace refitd

#endif  // REFITD_DAEMON_EXECUTE_JOB_THREADS_H_
