#include "client/reattach.h"

#include <algorithm>
#include <utility>

#include "client/call.h"
#include "transport/base/failure.h"
#include "transport/base/status.h"

namespace refitd::client {

Duration Backoff::Next() {
  const Duration pause = pause_;
  pause_ = std::min<Duration>(2 * pause_, kLongestPause);
  return std::uniform_int_distribution<int64_t>(pause.count() / 2, pause.count())(random_) *
         Duration(1);
}

// Hashes group, name and rank by FNV-1a.
uint64_t SeedOf(std::string_view group, std::string_view name, int rank) {
  uint64_t seed = 0xcbf29ce484222325;
  for (const char c : fmt::format("{}\n{}\n{}", group, name, rank)) {
    seed = (seed ^ static_cast<unsigned char>(c)) * 0x100000001b3;
  }
  return seed;
}

bool DaemonGone(const absl::Status& lease_end) {
  switch (lease_end.code()) {
    case absl::StatusCode::kUnavailable:
    case absl::StatusCode::kCancelled:  // a server that was shut down at once
    case absl::StatusCode::kInternal:   // a stream that was reset
    case absl::StatusCode::kUnknown:
      return true;
    default:
      return false;
  }
}

bool RefusedForGood(const absl::Status& attempt) {
  switch (attempt.code()) {
    case absl::StatusCode::kInvalidArgument:
    case absl::StatusCode::kFailedPrecondition:
    case absl::StatusCode::kUnimplemented:
    case absl::StatusCode::kOutOfRange:
      return true;
    default:
      return false;
  }
}

absl::Status AttachUntil(TimePoint deadline, uint64_t seed,
                         const std::function<absl::Status()>& attach) {
  Backoff backoff(seed);
  while (true) {
    absl::Status attached = attach();
    if (attached.ok() || !DaemonGone(attached)) return attached;
    const Duration pause = backoff.Next();
    if (After(pause) >= deadline) return attached;
    std::this_thread::sleep_for(pause);
  }
}

void Reattacher::Signal::Raise() {
  MutexLock lock(&mutex);
  raised = true;
  cond.NotifyAll();
}

Reattacher::Reattacher(std::string daemon, Duration limit, Duration attempt, uint64_t seed,
                       Hooks hooks)
    : daemon_(std::move(daemon)),
      limit_(limit),
      attempt_(attempt),
      hooks_(std::move(hooks)),
      seeds_(seed),
      thread_([this](const std::stop_token& stop) { Run(stop); }) {}

Reattacher::~Reattacher() {
  thread_.request_stop();
  signal_->Raise();
  thread_.join();
}

std::function<void()> Reattacher::Waker() const {
  return [signal = signal_] { signal->Raise(); };
}

void Reattacher::Run(const std::stop_token& stop) {
  while (!stop.stop_requested()) {
    const std::optional<absl::Status> why = hooks_.lost();
    if (why.has_value()) {
      if (!ComeBack(*why, stop)) return;
      continue;
    }
    MutexLock lock(&signal_->mutex);
    while (!signal_->raised) signal_->cond.WaitUntil(&signal_->mutex, After(kLongestWait));
    signal_->raised = false;
  }
}

bool Reattacher::ComeBack(absl::Status why, const std::stop_token& stop) {
  if (!DaemonGone(why)) {
    hooks_.give_up(std::move(why));
    return false;
  }
  const TimePoint deadline = After(limit_);
  Backoff backoff(seeds_());
  while (true) {
    absl::Status attached = hooks_.attach(std::min(deadline, After(attempt_)), stop);
    if (stop.stop_requested()) return false;
    if (attached.ok()) return true;
    if (RefusedForGood(attached)) {
      hooks_.give_up(Prefixed(attached, "attaching again to the daemon at {}", daemon_));
      return false;
    }
    const Duration pause = backoff.Next();
    if (After(pause) >= deadline) {
      const bool denied = absl::IsPermissionDenied(attached);
      hooks_.give_up(SuspectDaemon(
          Error(denied ? attached.code() : absl::StatusCode::kUnavailable,
                "the daemon at {} did not take this member back within {} ms (reattach): {}",
                daemon_, ToMillis(limit_), Message(attached)),
          daemon_));
      return false;
    }
    if (!Sleep(pause, stop)) return false;
  }
}

bool Reattacher::Sleep(Duration pause, const std::stop_token& stop) {
  const TimePoint end = After(pause);
  MutexLock lock(&signal_->mutex);
  while (!stop.stop_requested()) {
    if (!signal_->cond.WaitUntil(&signal_->mutex, end)) return !stop.stop_requested();
  }
  return false;
}

}  // namespace refitd::client
