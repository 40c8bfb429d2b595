// The messages of one link that are queued as values and wait to be encoded.
//
// A thread that queues a message holds its node's mutex, so it must not wait for a thread that
// encodes or writes. The backlog therefore has a mutex of its own, which is held for a few
// instructions only; the link's mutex, under which gRPC serialises what it writes, comes before it.
//
// The backlog has no limit of its own: a thread that queued messages calls Flush before its turn
// ends, and the encoded messages are limited (PeerQueue).
//
// Thread-safe.
#ifndef REFITD_DAEMON_LINK_PEER_BACKLOG_H_
#define REFITD_DAEMON_LINK_PEER_BACKLOG_H_

#include <cstdint>
#include <deque>
#include <optional>
#include <utility>

#include "absl/base/thread_annotations.h"
#include "transport/base/mutex.h"

namespace refitd {

template <typename Value>
class PeerBacklog {
 public:
  struct Entry {
    Value value;
    uint64_t incarnation;  // the group's when the value was added
  };

  // The link is up. Until then, nothing is added.
  void Open(uint64_t incarnation) {
    MutexLock lock(&mutex_);
    open_ = true;
    incarnation_ = incarnation;
  }
  // The group was replaced: values added from now on belong to `incarnation`.
  void Replace(uint64_t incarnation) {
    MutexLock lock(&mutex_);
    incarnation_ = incarnation;
  }

  // False: the backlog is not open. `next_incarnation`: given with a value that announces that the
  // group was replaced; the values after it belong to that incarnation.
  bool Add(Value value, std::optional<uint64_t> next_incarnation = std::nullopt) {
    MutexLock lock(&mutex_);
    if (!open_) return false;
    entries_.push_back({std::move(value), incarnation_});
    incarnation_ = next_incarnation.value_or(incarnation_);
    return true;
  }

  // Nothing more is added; values that wait are still encoded.
  void Close() {
    MutexLock lock(&mutex_);
    open_ = false;
  }
  // Closes, and forgets the values that wait.
  void Drop() {
    std::deque<Entry> dropped;  // destroyed without the mutex
    MutexLock lock(&mutex_);
    open_ = false;
    dropped.swap(entries_);
  }

  // One thread at a time encodes, so that order is kept; it also gets values that others add
  // meanwhile. False: another thread encodes. True: the caller must call Next until it returns
  // none.
  bool StartEncoding() {
    MutexLock lock(&mutex_);
    return !std::exchange(encoding_, true);
  }
  // The next value to encode. Empty: none is left, and the caller encodes no more.
  std::optional<Entry> Next() {
    MutexLock lock(&mutex_);
    if (entries_.empty()) {
      encoding_ = false;
      return std::nullopt;
    }
    std::optional<Entry> next = std::move(entries_.front());
    entries_.pop_front();
    return next;
  }

  // Whether no value waits or is being encoded.
  bool idle() const {
    MutexLock lock(&mutex_);
    return entries_.empty() && !encoding_;
  }

 private:
  mutable Mutex mutex_;
  std::deque<Entry> entries_ ABSL_GUARDED_BY(mutex_);
  uint64_t incarnation_ ABSL_GUARDED_BY(mutex_) = 0;
  bool open_ ABSL_GUARDED_BY(mutex_) = false;
  bool encoding_ ABSL_GUARDED_BY(mutex_) = false;
};

}  // namespace refitd

#endif  // REFITD_DAEMON_LINK_PEER_BACKLOG_H_
