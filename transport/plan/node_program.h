// The second level of the planner of a compiled refit over several daemons: one node's part of a
// RoutePlan. Pure: no I/O, no gRPC, no CUDA.
//
// Bytes leave and reach a node in *streams*, one for each peer and direction. A stream is a
// sequence of *sections*: each is one box of one source, row-major and without gaps, at a multiple
// of kSectionAlignment. Sender and receiver derive the same sections at the same offsets from the
// plan alone, whatever the order of pieces in their members' layouts: `Stream::Digest` of the two
// ends is equal (P5). Bytes between sections are sent but mean nothing.
//
// Streams are cut into rounds, one WireExchange each: in round r a stream carries its bytes
// [r * step, (r + 1) * step). Steps are chosen so that all streams that are long enough end in the
// same round, and every round loads the links in the same proportions as the whole program.
//
// The bytes that go along one chain (chains.h) from one source's node are one stream, which all
// nodes of the chain derive: each receives it `lag` rounds later than the node before, and sends on
// the very bytes that it received, from the slot in which they are. The chunk to a peer then has
// the bytes of several streams, one after the other. A lost node is left out of chains: the node
// before it sends to the node behind it.
//
// Invariants
//  - Every element of every destination on the node is written exactly once: by a local move, or in
//    one round by the unpacking of one section (P1).
//  - Members of other nodes are named only by their numbers.
//
// Values, and thread-safe as such. A program keeps the local layouts, for names and byte offsets.
#ifndef REFITD_TRANSPORT_PLAN_NODE_PROGRAM_H_
#define REFITD_TRANSPORT_PLAN_NODE_PROGRAM_H_

#include <atomic>
#include <cstdint>
#include <map>
#include <memory>
#include <utility>
#include <vector>

#include "absl/status/statusor.h"
#include "transport/plan/derived_layouts.h"
#include "transport/plan/layout.h"
#include "transport/plan/plan.h"
#include "transport/plan/route.h"

namespace refitd {

// The smallest step of a stream, if a round's limit allows it; short streams therefore end early.
inline constexpr int64_t kMinStepBytes = int64_t{1} << 20;

// The most rounds of a program; DeepSeek-V3 between 64 nodes has some ten thousand.
inline constexpr int64_t kMaxRounds = int64_t{1} << 20;

// A rank on this node.
struct LocalMember {
  uint32_t rank = 0;  // index into the plan's sources or destinations
  std::shared_ptr<const Layout> layout;
  // The device of the rank's memory; equal numbers mean the same device. If several sources hold
  // the same elements, a local move reads the source on the destination's device even if the plan
  // names another, so that bytes on one device cross no link. The device is used when the program
  // is compiled, not when it is bound: if a rank comes back on another device with the same layout,
  // its moves stay as they were.
  int device = kNoDevice;
  static constexpr int kNoDevice = -1;  // on no device that others share
};

// A destination of all or some of a section's elements.
struct SectionTarget {
  uint32_t destination = 0;  // index into the local destinations
  uint32_t piece = 0;
};

struct Section {
  uint64_t tensor_hash = 0;
  uint32_t source = 0;  // index into the plan's sources
  uint32_t element_bytes = 1;
  // For an outgoing stream: index into the local sources, and the piece of that source that holds
  // the box.
  uint32_t member = 0;
  uint32_t piece = 0;
  // For an incoming stream: the section's targets, a range of NodeProgram::targets.
  uint32_t first_target = 0;
  uint32_t targets = 0;
  Box box;
  int64_t offset = 0;  // in the stream, bytes
  int64_t bytes = 0;
};

struct Stream {
  // The other node. For a stream along a chain: the chain's first node if the stream is outgoing,
  // or the source's node if it is incoming.
  uint32_t peer = 0;
  std::vector<uint32_t> chain;  // nodes in order, without the source's node; empty: no chain
  std::vector<Section> sections;
  int64_t bytes = 0;  // end of the last section, aligned
  int64_t step = 0;   // bytes a round; a multiple of kSectionAlignment

