// One thread for what takes up to seconds and must not hold the node's mutex: compiling plans and
// node programs, binding moves. Jobs run in the order of submission.
//
// Thread-safe.
#ifndef REFITD_DAEMON_PLANNER_H_
#define REFITD_DAEMON_PLANNER_H_

#include <deque>
#include <functional>
#include <string>
#include <thread>

#include "absl/base/thread_annotations.h"
#include "transport/base/mutex.h"

namespace refitd {

class Planner {
 public:
  // The thread's name: at most 15 characters.
  explicit Planner(std::string name);
  // As Stop.
  ~Planner();
  Planner(const Planner&) = delete;
  Planner& operator=(const Planner&) = delete;

  // Never waits. After Stop jobs are dropped.
  void Submit(std::function<void()> job);
  // Waits for the job that runs and drops those that don't. Not from a job.
  void Stop();

 private:
  void Work();

  const std::string name_;
  Mutex mutex_;
  CondVar changed_;
  std::deque<std::function<void()>> jobs_ ABSL_GUARDED_BY(mutex_);
  bool stopping_ ABSL_GUARDED_BY(mutex_) = false;
  std::thread thread_;
};

}  // namespace refitd

#endif  // REFITD_DAEMON_PLANNER_H_
