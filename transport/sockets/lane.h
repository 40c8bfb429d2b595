// One lane of one end of a communicator of the wire over sockets: the connections of some of the
// streams to all peers, and the parts of operations that these connections carry.
//
// A lane waits for its connections and for Wake in one place, so bytes reach their slot without
// another thread being woken. Two ranks are connected when Connect names them neighbours in the
// ring of ranks, whose parts all broadcasts are, or when an exchange has a leg between them. The
// lower rank dials.
//
// A rank of a broadcast passes bytes on as they come, in portions so small that filling the chain
// takes a tenth of one transfer at most (kChainShare). A relay's sending flow reads only what came
// over the same stream, so lanes share no state that changes while bytes move.
//
// Threads: a lane is used by one thread at a time, which its communicator hands it to. Arrive and
// Wake are thread-safe.
#ifndef REFITD_TRANSPORT_SOCKETS_LANE_H_
#define REFITD_TRANSPORT_SOCKETS_LANE_H_

#include <atomic>
#include <cstdint>
#include <functional>
#include <map>
#include <memory>
#include <set>
#include <span>
#include <string>
#include <utility>
#include <vector>

#include "absl/base/thread_annotations.h"
#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "transport/base/mutex.h"
#include "transport/sockets/connection.h"
#include "transport/sockets/frames.h"
#include "transport/sockets/listener.h"
#include "transport/wire_communicators.h"

namespace refitd {

// All lanes of a communicator share this.
struct LaneShared {
  // Constant after Open.
  CommunicatorId id;
  int rank = 0;
  int size = 0;
  SocketAddress address;  // of this rank
  const WireListener* listener = nullptr;
  TlsContexts* tls = nullptr;                                 // null in the clear
  std::function<void(int64_t sent, int64_t received)> count;  // thread-safe

  // Constant after Connect has checked the addresses, before which no lane reads them.
  std::vector<SocketAddress> addresses;  // by rank
  int streams = 1;                       // connections between any two ranks

  // The operation that runs must end soon: the communicator closes, or a lane failed.
  std::atomic<bool> halted{false};
};

class SocketLane {
 public:
  // The lane has the streams from `first` to before `first` + `count`, as far as the communicator
  // has so many. `shared` must outlive the lane.
  SocketLane(LaneShared* shared, int first, int count)
      : shared_(*shared), first_(first), count_(count) {}
  SocketLane(const SocketLane&) = delete;
  SocketLane& operator=(const SocketLane&) = delete;

  // Called first, once. UNAVAILABLE: the process has no descriptor left.
  absl::Status Open();
  // Takes a connection of one of the lane's streams. Thread-safe.
  void Arrive(GreetedConnection arrival);
  // Ends a wait of Connect or Move, which then look at `halted`. Thread-safe.
  void Wake();

  // Why Connect or Move failed. The lesser causes may be consequences of a failure elsewhere.
  enum class Cause { kNone, kHalted, kOverdue, kBroken, kOther };
  // Connects to the neighbours, or moves the lane's part of the operation. Return by the work's
  // deadline, and soon after Wake once `halted` is set.
  Cause Connect(const WireWork& work);
  Cause Move(const WireWork& work);
  // The failure of the last Move. After kBroken it says only why the connection to broken_peer()
  // broke.
  const absl::Status& failure() const { return failure_; }
  int broken_peer() const { return broken_peer_; }

  // The peers for whom the operation still waits, and how the last dial of one of them failed.
  struct Awaited {
    std::set<int> peers;
    std::string trouble;
  };
  void AddAwaited(Awaited* awaited) const;
  // Adds what the operation has sent over this lane's connections, by peer, where the kernel
  // measures it.
  void AddUses(std::map<int, WireUse>* uses);
  // Forgets the operation, whose memory is not touched any more.
  void EndFlows();
  void CloseLinks();

 private:
  struct Flow;