  // HashChain from 0 over: number of sections, bytes, step; of each section: tensor hash, source,
  // offsets, extents, offset in the stream; then the nodes of the chain.
  uint64_t Digest() const;
  // The start of the stream's bytes in round `round`, and their number (0: the stream has ended).
  int64_t Begin(int64_t round) const { return round >= Rounds() ? bytes : round * step; }
  int64_t BytesOf(int64_t round) const { return Begin(round + 1) - Begin(round); }
  int64_t Rounds() const { return bytes == 0 ? 0 : (bytes + step - 1) / step; }
};

// A move between a member's piece and a chunk; a chunk is the bytes that a stream carries in one
// round.
struct ChunkMove {
  uint32_t member = 0;  // index into the local sources (pack) or destinations (unpack)
  uint32_t piece = 0;
  uint32_t chunk_box = 0;  // index into RoundLeg::sent or received
  uint32_t element_bytes = 1;
  Box box;                         // global coordinates, not empty
  int64_t member_byte_offset = 0;  // of the box's first element, from the start of the region
  int64_t chunk_byte_offset = 0;   // of the same, from the start of the chunk
  Dims chunk_strides;              // elements
};

// The part of one section that a chunk carries: dense, at a byte offset from the start of the
// chunk.
struct ChunkBox {
  uint32_t stream = 0;   // index into the program's outgoing or incoming streams
  uint32_t section = 0;  // index into the stream's sections
  Box box;               // global coordinates, not empty
  int64_t chunk_byte_offset = 0;
};

// Bytes of a chunk that the node received `lag` rounds before.
struct Forward {
  int64_t slot_byte_offset = 0;   // where they lie in the slot that the earlier round received into
  int64_t chunk_byte_offset = 0;  // from the start of the chunk that is sent
  int64_t bytes = 0;
};

struct RoundLeg {
  uint32_t peer = 0;
  int64_t bytes_out = 0;
  int64_t bytes_in = 0;
  std::vector<ChunkBox> sent;      // one for each move of `pack`
  std::vector<ChunkMove> pack;     // moves before the exchange; disjoint in the chunk
  std::vector<Forward> forwards;   // more moves before the exchange, disjoint from those of `pack`
  std::vector<ChunkBox> received;  // ascending; `unpack` reads them
  std::vector<ChunkMove> unpack;   // moves after the exchange
};

// The chunks of one peer in one round, and where they lie. One slot has the chunks to all peers,
// another slot the chunks from all peers, one after the other by ascending peer.
struct ExchangeLeg {
  uint32_t peer = 0;
  int64_t bytes_out = 0;
  int64_t out_offset = 0;
  int64_t bytes_in = 0;
  int64_t in_offset = 0;
};

// By number of a plan's node: whether the node was lost. Empty: no node was.
using GoneNodes = std::vector<bool>;

// How a run goes through the rounds of a program. All nodes have the same `gone` and `first` in a
// run.
struct RunCourse {
  RunCourse() = default;
  RunCourse(GoneNodes nodes) : gone(std::move(nodes)) {}  // NOLINT(google-explicit-constructor)
  GoneNodes gone;
  // The run's first round. Sources send from there on, and chains fill anew: no step of a stream
  // before this one is sent, received or forwarded.
  int64_t first = 0;
  // For each incoming stream, the number of steps that the node has stored in an earlier run. These
  // first steps are received, for the nodes behind this node in a chain, but not unpacked. Empty:
  // nothing was stored.
  std::vector<int64_t> held;
};

class NodeProgram {
 public:
  uint32_t node = 0;
  std::vector<LocalMember> sources;
  std::vector<LocalMember> destinations;
  // Of each source: its layout with the tensors that the plan derives from it (DerivedLayouts).
  // Pieces of sources, here and in the streams, are indices into these.
  std::vector<std::shared_ptr<const Layout>> source_layouts;
  ShardBoxes other_shards;  // of computed pieces of source_layouts
  // Moves from local sources to local destinations, by indices into the lists above, in the order
  // of plan.h.
  MovePlan local;
  // First come the streams without a chain, by ascending peers; then those along chains, by the
  // source's node and the chain. Every stream has sections. A stream along a chain whose source is
  // on another node is incoming, also where this node forwards it.
  std::vector<Stream> outgoing;
  std::vector<Stream> incoming;
  std::vector<SectionTarget> targets;
  std::vector<int64_t> destination_bytes;  // total bytes that each local destination receives
  int64_t rounds = 0;                      // the same on every node of the plan
  uint32_t lag = 0;  // rounds after which a node forwards; 0: the plan has no chains

