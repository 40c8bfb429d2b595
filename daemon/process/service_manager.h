// Talks to systemd: readiness, status line, watchdog. Without a service manager (no NOTIFY_SOCKET)
// all functions do nothing.
#ifndef REFITD_DAEMON_PROCESS_SERVICE_MANAGER_H_
#define REFITD_DAEMON_PROCESS_SERVICE_MANAGER_H_

#include <chrono>
#include <functional>
#include <string>
#include <thread>

#include "absl/base/thread_annotations.h"
#include "transport/base/mutex.h"

namespace refitd {

// Thread-safe.
class ServiceManager {
 public:
  // If the unit has WatchdogSec, a thread calls `alive` at half that interval and pings only if
  // `alive` returns true, so that a daemon whose locks can't be had is restarted. `alive` must
  // itself limit how long it takes.
  explicit ServiceManager(std::function<bool()> alive);
  ~ServiceManager();  // ends the thread
  ServiceManager(const ServiceManager&) = delete;
  ServiceManager& operator=(const ServiceManager&) = delete;

  void Ready(const std::string& status);
  void Stopping(const std::string& status);

 private:
  void RunWatchdog(std::chrono::microseconds interval);

  const std::function<bool()> alive_;
  Mutex mutex_;
  CondVar stopped_;
  bool stop_ ABSL_GUARDED_BY(mutex_) = false;
  std::thread watchdog_;  // not started without WatchdogSec
};

}  // namespace refitd

#endif  // REFITD_DAEMON_PROCESS_SERVICE_MANAGER_H_
