// Chains of a compiled refit: nodes that want the same bytes, in an order in which each forwards to
// the next what it received some rounds before, so that no source sends the bytes twice.
//
// Orders. The nodes of a set are put into several orders, and each order is given a share of the
// set's bytes. A zigzag (0, 1, n-1, 2, n-2, ...) and its rotations are a row-complete Latin square
// if n is even: each node is first in one order, last in one order, and sends to each other node in
// one order (E. J. Williams, 1949). If n is odd, rotations of the zigzag and of its reverse have
// each of these properties twice. The last node of an order sends nothing, so the shares decide how
// much each node sends.
//
// Rounds. What a source sends in round r, the h-th node of the chain (from 0) receives in round
// r + h * lag. The lag is the number of pairs of slots through which a node runs its rounds: the
// bytes that a round packs for the next node are then still in the slot into which the same round
// is about to receive.
//
// Pure: values, and functions without state, which are thread-safe as such.
#ifndef REFITD_TRANSPORT_PLAN_CHAINS_H_
#define REFITD_TRANSPORT_PLAN_CHAINS_H_

#include <cstddef>
#include <cstdint>
#include <vector>

#include "absl/types/span.h"

namespace refitd {

// Sections start at multiples of this number of bytes in a stream between nodes; every element size
// divides it.
inline constexpr int64_t kSectionAlignment = 64;
constexpr int64_t AlignSection(int64_t bytes) {
  return (bytes + kSectionAlignment - 1) / kSectionAlignment * kSectionAlignment;
}

// The most rounds after which a node may forward what it received.
inline constexpr uint32_t kMaxRelayLag = 2;
// The most streams that a node of a plan with chains may send, or receive. Each stream wastes up to
// kSectionAlignment bytes of a slot.
inline constexpr uint32_t kMaxRelayStreams = 4096;
// The fewest bytes that a node with `node_streams` streams must be able to send, and to receive, in
// a round of a plan with chains: twice what alignment may take.
constexpr int64_t MinRelayRoundBytes(uint32_t node_streams) {
  return 2 * kSectionAlignment * (node_streams > 1 ? node_streams : 1);
}
// Chains are minor if together they carry at most one part in kMinorParts of what a node sends or
// receives.
inline constexpr int64_t kMinorParts = 50;

// The numbers of a plan's chains that all nodes must know, so that they have the same rounds. All
// 0: the plan has no chains.
struct RelayShape {
  uint32_t lag = 0;      // rounds after which a node forwards what it received
  uint32_t longest = 0;  // nodes of the longest chain
  // The nodes of the longest chain that is not minor (kMinorParts). Long chains are the first to
  // count as minor.
  uint32_t usual = 0;
  uint32_t node_streams = 0;  // the most streams that a node sends, or receives
  int64_t node_bytes = 0;     // the most bytes that a node sends, or receives, sections aligned
  bool operator==(const RelayShape&) const = default;
};

// The rounds of a plan with chains. What the source sends in round r reaches the h-th node of a
// chain (from 0) in round r + h * lag. So that a chain of n nodes ends by the last round, its
// source sends only in the first `rounds - (n - 1) * lag` rounds.
struct RelayRounds {
  int64_t rounds = 0;
  int64_t filling = 0;   // rounds until the last node of a usual chain receives the first bytes
  int64_t min_step = 0;  // the fewest bytes of a stream in a round
};
// Returns the rounds if a node may send, and receive, `round_bytes` (at least MinRelayRoundBytes)
// in a round. There are so many rounds that filling a usual chain costs about a twentieth, or fewer
// if rounds would become very small.
RelayRounds RoundsOf(const RelayShape& shape, int64_t round_bytes);

// The number of orders of a set of that many nodes, at least 1.
size_t ChainOrders(size_t nodes);
// One of these orders of `nodes`.
std::vector<uint32_t> ChainOrder(absl::Span<const uint32_t> nodes, size_t order);

// A share of a set's bytes, and the order that it takes.
struct ChainShare {
  size_t order = 0;
  int64_t bytes = 0;
};
// Divides `bytes` (at least 1) among the orders of a set, in shares of about `least` bytes or more,
// so that the nodes that send most are last most often. `sends`: for each node of the set, the
// bytes that it sends if it forwards everything; what it does not send as a last node is
// subtracted.
std::vector<ChainShare> DivideAmongOrders(int64_t bytes, int64_t least,
                                          std::vector<int64_t>* sends);

}  // namespace refitd

#endif  // REFITD_TRANSPORT_PLAN_CHAINS_H_
