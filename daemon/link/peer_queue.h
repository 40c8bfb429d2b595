// The messages that wait to be written to one link: in order, numbered, and at most
// kMaxPeerQueuedBytes.
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

// Encoded size of a message's sequence and incarnation, at most.
inline constexpr size_t kPeerNumberingBytes = 20;

template <typename Message>
class PeerQueue {
 public:
  // Whether this many bytes more may wait.
  bool HasRoom(size_t bytes) const { return bytes <= kMaxPeerQueuedBytes - queued_bytes_; }

  // `bytes`: the message's serialised size, for which there must be room.
  void Push(Message message, size_t bytes) {
    queued_bytes_ += bytes;
    entries_.push_back({std::move(message), bytes});
  }
  // Does what Push does, with the next sequence number. `bytes` includes kPeerNumberingBytes.
  void PushNumbered(Message message, size_t bytes, uint64_t incarnation) {
    message.set_sequence(++sequence_);
    message.set_incarnation(incarnation);
    Push(std::move(message), bytes);
  }

  // The message to write now, which stays in the queue until Written. Null: none waits, or a write
  // is under way.
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
  // Forgets all messages except the one that is being written.
  void Drop() {
    while (entries_.size() > (writing_ ? 1U : 0U)) {
      queued_bytes_ -= entries_.back().bytes;
      entries_.pop_back();
    }
  }
  // Whether no message waits and none is being written.
  bool idle() const { return entries_.empty(); }

 private:
  struct Entry {
    Message message;
    size_t bytes;
  };
  std::deque<Entry> entries_;  // while writing_, the front is being written
  size_t queued_bytes_ = 0;
  uint64_t sequence_ = 0;
  bool writing_ = false;
};

}  // namespace refitd

#endif  // REFITD_DAEMON_LINK_PEER_QUEUE_H_
