// Links between daemons, one for each group that a daemon joined: the joined daemon's end, and the
// interface between the coordinator's end (daemon/services/peer_service.h) and its node.
//
// Invariants, both ends
//  - A link keeps order and has no gaps: it delivers all that was sent, in order, up to its end
//    (PeerOrder checks it).
//  - At most kMaxPeerQueuedBytes wait to be written; a link that would exceed that ends with
//    RESOURCE_EXHAUSTED. So a peer that does not read holds neither memory nor threads.
//  - Nothing waits without a limit (P4): joining has PeerDial::wait and PeerLinkLimits::join, a
//    hello kPeerHelloLimit, the end of a link kPeerEndLimit. A link does not notice silence: the
//    group's machines ping (PeerPing) and end the link. Unacknowledged bytes end the connection
//    after kPeerUserTimeout (TCP_USER_TIMEOUT).
//  - Every link has a connection of its own, so that a stuck link disturbs no other.
//
// Callbacks must not throw: functions that gRPC calls are noexcept, so that an exception ends the
// process instead of leaving a link that is not read any more.
//
// Threads: all functions here may be called from any thread, also under the caller's own mutex,
// since they only enqueue. Callbacks come on gRPC's threads; for one link they come one at a time,
// in order, and with no lock of the link held.
#ifndef REFITD_DAEMON_LINK_PEER_LINK_H_
#define REFITD_DAEMON_LINK_PEER_LINK_H_

#include <cstdint>
#include <functional>
#include <memory>
#include <optional>
#include <string>
#include <vector>

#include "absl/status/status.h"
#include "daemon/group/machine.h"
#include "daemon/group/peer.h"
#include "daemon/link/greeting.h"

// gRPC's headers cost each file that includes this header more time than all else in it.
namespace grpc {
class ChannelCredentials;
}  // namespace grpc

namespace refitd {

inline constexpr size_t kMaxPeerQueuedBytes = size_t{64} << 20;  // of one link, one direction
inline constexpr Duration kPeerHelloLimit = std::chrono::seconds(10);
inline constexpr Duration kPeerEndLimit = std::chrono::seconds(1);
inline constexpr Duration kPeerUserTimeout = std::chrono::seconds(10);

struct PeerLinkLimits {
  int64_t message_bytes = 8 << 20;           // the largest that this daemon takes
  Duration join = std::chrono::seconds(10);  // for being accepted, beyond the wait for the group
};

// ---- the joined daemon's end ----

struct PeerDial {
  std::string address;  // the coordinator's "host:port"
  std::string group;
  std::optional<GroupSpec> spec;  // absent: the group must exist
  // How long to wait for the group; 0: not at all. A coordinator that does not listen is reported
  // at once.
  Duration wait{};
  std::string daemon_id;
  std::string boot_id;  // kBootIdBytes
  std::shared_ptr<grpc::ChannelCredentials> credentials;
  PeerLinkLimits limits;
  std::string identity{};  // of the member that brings the spec
  bool trainer = false;    // whether it is a trainer
  uint64_t number = 0;     // of the links that this process dialled, counted up from 1
};

struct PeerLinkCallbacks {
  // Called at most once, before any command.
  std::function<void(LinkUp)> on_up;
  std::function<void(PeerCommand)> on_command;
  // Called exactly once, after all other callbacks, also after Close. The status is never OK. It is
  // the one with which the coordinator ended the link, or
  // UNAVAILABLE: the coordinator can't be reached, or is gone; DEADLINE_EXCEEDED: it did not accept
  // in time; RESOURCE_EXHAUSTED: it does not read; INVALID_ARGUMENT, ABORTED, FAILED_PRECONDITION:
  // its messages are malformed, out of order, or of another incarnation; PERMISSION_DENIED: its own
  // address of the data plane names another identity than its certificate; CANCELLED: Close was
  // called.
  std::function<void(absl::Status)> on_lost;
};

// Objects that the callbacks use must live until on_lost has returned; the link itself need not.
class PeerLink {
 public:
  // Begins to join. Every failure is reported by on_lost.
  static std::unique_ptr<PeerLink> Dial(PeerDial dial, PeerLinkCallbacks callbacks);
  // Closes the link; does not wait.
  ~PeerLink();
  PeerLink(const PeerLink&) = delete;
  PeerLink& operator=(const PeerLink&) = delete;

  // A report is sent in two steps, so that nothing is encoded or written under the caller's mutex:
  // Queue is called under that mutex; the next Flush, without it and on any thread, encodes and
  // writes the reports that were queued, in order. Queue fails with UNAVAILABLE if the link has
  // ended or is not up yet.
  absl::Status Queue(PeerReport report);
  // A report that can't be sent; the link goes on without it. RESOURCE_EXHAUSTED: a message would
  // be too large (message_bytes), or a layout has more than kMaxPeerQueuedBytes. INVALID_ARGUMENT:
  // the call is invalid. The caller treats it as the coordinator's refusal: of PeerCall and
  // PeerLayout by Reply, of PeerAttach by RefuseMember.
  struct Refused {
    PeerReport report;
    absl::Status status;
  };
  // Returns the reports that turned out not to be sendable, also those that other threads queued.
  std::vector<Refused> Flush();

  // "host:port" of the connection's other end, numeric; empty: the link is not up yet.
  std::string address() const;

  // Ends the link. Reports that were queued before are still written, within kPeerEndLimit.
  void Close();

 private:
  class Call;
  explicit PeerLink(std::shared_ptr<Call> call);
  const std::shared_ptr<Call> call_;
};

// ---- the coordinator's end ----

// One joined daemon's link, as its node sees it.
class PeerSession {
 public:
  virtual ~PeerSession() = default;
  // Never 0; never reused by the process.
  virtual uint64_t id() const = 0;
  // Answers the hello. Called once, before Queue.
  virtual void Accept(const LinkUp& up) = 0;
  // A command is sent in two steps, so that nothing is encoded or written under the node's mutex:
  // the next Flush encodes and writes the commands that were queued, in order. Queue and End are
  // called under that mutex; Flush is called without it, on any thread, also after End. A command
  // that does not fit into a message ends the link; CheckHeaderFits refuses a bucket in time if its
  // PeerHeader would not fit. Queue fails with UNAVAILABLE if the link has ended or was not
  // accepted; Gone follows.
  virtual absl::Status Queue(PeerCommand command) = 0;
  virtual void Flush() = 0;
  // Ends the link with `status`, after the commands queued before, within kPeerEndLimit; Gone
  // follows. If the link was not accepted yet, `status` is the refusal.
  virtual void End(absl::Status status) = 0;
};

// Takes links in; implemented by the node. Calls for one session come one at a time, in order:
// Hello, then any number of Report, then Gone, once. A session may be kept beyond Gone; calls on it
// then do nothing.
class PeerAcceptor {
 public:
  virtual ~PeerAcceptor() = default;
  // The hello must be answered by Accept or End, not later than its wait. `peer_address` is the
  // connection's "host:port" at the joined daemon.
  virtual void Hello(PeerGreeting hello, std::string peer_address,
                     std::shared_ptr<PeerSession> session) = 0;
  // Room for what a daemon's members describe: a layout or manifest. Null: nobody counts.
  virtual Room RoomFor(const std::string& /*identity*/) { return nullptr; }
  virtual void Report(uint64_t session, PeerReport report) = 0;
  virtual void Gone(uint64_t session, std::string reason) = 0;
};

}  // namespace refitd

#endif  // REFITD_DAEMON_LINK_PEER_LINK_H_
