// The daemon's mutex, and a thread's hold of it. Code that reads or changes state under the mutex
// takes a StateLock, or gets its caller's StateLock&.
//
// A StateLock holds the mutex from its constructor to its destructor, which
//   1. drains the events that were posted and not handled yet, still under the mutex;
//   2. releases the mutex;
//   3. runs the effects in a fixed order: commands and reports to other daemons and events to
//      engines, which updates wait for; answers to calls; events to trainers, which nobody waits
//      for; and slow work, such as unmapping memory.
// So no stream is written, no call answered and no memory unmapped under the mutex.
//
// An event goes to one group's machine (Handlers::dispatch) and may cause events for any group.
// Those are posted, and handled in the order of posting.
//
// A StateLock belongs to the thread that made it. StateMutex is thread-safe.
#ifndef REFITD_DAEMON_NODE_STATE_LOCK_H_
#define REFITD_DAEMON_NODE_STATE_LOCK_H_

#include <chrono>
#include <cstdint>
#include <functional>
#include <list>
#include <memory>
#include <optional>
#include <string>
#include <utility>
#include <vector>

#include "absl/base/thread_annotations.h"
#include "daemon/group/machine.h"
#include "daemon/link/peer_link.h"
#include "daemon/node/sinks.h"
#include "transport/base/mutex.h"

namespace refitd {

class StateLock;

// The mutex, what handles events under it, and the order of its callers.
//
// A trainer may have hundreds of pushes under way, each with some tenths of a millisecond of work
// under the mutex, and a mutex is not fair: it goes to the caller that asks at the right moment. In
// a measurement with 30 pushes at once, the end of a transfer waited 6 ms for the mutex, and
// meanwhile all slots were full and the links idle (docs/decisions.md). So pushes take the mutex
// one at a time and let callers that free slots go ahead, which then wait for at most one push.
class StateMutex {
 public:
  // Both are called under the mutex.
  struct Handlers {
    // Hands the event to the group's machine and performs the machine's actions; the daemon's is
    // DispatchEvent (actions.cc). Not reentrant: events that an action causes are posted to the
    // lock. What is left in the event is freed without the mutex.
    std::function<void(StateLock&, const std::string& group, MachineEvent& event)> dispatch;
    // Called when some events were handled and no more are posted, or a deadline has moved.
    std::function<void()> changed;
  };
  // Stands for the mutex in the analysis of locks, which can't see that the different names by
  // which the classes of the daemon's state reach the mutex mean the same one. A thread has
  // kStateLocked while it has a StateLock.
  struct ABSL_LOCKABLE Locked {
    // For code where the analysis can't see the lock, such as a callback; checks nothing.
    void AssertHeld() const ABSL_ASSERT_EXCLUSIVE_LOCK() {}
  };

  // `longest`: how long callers ahead may keep a push waiting, however many come (P4).
  explicit StateMutex(Handlers handlers,
                      std::chrono::milliseconds longest = std::chrono::milliseconds(10))
      : handlers_(std::move(handlers)), longest_(longest) {}
  StateMutex(const StateMutex&) = delete;
  StateMutex& operator=(const StateMutex&) = delete;

  // The mutex alone, for code that handles no event, and for waits.
  Mutex* raw() ABSL_LOCK_RETURNED(raw_) { return &raw_; }
  // Whether a caller waits for the mutex ahead of pushes.
  bool AnyAhead();

 private:
  friend class StateLock;

  // Takes the mutex, ahead of all pushes that wait for it.
  void LockAhead() ABSL_EXCLUSIVE_LOCK_FUNCTION(raw_);
  // Waits until no caller is ahead.
  void LetAhead();

  const Handlers handlers_;
  const std::chrono::milliseconds longest_;
  Mutex raw_;
  Mutex one_push_;  // taken before gate_ and raw_
  Mutex gate_;
  CondVar none_ahead_;
  int ahead_ ABSL_GUARDED_BY(gate_) = 0;
};
inline constexpr StateMutex::Locked kStateLocked;

class ABSL_SCOPED_LOCKABLE StateLock {
 public:
  // The order in which threads that wait get the mutex.
  enum class Order : uint8_t {
    kAny,
    kAhead,  // before all pushes; for calls that free slots, and members' events
    kPush,   // one push at a time, after those ahead
  };

  explicit StateLock(StateMutex* mutex, Order order = Order::kAny)
      ABSL_EXCLUSIVE_LOCK_FUNCTION(mutex->raw(), kStateLocked);
  ~StateLock() ABSL_UNLOCK_FUNCTION();
  StateLock(const StateLock&) = delete;
  StateLock& operator=(const StateLock&) = delete;

  // ---- events ----
  // The event is handled by the next Drain, or by the destructor.
  void Post(std::string group, MachineEvent event);
  // Handles all posted events. Does nothing within Dispatch, since the lock drains already.
  void Drain();
  // Posts the event, then drains.
  void Handle(std::string group, MachineEvent event);

  // A deadline may have moved without an event: the timer looks again when the lock ends.
  void DeadlineMoved() { deadline_moved_ = true; }

  // ---- effects ----
  // A link that sent several messages in a row is flushed once.
  void Flush(const std::shared_ptr<PeerSession>& session) {
    if (sessions_.empty() || sessions_.back() != session) sessions_.push_back(session);
  }
  // `refused` is called for each report that can't be sent, without the mutex.
  using Refusal = std::function<void(PeerLink::Refused)>;
  // Messages to a link mostly follow each other, so only the last entry is compared;
  // flushing a link twice does no harm.
  void Flush(const std::shared_ptr<PeerLink>& link, Refusal refused) {
    if (!links_.empty() && links_.back().first == link) return;
    links_.emplace_back(link, std::move(refused));
  }
  void Flush(const std::shared_ptr<MemberSink>& sink, bool engine) {
    (engine ? engines_ : trainers_).push_back(sink);
  }
  void Answer(std::function<void()> answer) { answers_.push_back(std::move(answer)); }
  // Runs slow work that nobody waits for, after all other effects.
  void Last(std::function<void()> run) { last_.push_back(std::move(run)); }

 private:
  void RunEffects() const;

  StateMutex* const mutex_;
  std::optional<MutexLock> push_;  // a push holds this beside the mutex
  bool draining_ = false;
  bool deadline_moved_ = false;
  // Handled events are freed without the mutex, and no event is copied, since an event may have
  // every tensor of a model.
  std::list<std::pair<std::string, MachineEvent>> events_;
  std::list<std::pair<std::string, MachineEvent>> handled_;
  std::vector<std::shared_ptr<PeerSession>> sessions_;
  std::vector<std::pair<std::shared_ptr<PeerLink>, Refusal>> links_;
  std::vector<std::shared_ptr<MemberSink>> engines_;
  std::vector<std::function<void()>> answers_;
  std::vector<std::shared_ptr<MemberSink>> trainers_;
  std::vector<std::function<void()>> last_;
};

}  // namespace refitd

#endif  // REFITD_DAEMON_NODE_STATE_LOCK_H_
