// Child processes of the demo and the events that they print.
//
// Children die with their parent: by the kernel if it is killed, by ~Child otherwise. Each wait has
// a deadline (P4). Child: Signal is thread-safe until Wait or the destructor reaps; the rest
// belongs to the thread that started it. EventLog is thread-safe.
#ifndef REFITD_TESTS_DEMO_CHILD_H_
#define REFITD_TESTS_DEMO_CHILD_H_

#include <sys/types.h>

#include <chrono>
#include <map>
#include <memory>
#include <nlohmann/json.hpp>
#include <string>
#include <thread>
#include <vector>

#include "absl/status/statusor.h"
#include "transport/base/mutex.h"
#include "transport/base/unique_fd.h"

namespace refitd::demo {

using TimePoint = std::chrono::steady_clock::time_point;

// True once SIGINT or SIGTERM came: every wait here then ends with CANCELLED.
bool Interrupted();
void CatchInterrupts();

// The lines that children printed on stdout, by child. Each line is a JSON object.
class EventLog {
 public:
  void Add(const std::string& child, const std::string& line);
  void Close(const std::string& child);  // nothing more will come

  // Waits for an object of `child` whose "event" is `event` and whose "version" is `version` (0:
  // any). ABORTED if the child says that something went wrong or ends before; DEADLINE_EXCEEDED.
  absl::StatusOr<nlohmann::json> Await(const std::string& child, const std::string& event,
                                       int64_t version, TimePoint deadline);
  // The last object that the child printed; null if there is none.
  nlohmann::json Last(const std::string& child);

 private:
  struct Output {
    std::vector<nlohmann::json> events;
    bool closed = false;
  };
  Mutex mutex_;
  CondVar changed_;
  std::map<std::string, Output> outputs_ ABSL_GUARDED_BY(mutex_);
};

class Child {
 public:
  // Runs argv[0] without REFITD_* variables; stderr goes to `stderr_path`, stdout to `events`.
  static absl::StatusOr<std::unique_ptr<Child>> Start(const std::string& name,
                                                      const std::vector<std::string>& argv,
                                                      const std::string& stderr_path,
                                                      EventLog* events);
  ~Child();
  Child(const Child&) = delete;
  Child& operator=(const Child&) = delete;

  const std::string& name() const { return name_; }
  pid_t pid() const { return pid_; }
  void Signal(int signal) const;
  // Exit code, or 128 + signal. DEADLINE_EXCEEDED: it still runs.
  absl::StatusOr<int> Wait(TimePoint deadline);

 private:
  Child(std::string name, pid_t pid, UniqueFd pidfd)
      : name_(std::move(name)), pid_(pid), pidfd_(std::move(pidfd)) {}

  const std::string name_;
  const pid_t pid_;
  UniqueFd pidfd_;
  std::thread reader_;
  bool reaped_ = false;
  int exit_code_ = -1;
};

}  // namespace refitd::demo

#endif  // REFITD_TESTS_DEMO_CHILD_H_