  using Gone = GoneNodes;
  using Course = RunCourse;
  // Returns one leg for each peer with bytes in that round, by ascending peers. Legs are made on
  // demand, because all rounds of a big model together take gigabytes. Chains are closed over lost
  // nodes; streams without a chain keep their legs.
  std::vector<RoundLeg> Round(int64_t round, const Course& course = {}) const;
  // Returns the legs of Round, without their moves.
  std::vector<ExchangeLeg> Legs(int64_t round, const Course& course = {}) const;
  // Whether the node unpacks anything that it receives in that round.
  bool Unpacks(int64_t round, const Course& course) const;
  // Adds to course.held the steps of the rounds before `round`, which must have ended.
  void Hold(int64_t round, Course* course) const;
  // Returns the first step of an incoming stream that the node has not stored; `rounds` if the node
  // has all of them.
  int64_t FirstLacking(const Course& course) const;

  // The streams that this node sends to each other node over the wire, and those that it receives
  // from each, whatever nodes the streams pass. The sender's list for a receiver and the receiver's
  // list for that sender have equal streams in equal order. The lists hold indices into `outgoing`
  // and `incoming`.
  std::map<uint32_t, std::vector<uint32_t>> StreamsByReceiver() const;
  std::map<uint32_t, std::vector<uint32_t>> StreamsBySender() const;

 private:
  struct Placed;
  struct Places;
  Places Place(int64_t round, const Course& course) const;
  void AddPack(const Placed& placed, RoundLeg* leg) const;
  void AddForwards(const Places& places, const Places& earlier,
                   std::map<uint32_t, RoundLeg>* legs) const;
  void AddUnpack(const Placed& placed, RoundLeg* leg) const;
};

// One hash for the hashes of the streams from one node to another; of one stream, its own hash.
uint64_t FoldStreams(const std::vector<uint64_t>& streams);

// Whether two layouts have the same tensors and pieces in the same order; regions, byte offsets and
// generations may differ.
bool SameStructure(const Layout& a, const Layout& b);

struct NodeProgramOptions {
  // The most bytes of a round, per peer and direction; at least kSectionAlignment, and rounded down
  // to a multiple of it. With chains, all peers of a direction together share chunk_bytes times the
  // number of the plan's other nodes; this product must be at least MinRelayRoundBytes.
  int64_t chunk_bytes = int64_t{64} << 20;
  int64_t max_moves = kMaxMoves;  // local moves plus targets of sections
  // A caller that no longer wants the program sets this, on any thread: CompileNode then ends
  // within milliseconds with CANCELLED. Null: it can't be cancelled.
  std::shared_ptr<const std::atomic<bool>> cancelled = nullptr;
};

// Computes the program of `node`. `sources` and `destinations` are all members of the plan on that
// node, in any order, without those that have no layout or are left out; their layouts may be other
// objects than those the plan was made from. Errors: INVALID_ARGUMENT: a member that is not in the
// plan, not on that node, or given twice; a chunk too small. FAILED_PRECONDITION: a layout whose
// digest is not the plan's; a member of the plan on that node that is missing; a tensor of a layout
// that the plan lacks, or has with another dtype or shape; a route whose box no piece of its source
// holds, or no rank on its node wants. INVALID_ARGUMENT also for what ValidatePlan finds, and for a
// stream longer than longest_stream, or streams beyond RoutePlan::relay. RESOURCE_EXHAUSTED: more
// than max_moves, or absurd sums of bytes. CANCELLED: options.cancelled.
absl::StatusOr<NodeProgram> CompileNode(const RoutePlan& plan, uint32_t node,
                                        std::vector<LocalMember> sources,
                                        std::vector<LocalMember> destinations,
                                        const NodeProgramOptions& options);

}  // namespace refitd

#endif  // REFITD_TRANSPORT_PLAN_NODE_PROGRAM_H_