  // One connection to a peer.
  //
  //   absent --dial--> connecting --> encrypting --> greeting --> asking --welcome--> up
  //      \--------------------------- arrival ------------------> answering -------> up
  // A link whose dial ends without an answer is absent again, and is dialled again at `retry`.
  struct Link {
    enum class State { kAbsent, kConnecting, kEncrypting, kGreeting, kAsking, kAnswering, kUp };
    int peer = 0;
    int stream = 0;
    State state = State::kAbsent;
    Connection connection;
    TimePoint retry;      // when this end dials an absent link again
    std::string trouble;  // why the last dial failed
    bool readable = false;
    bool writable = false;
    bool ended = false;    // the kernel told that the other end has closed
    bool queued = false;   // is in ready_
    bool awaited = false;  // Connect waits until it is up
    bool used = false;     // a frame was sent, or asked for
    Duration busy{};       // Connection::Busy at the end of the last operation that sent
    GreetingBytes greeting{};
    size_t greeted = 0;  // bytes of `greeting` that were sent or received
    FrameBytes out{};    // the frame that is being sent
    size_t out_sent = kFrameBytes;
    FrameBytes in{};  // the frame that is being received
    size_t in_bytes = 0;
    bool ack_due = false;
    bool ack_going = false;   // `out` is an acknowledgement
    Flow* send = nullptr;     // until the operation ends
    Flow* receive = nullptr;  // until the operation ends
  };

  // The part of one leg that one connection carries.
  struct Flow {
    Link* link = nullptr;
    Frame frame;
    char* data = nullptr;   // the whole payload
    int64_t bytes = 0;      // of the payload, the part of this flow
    int64_t moved = 0;      // of `bytes`, how many were sent or received
    bool started = false;   // the frame was given to the connection, or came and is the right one
    bool done = false;      // the acknowledgement left (receiving) or came (sending)
    Flow* from = nullptr;   // a relay's sending flow: it passes on what came by `from`
    Flow* relay = nullptr;  // a relay's receiving flow: the flow that passes its bytes on
    int64_t portion = 0;    // bytes that are received before others get a turn
  };

  void PlanBroadcast(const WireBroadcast& broadcast);
  void PlanExchange(const WireExchange& exchange);
  void AddLeg(int peer, bool send, const Frame& frame, const MemorySpan& memory, int64_t portion);
  Link* LinkTo(int peer, int stream);
  void Queue(Link* link);

  // Takes turns until pending_ is 0.
  Cause Run(const WireWork& work);
  Cause Drive(const WireWork& work);
  absl::Status TakeTurn();
  absl::Status ReadLastMessages();
  void Wait(const WireWork& work);
  void DialAgain();
  absl::Status Advance(Link* link);
  // Tells Move which peer the failure is of.
  absl::Status BrokenLink(const Link& link, const absl::Status& why);

  void TakeArrivals();
  bool MayArrive(const GreetedConnection& arrival) const;
  static void Reset(Link* link);
  bool Adopt(Link* link);
  int streams() const { return shared_.streams; }
  GreetingBytes GreetingFor(const Link& link, GreetingKind kind) const;
  absl::Status Dial(Link* link);
  void DialLater(Link* link, const absl::Status& why);
  absl::Status Unreachable(const Link& link, const absl::Status& why) const;
  absl::Status Ended(const Link& link, const absl::Status& why) const;
  absl::Status CheckIdentity(const Link& link) const;
  absl::Status Encrypt(Link* link);
  absl::Status Establish(Link* link);
  absl::StatusOr<bool> Step(Link* link);
  absl::StatusOr<bool> SendGreeting(Link* link);
  absl::StatusOr<bool> ReadWelcome(Link* link);

  absl::Status Send(Link* link);
  static bool NextFrame(Link* link);
  std::span<const char> NextBytes(const Flow& flow) const;
  void Sent(Link* link, int64_t bytes);
  void Finish(Flow* flow);
  absl::Status Receive(Link* link);
  absl::StatusOr<bool> ReceivePayload(Link* link, int64_t* portion);
  absl::StatusOr<bool> ReceiveFrame(Link* link);
  absl::Status TakeFrame(Link* link, const Frame& frame);

  LaneShared& shared_;
  const int first_;
  const int count_;
  UniqueFd epoll_;
  UniqueFd wake_;  // an event counter

  // Used by the lane's thread alone, or by the communicator's while the lane is idle.
  std::map<std::pair<int, int>, std::unique_ptr<Link>> links_;  // by peer and stream
  std::vector<std::unique_ptr<Flow>> flows_;                    // of the operation that runs
  std::vector<Link*> ready_;                                    // to be advanced
  std::vector<Link*> turn_;                                     // those that are being advanced
  std::vector<Link*> dialling_;                                 // links that wait for their `retry`
  int pending_ = 0;  // flows that are not done, links that are awaited
  absl::Status failure_;
  int broken_peer_ = -1;  // -1: the failure is not of a connection that broke

  Mutex mutex_;
  std::vector<GreetedConnection> arrivals_ ABSL_GUARDED_BY(mutex_);
};

}  // namespace refitd

#endif  // REFITD_TRANSPORT_SOCKETS_LANE_H_
