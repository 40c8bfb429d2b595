// One turn at the daemon's state. Code that reads or changes state under the daemon's mutex takes a
// Turn, or is handed its caller's Turn&.
//
// A turn holds the mutex from its constructor to its destructor, which
//   1. drains the events that were posted and not handled yet, still under the mutex;
//   2. releases the mutex;
//   3. runs the effects of the turn in a fixed order: commands and reports to other daemons and
//      events to engines, which updates wait for; answers to calls; events to trainers, which
//      nobody waits for; and slow work, such as unmapping memory.
// So no stream is written, no call answered and no memory unmapped under the mutex.
//
// An event goes to one group's machine (TurnHost::Dispatch) and may cause events for any group.
// Those are posted, and handled in the order of posting.
//
// A turn belongs to the thread that made it.
#ifndef REFITD_DAEMON_NODE_TURN_H_
#define REFITD_DAEMON_NODE_TURN_H_

#include <cstdint>
#include <deque>
#include <functional>
#include <memory>
#include <optional>
#include <string>
#include <utility>
#include <vector>

#include "absl/base/thread_annotations.h"
#include "daemon/group/machine.h"
#include "daemon/link/peer_link.h"
#include "daemon/node/push_turns.h"
#include "daemon/node/sinks.h"
#include "transport/base/mutex.h"

namespace refitd {

class Turn;

// Handles the events of turns. Both functions are called under the mutex of the turn.
class TurnHost {
 public:
  virtual ~TurnHost() = default;
  // Hands the event to the group's machine and performs the machine's actions. Not reentrant:
  // events that an action causes are posted to `turn`. What is left in the event is freed without
  // the mutex.
  virtual void Dispatch(Turn& turn, const std::string& group, MachineEvent& event) = 0;
  // Called when some events were handled and no more are posted.
  virtual void Drained() = 0;
};

// Stands for the mutex in the analysis of locks: the classes of the daemon's state reach the mutex
// by different names, of which the analysis can't tell that they mean the same mutex. A thread has
// kInTurn while it has a turn.
class ABSL_LOCKABLE InTurn {
 public:
  // Tells the analysis what it can't see (inside a callback, say); checks nothing.
  void AssertHeld() const ABSL_ASSERT_EXCLUSIVE_LOCK() {}
};
inline constexpr InTurn kInTurn;

// The objects that a thread needs to take a turn.
struct Turns {
  TurnHost* host;
  Mutex* mutex;
  PushTurns* pushes;
};

class ABSL_SCOPED_LOCKABLE Turn {
 public:
  // The order in which turns that wait get the mutex.
  enum class Order : uint8_t {
    kAny,
    kAhead,  // before all pushes; for calls that free slots, and members' events
    kPush,   // one push at a time, after those ahead
  };

  Turn(TurnHost* host, Mutex* mutex) ABSL_EXCLUSIVE_LOCK_FUNCTION(mutex, kInTurn);
  explicit Turn(const Turns& turns, Order order = Order::kAny)
      ABSL_EXCLUSIVE_LOCK_FUNCTION(turns.mutex, kInTurn);
  ~Turn() ABSL_UNLOCK_FUNCTION();
  Turn(const Turn&) = delete;
  Turn& operator=(const Turn&) = delete;

  // ---- events ----
  // The event is handled by the next Drain, or at the end of the turn.
  void Post(std::string group, MachineEvent event);
  // Handles all posted events. Does nothing within Dispatch, since the turn drains already.
  void Drain();
  // Posts the event, then drains.
  void Handle(std::string group, MachineEvent event);

  // ---- effects ----
  // A link that sent several messages in a row is flushed once.
  void Flush(const std::shared_ptr<PeerSession>& session) {
    if (sessions_.empty() || sessions_.back() != session) sessions_.push_back(session);
  }
  // `refused` is called for each report that turns out not to be sendable, without the mutex.
  using Refusal = std::function<void(PeerLink::Refused)>;
  // Messages of one turn to a link mostly follow each other, so only the last entry is compared;
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

  TurnHost* const host_;
  Mutex* const mutex_;
  std::optional<PushTurns::Push> push_;  // a push holds this beside the mutex
  bool draining_ = false;
  std::deque<std::pair<std::string, MachineEvent>> events_;
  // Handled events are freed without the mutex, since an event may have every tensor of a model.
  std::vector<MachineEvent> handled_;
  std::vector<std::shared_ptr<PeerSession>> sessions_;
  std::vector<std::pair<std::shared_ptr<PeerLink>, Refusal>> links_;
  std::vector<std::shared_ptr<MemberSink>> engines_;
  std::vector<std::function<void()>> answers_;
  std::vector<std::shared_ptr<MemberSink>> trainers_;
  std::vector<std::function<void()>> last_;
};

}  // namespace refitd

#endif  // REFITD_DAEMON_NODE_TURN_H_
