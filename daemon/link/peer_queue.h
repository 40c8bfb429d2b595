// What waits to be written to one link, in order, numbered and bounded (kMaxPeerQueuedBytes).
//
// Not thread-safe: lives under its link's mutex.
#ifndef REFITD_DAEMON_LINK_PEER_QUEUE_H_
#define REFITD_DAEMON_LINK_PEER_QUEUE_H_

#include <cstddef>
#include <cstdint>
#include <deque>
#include <utility>

#include "daemon/link/peer_link.h"

namespace refitd {

template <typename Message>
class PeerQueue {
 public:
  // Whether so many bytes more may wait.
  bool HasRoom(size_t bytes) const { return bytes <= kMaxPeerQueuedBytes - queued_bytes_; }

  // `bytes`: its serialised size, for which there is room.
  void Push(Message message, size_t bytes) {
    queued_bytes_ += bytes;
    entries_.push_back({std::move(message), bytes});
  }
  // The same with the next sequence.
  void PushNumbered(Message message, size_t bytes, uint64_t incarnation) {
    message.set_sequence(++sequence_);
    message.set_incarnation(incarnation);
    Push(std::move(message), bytes);
  }

  // What to write now; null: nothing waits, or a write is under way. Stays where it is until
  // Written.
  const Message* StartNext() {
    if (writing_ || entries_.empty()) return nullptr;
    writing_ = true;
    return &entries_.front().message;
  }
  void Written() {
    writing_ = false;
    queued_bytes_ -= entries_.front().bytes;
    entries_.pop_front();
  }
  // Forgets everything but what is being written.
  void Drop() {
    while (entries_.size() > (writing_ ? 1U : 0U)) {
      queued_bytes_ -= entries_.back().bytes;
      entries_.pop_back();
    }
  }
  // Nothing waits and nothing is being written.
  bool idle() const { return entries_.empty(); }

 private:
  struct Entry {
    Message message;
    size_t bytes;
  };
  std::deque<Entry> entries_;  // the front is being written if writing_
  size_t queued_bytes_ = 0;
  uint64_t sequence_ = 0;
  bool writing_ = false;
};

}  // namespace refitd

#endif  // REFITD_DAEMON_LINK_PEER_QUEUE_H_
