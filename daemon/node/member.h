// One attached process of this daemon, and the memory that it shares.
#ifndef REFITD_DAEMON_NODE_MEMBER_H_
#define REFITD_DAEMON_NODE_MEMBER_H_

#include <cstdint>
#include <map>
#include <memory>
#include <optional>
#include <string>
#include <utility>

#include "absl/status/status.h"
#include "daemon/node/sinks.h"
#include "daemon/sockets/peer_credentials.h"
#include "daemon/sockets/process_watch.h"
#include "proto/protocol.h"
#include "transport/base/ids.h"
#include "transport/host/memory.h"
#include "transport/plan/layout.h"
#include "transport/transport.h"

namespace refitd {

// The process at the other end of a connection: known from the kernel on a unix socket, from its
// certificate over TLS, unknown on TCP without TLS.
struct Peer {
  std::optional<PeerCredentials> credentials;
  std::string identity{};  // of the certificate; empty: no TLS
  // Whether the process may be a trainer of the group that it named although another identity owns
  // that group.
  bool any_owner = false;
};

// The peer's identity, as rules name it: "uid:1000", "spiffe://...", "dns:..." or "anonymous".
inline std::string IdentityOf(const Peer& peer) {
  if (peer.credentials.has_value()) return "uid:" + std::to_string(peer.credentials->uid);
  return peer.identity.empty() ? "anonymous" : peer.identity;
}

// The caller, and the lease that the caller presents, unchecked.
struct Caller {
  Peer peer;
  std::string token;
  uint64_t incarnation = 0;
  int protocol = 0;
};

// Memory that a member shares with this daemon.
struct RegionRecord {
  MemorySpan memory;  // keep_alive is the mapping
  Access access = Access::kReadOnly;
  bool on_device = false;
  // The same string for all regions of the same memory: the memfd's device and inode, or the
  // block's address. (A VMM allocation that is registered twice is mapped twice and not
  // recognised.)
  std::string identity;
};

struct MemberRecord {
  MemberId id;
  std::string token;  // of its lease; empty before Members::Add
  std::string group;
  bool engine = false;
  bool lost = false;  // its token is dead; copies may still run
  Peer peer;
  std::string client;
  Protocol protocol = kProtocol;  // agreed at the hello: the messages that it understands
  std::string device;
  std::optional<int> ordinal;  // ordinal of its GPU; none: its memory is on the host
  std::string instance;        // engines
  int rank = 0;
  // Engines: the rank claims a version, and its memory can be read, to be compared with the digest
  // that came with the claim, when its first layout is registered.
  bool claims = false;
  bool reads_slots = false;          // engines: follows from the mode of delivery (ReadsSlots)
  std::shared_ptr<MemberSink> sink;  // null: the stream has ended
  std::map<RegionId, RegionRecord> regions;
  std::shared_ptr<const Layout> layout;
  // Engines: how often commits have exchanged regions and backs, in this lease.
  uint64_t flips = 0;
  uint64_t incarnation = 0;  // the group's when the member attached
  WatchHandle watch;

  int64_t region_bytes() const {
    int64_t bytes = 0;
    for (const auto& [id, region] : regions) bytes += region.memory.bytes;
    return bytes;
  }
  // Whether regions and backs have changed places since the layout was registered.
  bool flipped() const { return layout != nullptr && (flips - layout->flips) % 2 == 1; }
  // The region that the member reads in place of `region` (with `back`: that is written in its
  // place), as flips have left them.
  RegionId Side(RegionId region, bool back) const {
    if (layout == nullptr || back == flipped()) return region;
    for (const RegionBack& pair : layout->backs) {
      if (pair.region == region) return pair.back;
    }
    return region;
  }
  // Ends the member's stream, unless it has ended already.
  void End(absl::Status status) {
    if (sink != nullptr) std::exchange(sink, nullptr)->End(std::move(status));
  }
};

}  // namespace refitd

#endif  // REFITD_DAEMON_NODE_MEMBER_H_
