#include "daemon/process/service_manager.h"

#include <systemd/sd-daemon.h>

#include <algorithm>
#include <cstdint>
#include <utility>

#include "daemon/process/log.h"

namespace refitd {
namespace {

// A newline would start another assignment.
std::string OneLine(std::string text) {
  std::replace(text.begin(), text.end(), '\n', ' ');
  return text;
}

void Notify(const std::string& state) { sd_notify(/*unset_environment=*/0, state.c_str()); }

}  // namespace

ServiceManager::ServiceManager(std::function<bool()> alive) : alive_(std::move(alive)) {
  uint64_t interval_us = 0;
  if (sd_watchdog_enabled(/*unset_environment=*/0, &interval_us) <= 0) return;
  const std::chrono::microseconds half(interval_us / 2);
  watchdog_ = std::thread([this, half] { RunWatchdog(half); });
}

ServiceManager::~ServiceManager() {
  {
    MutexLock lock(&mutex_);
    stop_ = true;
  }
  stopped_.NotifyAll();
  if (watchdog_.joinable()) watchdog_.join();
}

void ServiceManager::Ready(const std::string& status) {
  Notify("READY=1\nSTATUS=" + OneLine(status));
}

void ServiceManager::Stopping(const std::string& status) {
  Notify("STOPPING=1\nSTATUS=" + OneLine(status));
}

void ServiceManager::RunWatchdog(std::chrono::microseconds interval) {
  auto next = std::chrono::steady_clock::now();
  for (;;) {
    if (alive_()) {
      Notify("WATCHDOG=1");
    } else {
      LogError(
          "watchdog: the daemon does not answer; no sign of life is sent to the service manager");
    }
    next += interval;
    MutexLock lock(&mutex_);
    while (!stop_ && std::chrono::steady_clock::now() < next) stopped_.WaitUntil(&mutex_, next);
    if (stop_) return;
  }
}

}  // namespace refitd
