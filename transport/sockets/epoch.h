// One end of one epoch of the wire over sockets.
//
// All socket work of an epoch's operations is done by the epoch's own thread, which waits for its
// connections and for Interrupt in one place: bytes reach their slot without another thread being
// woken. Two ranks are connected when Connect names them neighbours in the ring of ranks, whose
// parts all broadcasts are, or when an exchange has a leg between them. The lower rank dials.
//
// A rank of a broadcast passes bytes on as they come, in portions so small that filling the chain
// takes a tenth of one transfer at most (kChainShare).
#ifndef REFITD_TRANSPORT_SOCKETS_EPOCH_H_
#define REFITD_TRANSPORT_SOCKETS_EPOCH_H_

#include <atomic>
#include <cstdint>
#include <map>
#include <memory>
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
#include "transport/wire_epochs.h"

namespace refitd {

class SocketEpoch final : public WireEpoch {
 public:
  // `tls`, null in the clear, must outlive the epoch. `streams`: connections that this end wants
  // between two ranks; the smallest number of all ends counts.
  SocketEpoch(EpochId id, int rank, int size, int streams, std::shared_ptr<WireListener> listener,
              TlsContexts* tls, WireCounters* totals);
  ~SocketEpoch() override;

  absl::StatusOr<std::string> Open() override;

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

  absl::Status Connect(const WireWork& work, bool* began) override;
  absl::Status Move(const WireWork& work, bool* began) override;
  void Lose() override { CloseLinks(); }
  void End() override { CloseLinks(); }
  void Interrupt() override;

  absl::Status TakeAddresses(const std::vector<std::string>& encoded);
  void PlanBroadcast(const WireBroadcast& broadcast);
  void PlanExchange(const WireExchange& exchange);
  void AddLeg(int peer, bool send, const Frame& frame, const MemorySpan& memory, int64_t portion);
  void EndFlows();
  Link* LinkTo(int peer, int stream);
  void Queue(Link* link);
  void Wake();

  // Takes turns until pending_ is 0.
  absl::Status Drive(const WireWork& work);
  void Wait(const WireWork& work);
  void DialAgain();
  // Returns the links on which the operation still waits for the peer. Several may lead to one
  // peer.
  std::vector<const Link*> Awaited() const;
  static std::string PeersOf(const std::vector<const Link*>& links);
  absl::Status Overdue(const WireWork& work) const;
  absl::Status Advance(Link* link);
  absl::Status BrokenLink(const Link& link, const absl::Status& why) const;

  void TakeArrivals();
  bool MayArrive(const GreetedConnection& arrival) const;
  static void Reset(Link* link);
  bool Adopt(Link* link);
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
  absl::StatusOr<bool> HearWelcome(Link* link);

  absl::Status Send(Link* link);
  static bool NextFrame(Link* link);
  std::span<const char> NextBytes(const Flow& flow) const;
  void Sent(Link* link, int64_t bytes);
  void Finish(Flow* flow);
  absl::Status Receive(Link* link);
  absl::StatusOr<bool> ReceivePayload(Link* link, int64_t* portion);
  absl::StatusOr<bool> ReceiveFrame(Link* link);
  absl::Status TakeFrame(Link* link, const Frame& frame);
  void CloseLinks();

  // Constant after Open.
  const int streams_;
  const std::shared_ptr<WireListener> listener_;
  TlsContexts* const tls_;
  SocketAddress address_;
  std::string encoded_;
  UniqueFd epoll_;
  UniqueFd wake_;  // an event counter

  // Used by the epoch's thread alone, since its start.
  uint64_t door_ = 0;                     // of the listener; 0: none
  std::vector<SocketAddress> addresses_;  // by rank, since Connect
  int common_streams_ = 1;                // connections between any two ranks, since Connect
  std::map<std::pair<int, int>, std::unique_ptr<Link>> links_;
  std::vector<std::unique_ptr<Flow>> flows_;  // of the operation that runs
  std::vector<Link*> ready_;                  // to be advanced
  std::vector<Link*> turn_;                   // those that are being advanced
  std::vector<Link*> dialling_;               // links that wait for their `retry`
  int pending_ = 0;                           // flows that are not done, links that are awaited

  std::atomic<bool> interrupted_{false};
  Mutex mutex_;
  std::vector<GreetedConnection> arrivals_ ABSL_GUARDED_BY(mutex_);
};

}  // namespace refitd

#endif  // REFITD_TRANSPORT_SOCKETS_EPOCH_H_
