// One attached process of this daemon, and the memory that it shares.
#ifndef REFITD_DAEMON_NODE_MEMBER_H_
#define REFITD_DAEMON_NODE_MEMBER_H_

#include <cstdint>
#include <functional>
#include <map>
#include <memory>
#include <optional>
#include <string>
#include <utility>
#include <variant>
#include <vector>

#include "absl/status/status.h"
#include "daemon/execute/compare_sides.h"
#include "daemon/node/sinks.h"
#include "daemon/sockets/peer_credentials.h"
#include "daemon/sockets/process_watch.h"
#include "proto/protocol.h"
#include "transport/base/ids.h"
#include "transport/base/mutex.h"
#include "transport/base/unique_fd.h"
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
  bool pinned = false;  // with on_device: host memory that the device reads and writes
  // The member's descriptor, if the daemon was asked to keep it; null: it was closed.
  std::shared_ptr<const UniqueFd> descriptor{};
  bool for_next_rank = false;  // as the descriptor is (KeepDescriptor)
  // Null: the memory is pages that the mapping has, whatever the descriptor.
  std::shared_ptr<const UniqueFd> memfd() const { return on_device ? nullptr : descriptor; }
  // The same string for all regions of the same memory: the memfd's device and inode, or the
  // block's address. (A VMM allocation that is registered twice is mapped twice and not
  // recognised.)
  std::string identity;
};

// The arenas of an engine rank whose lease has ended (kept_ranks.h).
struct KeptRank {
  struct Arena {
    RegionRecord front;
    RegionRecord back;
  };

  std::string group;
  std::string instance;
  int rank = 0;
  int world_size = 1;
  std::string device;
  std::optional<int> ordinal;  // of the GPU; none: host memory
  PeerCredentials process;     // that had them; its pidfd is known
  uint64_t layout_digest = 0;  // of the structure that was registered
  HeldContent content;         // of the fronts
  std::vector<Arena> arenas;   // in the order of Layout::backs
  TimePoint until;

  // The bytes of both sides of all arenas.
  int64_t bytes() const {
    int64_t bytes = 0;
    for (const Arena& arena : arenas) bytes += arena.front.memory.bytes + arena.back.memory.bytes;
    return bytes;
  }
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
  int world_size = 1;  // engines
  // Engines: the rank claims a version, and its memory can be read, to be compared with the claim
  // when its first layout is registered.
  std::optional<HeldContent> claims{};
  // Engines: the rank takes up what is kept of it (EngineHello.restore).
  bool restores = false;
  // What was kept of the rank, until its first layout was compared with it.
  std::optional<KeptRank> kept{};
  // Engines: what the registered memory holds, as this daemon saw it verified last.
  std::optional<HeldContent> holds{};
  bool reads_slots = false;          // engines: follows from the mode of delivery (ReadsSlots)
  std::shared_ptr<MemberSink> sink;  // null: the stream has ended
  std::map<RegionId, RegionRecord> regions;
  std::shared_ptr<const Layout> layout;
  uint64_t layout_digest = 0;
  OutsideBytes outside_bytes;  // the bytes of regions with backs in which no piece of `layout` lies
  // Engines: how often commits have exchanged regions and backs, in this lease.
  uint64_t flips = 0;
  uint64_t incarnation = 0;  // the group's when the member attached
  WatchHandle watch;
  // Called without the mutex when the record of a lost member is erased: no copy touches its memory
  // any more.
  std::vector<std::function<void()>> on_erased{};

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
  // Both sides of the layout's arenas, and their bytes that it does not name. The sides are the
  // same two, whichever is read.
  std::vector<ComparedSides> SidesOf(const Layout& of, const OutsideBytes& outside) const {
    std::vector<ComparedSides> sides;
    for (size_t i = 0; i < of.backs.size(); ++i) {
      const RegionBack& pair = of.backs[i];
      if ((*outside)[i].empty()) continue;
      const RegionRecord& front = regions.at(pair.region);
      const RegionRecord& back = regions.at(pair.back);
      sides.push_back(
          {pair, front.memory, back.memory, front.memfd(), back.memfd(), (*outside)[i]});
    }
    return sides;
  }
  // The group has the layout. `content`: the digest of its memory, if the daemon has read it.
  void Register(std::shared_ptr<const Layout> registered, uint64_t digest,
                std::optional<uint64_t> content, OutsideBytes outside) {
    if (layout == nullptr) {
      const bool found = claims.has_value() && content == std::optional(claims->digest);
      holds = found ? claims : std::nullopt;
    } else if (digest != layout_digest) {
      holds.reset();
    }
    layout = std::move(registered);
    outside_bytes = std::move(outside);
    layout_digest = digest;
  }
  // Ends the member's stream, unless it has ended already.
  void End(absl::Status status) {
    if (sink != nullptr) std::exchange(sink, nullptr)->End(std::move(status));
  }
};

// A member whose hello has come. The hello is checked, except for what depends on this daemon's
// state.
struct Arrival {
  MemberRecord record;  // without its id, its GPU and its stream
  std::variant<TrainerIdentity, EngineIdentity> identity;
  std::optional<GroupSpec> spec;  // as the hello has it (SpecOf)
  std::string coordinator;        // as the hello names it; empty: this daemon
  Duration wait{};                // for its group; 0: not at all
};

}  // namespace refitd

#endif  // REFITD_DAEMON_NODE_MEMBER_H_
