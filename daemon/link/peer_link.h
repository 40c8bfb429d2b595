// Links between daemons, one a (joined daemon, group): the joined daemon's end, and what the
// coordinator's end (daemon/services/peer_service.h) and its node say to each other.
//
// Invariants, both ends
//  - Order is kept, nothing is lost in the middle: a link delivers all that was sent, in order, up
//    to its end (PeerOrder checks it).
//  - What waits to be written is at most kMaxPeerQueuedBytes; a link that would have more ends with
//    RESOURCE_EXHAUSTED. So a peer that does not read holds neither memory nor threads.
//  - Nothing waits without a limit (P4): joining has PeerDial::wait and PeerLinkLimits::join, a
//    hello kPeerHelloLimit, the end of a link kPeerEndLimit. Silence is not noticed here: the
//    group's machines ping (PeerPing) and end the link. Unacknowledged bytes end the connection
//    after kPeerUserTimeout (TCP_USER_TIMEOUT).
//  - A message of a kind that this build does not know, from a daemon that speaks a later protocol
//    version, is skipped and logged once a link; it ends no link.
//  - Every link has a connection of its own, so that one that is stuck disturbs no other.
//
// Callbacks must not throw: what gRPC calls is noexcept, so that an exception ends the process
// instead of leaving a link that nobody reads.
//
// Threads: everything here may be called from any thread, also under the caller's own mutex: calls
// only enqueue. Callbacks come on gRPC's threads, one at a time and in order for one link, and with
// no lock of the link held.
#ifndef REFITD_DAEMON_LINK_PEER_LINK_H_
#define REFITD_DAEMON_LINK_PEER_LINK_H_

#include <grpcpp/security/credentials.h>

#include <cstdint>
#include <functional>
#include <memory>
#include <optional>
#include <string>

#include "absl/status/status.h"
#include "daemon/group/machine.h"
#include "daemon/group/peer.h"
#include "refitd/v1/peer.pb.h"

namespace refitd {

inline constexpr size_t kMaxPeerQueuedBytes = size_t{64} << 20;  // of one link, one direction
inline constexpr Duration kPeerHelloLimit = std::chrono::seconds(10);
inline constexpr Duration kPeerEndLimit = std::chrono::seconds(1);
inline constexpr Duration kPeerUserTimeout = std::chrono::seconds(10);

struct PeerLinkLimits {
  int64_t message_bytes = 8 << 20;           // the largest message that this daemon takes
  Duration join = std::chrono::seconds(10);  // to be accepted, beyond the wait for the group
};

// ---- the joined daemon's end ----

struct PeerDial {
  std::string address;  // of the coordinator, "host:port"
  std::string group;
  std::optional<v1::GroupSpec> spec;  // absent: the group must exist
  // For the group, and for a coordinator that does not listen yet; 0: not at all.
  Duration wait{};
  std::string daemon_id;
  std::string boot_id;  // kBootIdBytes
  std::shared_ptr<grpc::ChannelCredentials> credentials;
  PeerLinkLimits limits;
};

struct PeerLinkCallbacks {
  // At most once, before any command.
  std::function<void(LinkUp)> on_up;
  std::function<void(PeerCommand)> on_command;
  // Exactly once, also after Close; nothing comes after it. Never OK. What the coordinator said, or
  //   UNAVAILABLE: it can't be reached, or is gone; DEADLINE_EXCEEDED: it did not accept in time;
  //   RESOURCE_EXHAUSTED: it does not read; INVALID_ARGUMENT, ABORTED, FAILED_PRECONDITION: what it
  //   sent is malformed, out of order, or of another incarnation; CANCELLED: Close.
  std::function<void(absl::Status)> on_lost;
};

// What the callbacks use must live until on_lost has returned; the link itself need not.
class PeerLink {
 public:
  // Begins to join. Whatever goes wrong comes by on_lost.
  static std::unique_ptr<PeerLink> Dial(PeerDial dial, PeerLinkCallbacks callbacks);
  // Closes; does not wait.
  ~PeerLink();
  PeerLink(const PeerLink&) = delete;
  PeerLink& operator=(const PeerLink&) = delete;

  // Not OK: nothing of it was sent, and the link goes on, but for UNAVAILABLE, where it has ended
  // or is not up yet. RESOURCE_EXHAUSTED: too large (message_bytes), or a layout of more than
  // kMaxPeerQueuedBytes; INVALID_ARGUMENT: a call that makes no sense. The caller treats both as
  // the coordinator's refusal: of PeerCall and PeerLayout by PeerReply, of PeerAttach by
  // PeerRefuse.
  absl::Status Send(const PeerReport& report);

  // What was sent before is still written, within kPeerEndLimit.
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
  // Answers the hello; once, before Send.
  virtual void Accept(const LinkUp& up) = 0;
  // As PeerLink::Send. A command that does not fit concerns what it is about: a PeerHeader is
  // prevented by CheckHeaderFits when the bucket comes.
  virtual absl::Status Send(const PeerCommand& command) = 0;
  // Send in two steps, so that nothing is encoded or written under the node's mutex: what is queued
  // is encoded and written, in order, by the next Flush. Queue is called under that mutex, as End
  // is; Flush without it, on any thread, also after End. A command that does not fit ends the link.
  // Not to be mixed with Send. Queue fails with UNAVAILABLE as Send does.
  virtual absl::Status Queue(PeerCommand command) { return Send(command); }
  virtual void Flush() {}
  // Ends the link with `status`, after what was sent before, within kPeerEndLimit; Gone follows.
  // Where nothing was accepted this is the refusal.
  virtual void End(absl::Status status) = 0;
};

// Who takes links in: the node. Calls for one session come one at a time, in order: Hello, then any
// number of Report, then Gone, once. A session may be kept beyond Gone; calls on it do nothing
// then.
class PeerAcceptor {
 public:
  virtual ~PeerAcceptor() = default;
  // `hello` is well-formed (CheckPeerHello). Answered, now or later, by Accept or End; not later
  // than wait_ms. `peer_address` is "host:port" where the connection comes from.
  virtual void Hello(v1::PeerHello hello, std::string peer_address,
                     std::shared_ptr<PeerSession> session) = 0;
  virtual void Report(uint64_t session, PeerReport report) = 0;
  virtual void Gone(uint64_t session, std::string reason) = 0;
};

}  // namespace refitd

#endif  // REFITD_DAEMON_LINK_PEER_LINK_H_
