#include "transport/plan/node_program.h"

#include <algorithm>
#include <limits>
#include <map>
#include <optional>
#include <string_view>
#include <tuple>
#include <utility>

#include "absl/container/flat_hash_map.h"
#include "absl/types/span.h"
#include "transport/base/failure.h"
#include "transport/base/status.h"
#include "transport/plan/boxes.h"
#include "transport/plan/by_tensor.h"

namespace refitd {
namespace {

// Chunks are at most this long, so that sizes can be added up safely.
constexpr int64_t kMaxChunkBytes = int64_t{1} << 40;

// Sums of bytes of one node stay below this, so that none overflows (P10).
constexpr int64_t kMaxBytes = int64_t{1} << 61;

constexpr uint32_t kNone = std::numeric_limits<uint32_t>::max();

// A piece of a local member.
struct Entry {
  uint32_t member = 0;
  uint32_t piece = 0;
};

// Pieces of the local sources, or destinations, by tensor of the plan.
using LocalPieces = ByTensor<Entry>;

class Builder {
 public:
  Builder(const RoutePlan& plan, uint32_t node, std::vector<LocalMember> sources,
          std::vector<LocalMember> destinations, const NodeProgramOptions& options)
      : plan_(plan), options_(options), work_(options.cancelled) {
    program_.node = node;
    program_.sources = std::move(sources);
    program_.destinations = std::move(destinations);
  }

  absl::StatusOr<NodeProgram> Run() {
    REFITD_RETURN_IF_ERROR(ValidatePlan(plan_));
    if (options_.chunk_bytes < kSectionAlignment) {
      return Error(absl::StatusCode::kInvalidArgument, "a chunk of {} bytes is less than {}",
                   options_.chunk_bytes, kSectionAlignment);
    }
    REFITD_RETURN_IF_ERROR(CheckMembers("source", program_.sources, plan_.source_nodes,
                                        plan_.source_digests, plan_.source_labels, &source_of_));
    std::vector<uint64_t> wanted = plan_.destination_digests;
    for (size_t i = 0; i < wanted.size(); ++i) {
      if (plan_.destination_skipped[i]) wanted[i] = 0;
    }
    REFITD_RETURN_IF_ERROR(CheckMembers("destination", program_.destinations,
                                        plan_.destination_nodes, wanted, plan_.destination_labels,
                                        &destination_of_));
    for (const std::vector<uint32_t>& nodes : plan_.node_sets) {
      in_set_.push_back(std::find(nodes.begin(), nodes.end(), program_.node) != nodes.end());
    }
    NumberTensors();
    REFITD_RETURN_IF_ERROR(AddDerived());
    std::vector<std::shared_ptr<const Layout>> layouts;
    for (const LocalMember& member : program_.destinations) layouts.push_back(member.layout);
    REFITD_ASSIGN_OR_RETURN(source_pieces_,
                            Collect("source", program_.sources, program_.source_layouts));
    REFITD_ASSIGN_OR_RETURN(destination_pieces_,
                            Collect("destination", program_.destinations, layouts));
    program_.destination_bytes.assign(program_.destinations.size(), 0);
    for (size_t begin = 0, end = 0; begin < plan_.routes.size(); begin = end) {
      const uint32_t tensor = plan_.routes[begin].tensor;
      while (end < plan_.routes.size() && plan_.routes[end].tensor == tensor) ++end;
      REFITD_RETURN_IF_ERROR(
          AddTensor(tensor, absl::MakeConstSpan(plan_.routes).subspan(begin, end - begin)));
    }
    SortMoves();
    REFITD_RETURN_IF_ERROR(FinishStreams());
    return std::move(program_);
  }

 private:
  // Fills `local`: the member of each rank, or kNone.
  absl::Status CheckMembers(std::string_view side, const std::vector<LocalMember>& members,
                            const std::vector<uint32_t>& nodes,
                            const std::vector<uint64_t>& digests,
                            const std::vector<std::string>& labels, std::vector<uint32_t>* local) {
    local->assign(nodes.size(), kNone);
    absl::flat_hash_map<const Layout*, uint64_t> digest_of;
    for (uint32_t m = 0; m < members.size(); ++m) {
      const uint32_t rank = members[m].rank;
      if (rank >= nodes.size() || nodes[rank] != program_.node || (*local)[rank] != kNone ||
          members[m].layout == nullptr) {
        return Error(absl::StatusCode::kInvalidArgument,
                     "{} {} is no member of the plan on node {}, or is there twice", side, rank,
                     program_.node);
      }
      (*local)[rank] = m;
      const auto [it, added] = digest_of.try_emplace(members[m].layout.get(), 0);
      if (added) it->second = members[m].layout->Digest();
      if (it->second == digests[rank]) continue;
      return Error(absl::StatusCode::kFailedPrecondition,
                   "{}: its layout has digest {:016x}, the plan was made for {:016x}",
                   LabelOf(side, labels, rank), it->second, digests[rank]);
    }
    for (size_t rank = 0; rank < nodes.size(); ++rank) {
      if (nodes[rank] != program_.node || digests[rank] == 0 || (*local)[rank] != kNone) continue;
      return Error(absl::StatusCode::kFailedPrecondition,
                   "{}: has a part in the plan and no layout here", LabelOf(side, labels, rank));
    }
    return absl::OkStatus();
  }

  // Returns the rank's label, or its number, since a part of a plan has no labels.
  static std::string LabelOf(std::string_view side, const std::vector<std::string>& labels,
                             size_t rank) {
    return rank < labels.size() ? labels[rank] : fmt::format("{} {}", side, rank);
  }

  void NumberTensors() {
    by_name_.reserve(plan_.tensors.size());
    for (uint32_t t = 0; t < plan_.tensors.size(); ++t) by_name_.emplace(plan_.tensors[t].name, t);
  }

  absl::Status AddDerived() {
    std::vector<std::shared_ptr<const Layout>> layouts;
    for (const LocalMember& member : program_.sources) layouts.push_back(member.layout);
    REFITD_ASSIGN_OR_RETURN(DerivedLayouts::Extended extended,
                            DerivedLayouts(plan_.tensors).Extend(layouts, &work_));
    program_.source_layouts = std::move(extended.layouts);
    program_.other_shards = std::move(extended.other_shards);
    return absl::OkStatus();
  }

  // `layouts`: of the members.
  absl::StatusOr<LocalPieces> Collect(std::string_view side,
                                      const std::vector<LocalMember>& members,
                                      const std::vector<std::shared_ptr<const Layout>>& layouts) {
    differs_.resize(plan_.tensors.size());
    std::vector<std::vector<uint32_t>> tensor_of;
    for (size_t m = 0; m < members.size(); ++m) {
      const std::vector<TensorSpec>& tensors = layouts[m]->tensors;
      std::vector<uint32_t> ids;
      ids.reserve(tensors.size());
      for (size_t i = 0; i < tensors.size(); ++i) {
        // Members often name the same tensors in the same order, so try the last member's tensor
        // first.
        const bool same = !tensor_of.empty() && i < tensor_of.back().size() &&
                          plan_.tensors[tensor_of.back()[i]].name == tensors[i].name;
        uint32_t id = same ? tensor_of.back()[i] : kNone;
        if (!same) {
          const auto found = by_name_.find(tensors[i].name);
          if (found == by_name_.end()) {
            return AboutTensor(Error(absl::StatusCode::kFailedPrecondition,
                                     "tensor {}: {} {} has it, the plan does not", tensors[i].name,
                                     side, members[m].rank),
                               tensors[i].name);
          }
          id = found->second;
        }
        if (plan_.tensors[id] != tensors[i]) differs_[id] = true;
        ids.push_back(id);
      }
      tensor_of.push_back(std::move(ids));
    }
    const auto for_each = [&](const auto& visit) {
      for (uint32_t m = 0; m < layouts.size(); ++m) {
        for (uint32_t p = 0; p < layouts[m]->pieces.size(); ++p) {
          const Piece& piece = layouts[m]->pieces[p];
          if (!IsEmpty(piece.box)) visit(tensor_of[m][piece.tensor], Entry{m, p});
        }
      }
    };
    return LocalPieces(plan_.tensors.size(), for_each);
  }

  const Piece& SourcePiece(Entry entry) const {
    return program_.source_layouts[entry.member]->pieces[entry.piece];
  }
  const Piece& DestinationPiece(Entry entry) const {
    return program_.destinations[entry.member].layout->pieces[entry.piece];
  }

  bool Reaches(const Route& route) const { return in_set_[route.node_set]; }

  // The sections of the routes from one node along one chain.
  struct SectionsAlong {
    std::vector<Section> sections;
  };

  // Returns the sections along the route's chain; null: the route does not go along a chain.
  SectionsAlong* AlongChain(const Route& route) {
    if (plan_.relay.lag == 0) return nullptr;
    const uint32_t from = plan_.source_nodes[route.source];
    const auto [known, added] = along_.try_emplace({route.node_set, from}, nullptr);
    if (added) {
      std::vector<uint32_t> chain = plan_.RemoteNodesOf(route);
      if (plan_.IsChain(chain)) known->second = &chains_[{from, std::move(chain)}];
    }
    return known->second;
  }

  // The pieces of one tensor on one side.
  struct Pieces {
    const absl::Span<const Entry> entries;
    const std::vector<const Box*>& boxes;
    const BoxIndex& index;
  };

  absl::Status AddTensor(uint32_t tensor, absl::Span<const Route> routes) {
    if (work_.Cancelled()) return Cancelled();
    const auto held = source_pieces_.Of(tensor);
    const auto wanted = destination_pieces_.Of(tensor);
    const TensorSpec& spec = plan_.tensors[tensor];
    std::vector<const Box*> held_boxes;
    for (const Entry entry : held) held_boxes.push_back(&SourcePiece(entry).box);
    std::vector<const Box*> wanted_boxes;
    for (const Entry entry : wanted) wanted_boxes.push_back(&DestinationPiece(entry).box);
    const BoxIndex held_index(held_boxes);
    const BoxIndex wanted_index(wanted_boxes);
    tensor_hash_ = TensorHash(spec);
    element_bytes_ = ElementBytes(spec.dtype);
    for (const Route& route : routes) {
      if (source_of_[route.source] == kNone && !Reaches(route)) continue;
      if (differs_[tensor]) {
        return AboutTensor(Error(absl::StatusCode::kFailedPrecondition,
                                 "tensor {}: the plan has it as {}, a rank on node {} has not",
                                 spec.name, ToString(spec.dtype, spec.shape), program_.node),
                           spec.name);
      }
      REFITD_RETURN_IF_ERROR(AddRoute(route, spec, {held, held_boxes, held_index},
                                      {wanted, wanted_boxes, wanted_index}));
      if (work_.Cancelled()) return Cancelled();
      if (bytes_ > kMaxBytes || work_.Over() ||
          static_cast<int64_t>(program_.local.moves.size() + program_.targets.size()) >
              options_.max_moves) {
        return AboutTensor(
            Error(absl::StatusCode::kResourceExhausted,
                  "tensor {}: boxes so far need over {} moves, {} bytes or {} steps on node {}",
                  spec.name, options_.max_moves, kMaxBytes, kMaxPlanSteps, program_.node),
            spec.name);
      }
    }
    return absl::OkStatus();
  }

  absl::Status AddRoute(const Route& route, const TensorSpec& spec, const Pieces& held,
                        const Pieces& wanted) {
    Section section;
    section.tensor_hash = tensor_hash_;
    section.source = route.source;
    section.element_bytes = static_cast<uint32_t>(element_bytes_);
    section.box = plan_.BoxOf(route);
    section.bytes = ElementCount(section.box) * element_bytes_;
    const uint32_t member = source_of_[route.source];
    if (member == kNone) return AddReceived(route, spec, wanted, std::move(section));
    section.member = member;
    return AddSent(route, spec, held, wanted, std::move(section));
  }

  // Adds a route whose source is on another node.
  absl::Status AddReceived(const Route& route, const TensorSpec& spec, const Pieces& wanted,
                           Section section) {
    const uint32_t from = plan_.source_nodes[route.source];
    if (from == program_.node) {
      return AboutTensor(Error(absl::StatusCode::kFailedPrecondition,
                               "tensor {}: it comes from source {}, which has no layout here",
                               spec.name, route.source),
                         spec.name);
    }
    AddTargets(wanted, &section);
    if (section.targets == 0) return NobodyWants(spec, section.box);
    SectionsAlong* const along = AlongChain(route);
    (along != nullptr ? along->sections : incoming_[from]).push_back(std::move(section));
    return absl::OkStatus();
  }

  // Adds a route whose source is on this node; its destinations may be on this node too.
  absl::Status AddSent(const Route& route, const TensorSpec& spec, const Pieces& held,
                       const Pieces& wanted, Section section) {
    section.piece = PieceOf(section.member, section.box, held);
    if (section.piece == kNone) {
      return AboutTensor(
          Error(absl::StatusCode::kFailedPrecondition,
                "tensor {}: no piece of {} holds the box at [{}] of extent [{}]", spec.name,
                LabelOf("source", plan_.source_labels, route.source),
                fmt::join(section.box.offset, ", "), fmt::join(section.box.extent, ", ")),
          spec.name);
    }
    SectionsAlong* const along = AlongChain(route);
    if (along != nullptr) {
      along->sections.push_back(section);
    } else {
      for (const uint32_t peer : plan_.NodesOf(route)) {
        if (peer != program_.node) outgoing_[peer].push_back(section);
      }
    }
    if (!Reaches(route)) return absl::OkStatus();
    const size_t before = program_.local.moves.size();
    AddLocal(section, held, wanted);
    if (program_.local.moves.size() == before) return NobodyWants(spec, section.box);
    return absl::OkStatus();
  }

  static absl::Status Cancelled() { return absl::CancelledError("the program was cancelled"); }

  absl::Status NobodyWants(const TensorSpec& spec, const Box& box) const {
    return AboutTensor(
        Error(absl::StatusCode::kFailedPrecondition,
              "tensor {}: no rank on node {} wants the box at [{}] of extent [{}]", spec.name,
              program_.node, fmt::join(box.offset, ", "), fmt::join(box.extent, ", ")),
        spec.name);
  }

  void Count(uint32_t destination, int64_t bytes) {
    // Sums stay below 2^62.
    bytes_ += std::min(bytes, kMaxBytes + 1 - std::min(bytes_, kMaxBytes));
    if (bytes_ <= kMaxBytes) program_.destination_bytes[destination] += bytes;
  }

  // Returns a piece of the source `member` that holds all of `box`, or kNone. All such pieces hold
  // the same elements, so that it does not matter which is returned.
  uint32_t PieceOf(uint32_t member, const Box& box, const Pieces& held) {
    uint32_t found = kNone;
    work_ += held.index.Query(box, [&](uint32_t i) {
      if (held.entries[i].member == member && found == kNone && Contains(*held.boxes[i], box)) {
        found = held.entries[i].piece;
      }
    });
    return found;
  }

  void AddTargets(const Pieces& wanted, Section* section) {
    section->first_target = static_cast<uint32_t>(program_.targets.size());
    work_ += wanted.index.Query(section->box, [&](uint32_t i) {
      const std::optional<Box> common = Intersect(section->box, *wanted.boxes[i]);
      if (!common.has_value()) return;
      program_.targets.push_back({wanted.entries[i].member, wanted.entries[i].piece});
      Count(wanted.entries[i].member, ElementCount(*common) * element_bytes_);
    });
    section->targets = static_cast<uint32_t>(program_.targets.size()) - section->first_target;
  }

  void AddLocal(const Section& section, const Pieces& held, const Pieces& wanted) {
    work_ += wanted.index.Query(section.box, [&](uint32_t i) {
      std::optional<Box> common = Intersect(section.box, *wanted.boxes[i]);
      if (!common.has_value()) return;
      const Entry to = wanted.entries[i];
      const Entry from = Nearest(section, to.member, *common, held);
      const int64_t bytes = ElementCount(*common) * element_bytes_;
      Count(to.member, bytes);
      if (bytes_ <= kMaxBytes) program_.local.bytes += bytes;
      CopyMove& move = program_.local.moves.emplace_back();
      move.source = from.member;
      move.source_piece = from.piece;
      move.destination = to.member;
      move.destination_piece = to.piece;
      move.source_byte_offset = ByteOffset(SourcePiece(from), *common, element_bytes_);
      move.destination_byte_offset = ByteOffset(DestinationPiece(to), *common, element_bytes_);
      move.box = *std::move(common);
    });
  }

  // Returns the section's own source, or another source that holds all of the box on the
  // destination's device.
  Entry Nearest(const Section& section, uint32_t destination, const Box& box, const Pieces& held) {
    const Entry own = {section.member, section.piece};
    const int device = program_.destinations[destination].device;
    if (device == LocalMember::kNoDevice || program_.sources[own.member].device == device) {
      return own;
    }
    Entry near = own;
    work_ += held.index.Query(box, [&](uint32_t i) {
      const Entry entry = held.entries[i];
      if (program_.sources[entry.member].device != device || !Contains(*held.boxes[i], box)) return;
      if (near.member == own.member || entry.member < near.member) near = entry;
    });
    return near;
  }

  void SortMoves() {
    std::vector<CopyMove>& moves = program_.local.moves;
    const auto key = [&](uint32_t i) {
      const CopyMove& m = moves[i];
      return std::tie(m.source, m.source_piece, m.box.offset, m.destination, m.destination_piece);
    };
    std::vector<uint32_t> order(moves.size());
    std::iota(order.begin(), order.end(), 0U);
    std::sort(order.begin(), order.end(), [&](uint32_t a, uint32_t b) { return key(a) < key(b); });
    std::vector<CopyMove> sorted;
    sorted.reserve(moves.size());
    for (const uint32_t i : order) sorted.push_back(std::move(moves[i]));
    moves = std::move(sorted);
  }

  // ---- streams ----

  // Decides the rounds, and makes streams with their steps of the collected sections.
  absl::Status FinishStreams() {
    chunk_ = std::min(options_.chunk_bytes, kMaxChunkBytes) / kSectionAlignment * kSectionAlignment;
    if (plan_.relay.lag > 0) {
      REFITD_RETURN_IF_ERROR(FindRelayRounds());
    } else {
      program_.rounds =
          plan_.longest_stream / chunk_ + (plan_.longest_stream % chunk_ != 0 ? 1 : 0);
    }
    if (program_.rounds > kMaxRounds) {
      return Error(absl::StatusCode::kResourceExhausted,
                   "longest_stream: {} bytes in chunks of {} are more than {} rounds",
                   plan_.longest_stream, chunk_, kMaxRounds);
    }
    for (auto* side : {&outgoing_, &incoming_}) {
      for (auto& [peer, sections] : *side) {
        Stream stream = MakeStream(peer, std::move(sections));
        if (stream.bytes > plan_.longest_stream) {
          return Error(absl::StatusCode::kInvalidArgument,
                       "longest_stream: {}, but that between nodes {} and {} has {} bytes",
                       plan_.longest_stream, program_.node, peer, stream.bytes);
        }
        stream.step = StepOf(stream.bytes, program_.rounds);
        const bool out = side == &outgoing_;
        (out ? program_.outgoing : program_.incoming).push_back(std::move(stream));
      }
    }
    for (auto& [along, sections] : chains_) {
      const auto& [from, chain] = along;
      const bool out = from == program_.node;
      Stream stream = MakeStream(out ? chain.front() : from, std::move(sections.sections));
      stream.chain = chain;
      if (chain.size() > plan_.relay.longest) {
        return Error(absl::StatusCode::kInvalidArgument,
                     "relay.longest: {}, but a chain from node {} has {} nodes",
                     plan_.relay.longest, from, chain.size());
      }
      const int64_t waits = program_.lag * static_cast<int64_t>(chain.size() - 1);
      stream.step = StepOf(stream.bytes, program_.rounds - waits);
      (out ? program_.outgoing : program_.incoming).push_back(std::move(stream));
    }
    return plan_.relay.lag > 0 ? CheckRelay() : absl::OkStatus();
  }

  absl::Status FindRelayRounds() {
    program_.lag = plan_.relay.lag;
    const int64_t round_bytes = chunk_ * (int64_t{plan_.nodes} - 1);
    const int64_t least = MinRelayRoundBytes(plan_.relay.node_streams);
    if (round_bytes < least) {
      return Error(absl::StatusCode::kInvalidArgument,
                   "chunk_bytes: {} for each of {} nodes are less than the {} that chains need",
                   chunk_, plan_.nodes - 1, least);
    }
    const RelayRounds rounds = RoundsOf(plan_.relay, round_bytes);
    program_.rounds = rounds.rounds;
    min_step_ = rounds.min_step;
    return absl::OkStatus();
  }

  // Checks that this node sends and receives no more than plan_.relay says, since RoundsOf computed
  // the rounds from that: only then do the node's rounds fit into slots.
  absl::Status CheckRelay() const {
    int64_t out = 0;
    int64_t in = 0;
    size_t streams_out = program_.outgoing.size();
    for (const Stream& stream : program_.outgoing) out += stream.bytes;
    for (const Stream& stream : program_.incoming) {
      in += stream.bytes;
      // Every node of a chain but the last forwards the stream.
      if (stream.chain.empty() || stream.chain.back() == program_.node) continue;
      out += stream.bytes;
      ++streams_out;
    }
    if (std::max(out, in) > plan_.relay.node_bytes) {
      return Error(absl::StatusCode::kInvalidArgument,
                   "relay.node_bytes: {}, but node {} sends {} and receives {}",
                   plan_.relay.node_bytes, program_.node, out, in);
    }
    if (std::max(streams_out, program_.incoming.size()) > plan_.relay.node_streams) {
      return Error(absl::StatusCode::kInvalidArgument,
                   "relay.node_streams: {}, but node {} sends {} and receives {}",
                   plan_.relay.node_streams, program_.node, streams_out, program_.incoming.size());
    }
    return absl::OkStatus();
  }

  static Stream MakeStream(uint32_t peer, std::vector<Section> sections) {
    Stream stream;
    stream.peer = peer;
    stream.sections = Interleaved(std::move(sections));
    for (Section& section : stream.sections) {
      section.offset = stream.bytes;
      stream.bytes += AlignSection(section.bytes);
    }
    return stream;
  }

  int64_t StepOf(int64_t bytes, int64_t rounds) const {
    const int64_t even = AlignSection((bytes + rounds - 1) / rounds);
    if (program_.lag > 0) return std::max(min_step_, even);
    return std::min(chunk_, std::max(kMinStepBytes, even));
  }

  // Interleaves the sections of several sources so that all sources progress evenly; sections of
  // one source stay in the plan's order. A round then reads from every rank of the node, not from
  // one rank after the other.
  static std::vector<Section> Interleaved(std::vector<Section> sections) {
    std::map<uint32_t, int64_t> totals;
    for (const Section& section : sections) totals[section.source] += section.bytes;
    if (totals.size() <= 1) return sections;
    struct Place {
      __extension__ __int128 done = 0;  // twice the bytes of its source up to the section's middle
      int64_t total = 0;
      uint32_t index = 0;
    };
    std::map<uint32_t, int64_t> done;
    std::vector<Place> places;
    places.reserve(sections.size());
    for (uint32_t i = 0; i < sections.size(); ++i) {
      int64_t& before = done[sections[i].source];
      places.push_back({before + before + sections[i].bytes, totals[sections[i].source], i});
      before += sections[i].bytes;
    }
    std::sort(places.begin(), places.end(), [](const Place& a, const Place& b) {
      // This is a.done / a.total < b.done / b.total, without dividing.
      const auto left = a.done * b.total;
      const auto right = b.done * a.total;
      return left != right ? left < right : a.index < b.index;
    });
    std::vector<Section> interleaved;
    interleaved.reserve(sections.size());
    for (const Place& place : places) interleaved.push_back(std::move(sections[place.index]));
    return interleaved;
  }

  const RoutePlan& plan_;
  const NodeProgramOptions& options_;
  NodeProgram program_;
  std::vector<uint32_t> source_of_;  // per source of the plan: local member
  std::vector<uint32_t> destination_of_;
  absl::flat_hash_map<std::string_view, uint32_t> by_name_;
  LocalPieces source_pieces_;
  LocalPieces destination_pieces_;
  std::vector<bool> in_set_;                           // per node set: this node is in it
  std::map<uint32_t, std::vector<Section>> outgoing_;  // by peer
  std::map<uint32_t, std::vector<Section>> incoming_;
  // The key is the source's node and the chain, so that all nodes have the chains in the same
  // order.
  std::map<std::pair<uint32_t, std::vector<uint32_t>>, SectionsAlong> chains_;
  // The key is the node set and the source's node. The value points into chains_, or is null if the
  // route does not go along a chain.
  std::map<std::pair<uint32_t, uint32_t>, SectionsAlong*> along_;
  int64_t chunk_ = 0;
  int64_t min_step_ = 0;  // with chains
  uint64_t tensor_hash_ = 0;
  int64_t element_bytes_ = 1;
  std::vector<bool> differs_;  // per tensor of the plan: a local layout has another dtype or shape
  PlanWork work_;
  int64_t bytes_ = 0;  // bytes that destinations get so far, at most kMaxBytes + 1
};

// Visits the boxes in bytes [begin, end) of a stream: `visit(section, box, byte offset from
// begin)`. Boxes are in global coordinates, and each is dense in the stream.
template <typename Visit>
void ForEachBox(const Stream& stream, int64_t begin, int64_t end, const Visit& visit) {
  auto section =
      std::upper_bound(stream.sections.begin(), stream.sections.end(), begin,
                       [](int64_t at, const Section& s) { return at < s.offset + s.bytes; });
  for (; section != stream.sections.end() && section->offset < end; ++section) {
    const int64_t element_bytes = section->element_bytes;
    const int64_t from = std::max(begin, section->offset);
    const int64_t until = std::min(end, section->offset + section->bytes);
    if (from >= until) continue;
    const int64_t start = (from - section->offset) / element_bytes;
    const int64_t count = (until - from) / element_bytes;
    int64_t at = from - begin;
    for (Box& box : BoxesOfRange(section->box.extent, start, count)) {
      for (size_t d = 0; d < box.offset.size(); ++d) box.offset[d] += section->box.offset[d];
      const int64_t bytes = ElementCount(box) * element_bytes;
      visit(*section, box, at);
      at += bytes;
    }
  }
}

uint32_t IndexOf(const Stream& stream, const Section& section) {
  return static_cast<uint32_t>(&section - stream.sections.data());
}

constexpr uint32_t kNobody = std::numeric_limits<uint32_t>::max();

// A node's place in a chain without its lost nodes.
struct Neighbours {
  uint32_t before = kNobody;  // kNobody: the source's node
  uint32_t after = kNobody;   // kNobody: the node is the last
  int64_t hops = 0;           // nodes before it
};

// Finds the neighbours of `node` in the chain; kNobody stands for the source's node.
Neighbours NeighboursIn(const std::vector<uint32_t>& chain, uint32_t node,
                        const NodeProgram::Gone& gone) {
  Neighbours found;
  bool passed = node == kNobody;
  for (const uint32_t other : chain) {
    if (other == node) {
      passed = true;
    } else if (other < gone.size() && gone[other]) {
      continue;
    } else if (passed) {
      found.after = other;
      break;
    } else {
      found.before = other;
      ++found.hops;
    }
  }
  return found;
}

bool IsHeld(const NodeProgram::Course& course, uint32_t stream, int64_t step) {
  return stream < course.held.size() && step < course.held[stream];
}

}  // namespace

uint64_t Stream::Digest() const {
  HashChain hash(0);
  hash.Add(sections.size());
  hash.Add(static_cast<uint64_t>(bytes));
  hash.Add(static_cast<uint64_t>(step));
  for (const Section& section : sections) {
    hash.Add(section.tensor_hash);
    hash.Add(section.source);
    hash.Add(section.box.offset);
    hash.Add(section.box.extent);
    hash.Add(static_cast<uint64_t>(section.offset));
  }
  for (const uint32_t peer : chain) hash.Add(peer);
  return hash.hash();
}

// The share of one stream that a round carries.
struct NodeProgram::Placed {
  uint32_t stream = 0;  // index into outgoing, or incoming
  uint32_t peer = 0;    // the node that it goes to, or comes from, in this hop
  int64_t step = 0;
  int64_t begin = 0;  // bytes of the stream
  int64_t bytes = 0;
  int64_t leg_offset = 0;  // where the share begins in the chunk to, or from, that peer
};

struct NodeProgram::Places {
  std::map<uint32_t, ExchangeLeg> legs;
  std::vector<Placed> sends;     // parts of `outgoing` streams
  std::vector<Placed> forwards;  // parts of `incoming` streams
  std::vector<Placed> receives;  // parts of `incoming` streams
};

// Finds which bytes of which streams a round carries, from and to whom, and where they lie in the
// chunks. Both ends of a leg have its streams in one order: the stream without a chain, then those
// along chains by the source's node and the chain.
NodeProgram::Places NodeProgram::Place(int64_t round, const Course& course) const {
  const Gone& gone = course.gone;
  Places places;
  const auto add = [&](const std::vector<Stream>& list, uint32_t s, uint32_t peer, int64_t begun,
                       int64_t ExchangeLeg::*direction, std::vector<Placed>* to) {
    const Stream& stream = list[s];
    if (round < begun + course.first) return;
    const int64_t bytes = stream.BytesOf(round - begun);
    if (bytes == 0) return;
    int64_t& leg = places.legs[peer].*direction;
    to->push_back({s, peer, round - begun, stream.Begin(round - begun), bytes, leg});
    leg += bytes;
  };
  uint32_t in = 0;
  const auto add_incoming = [&](uint32_t s) {
    const Stream& stream = incoming[s];
    const Neighbours place = NeighboursIn(stream.chain, node, gone);
    add(incoming, s, place.before == kNobody ? stream.peer : place.before, lag * place.hops,
        &ExchangeLeg::bytes_in, &places.receives);
    if (place.after != kNobody) {
      add(incoming, s, place.after, lag * (place.hops + 1), &ExchangeLeg::bytes_out,
          &places.forwards);
    }
  };
  // Whether the streams that this node itself sends along chains come before this incoming stream.
  // Streams along chains are ordered by their source's node.
  const auto supplied_first = [this](const Stream& incoming_stream) {
    return !incoming_stream.chain.empty() && incoming_stream.peer > node;
  };
  for (uint32_t out = 0; out < outgoing.size(); ++out) {
    const Stream& stream = outgoing[out];
    if (!stream.chain.empty()) {
      while (in < incoming.size() && !supplied_first(incoming[in])) add_incoming(in++);
    }
    const uint32_t to =
        stream.chain.empty() ? stream.peer : NeighboursIn(stream.chain, kNobody, gone).after;
    if (to != kNobody) add(outgoing, out, to, 0, &ExchangeLeg::bytes_out, &places.sends);
  }
  while (in < incoming.size()) add_incoming(in++);
  int64_t out_offset = 0;
  int64_t in_offset = 0;
  for (auto& [peer, leg] : places.legs) {
    leg.peer = peer;
    leg.out_offset = out_offset;
    leg.in_offset = in_offset;
    out_offset += leg.bytes_out;
    in_offset += leg.bytes_in;
  }
  return places;
}

std::vector<RoundLeg> NodeProgram::Round(int64_t round, const Course& course) const {
  const Places places = Place(round, course);
  std::map<uint32_t, RoundLeg> legs;
  for (const auto& [peer, leg] : places.legs) {
    legs[peer].peer = peer;
    legs[peer].bytes_out = leg.bytes_out;
    legs[peer].bytes_in = leg.bytes_in;
  }
  for (const Placed& placed : places.sends) AddPack(placed, &legs[placed.peer]);
  if (!places.forwards.empty()) AddForwards(places, Place(round - lag, course), &legs);
  for (const Placed& placed : places.receives) {
    if (!IsHeld(course, placed.stream, placed.step)) AddUnpack(placed, &legs[placed.peer]);
  }
  std::vector<RoundLeg> list;
  list.reserve(legs.size());
  for (auto& [peer, leg] : legs) list.push_back(std::move(leg));
  return list;
}

void NodeProgram::AddPack(const Placed& placed, RoundLeg* leg) const {
  const Stream& stream = outgoing[placed.stream];
  ForEachBox(stream, placed.begin, placed.begin + placed.bytes,
             [&](const Section& section, Box& box, int64_t in_stream) {
               const int64_t at = placed.leg_offset + in_stream;
               const Piece& piece = source_layouts[section.member]->pieces[section.piece];
               ChunkMove& move = leg->pack.emplace_back();
               move.chunk_box = static_cast<uint32_t>(leg->sent.size());
               leg->sent.push_back({placed.stream, IndexOf(stream, section), box, at});
               move.member = section.member;
               move.piece = section.piece;
               move.element_bytes = section.element_bytes;
               move.member_byte_offset = ByteOffset(piece, box, section.element_bytes);
               move.chunk_byte_offset = at;
               move.chunk_strides = RowMajorStrides(box.extent);
               move.box = std::move(box);
             });
}

// All bytes to forward were received `lag` rounds before, as the same bytes of the stream.
void NodeProgram::AddForwards(const Places& places, const Places& earlier,
                              std::map<uint32_t, RoundLeg>* legs) const {
  auto received = earlier.receives.begin();
  for (const Placed& placed : places.forwards) {
    while (received != earlier.receives.end() && received->stream != placed.stream) ++received;
    REFITD_CHECK(received != earlier.receives.end() && received->begin == placed.begin &&
                 received->bytes == placed.bytes);
    const int64_t from = earlier.legs.at(received->peer).in_offset + received->leg_offset;
    (*legs)[placed.peer].forwards.push_back({from, placed.leg_offset, placed.bytes});
  }
}

void NodeProgram::AddUnpack(const Placed& placed, RoundLeg* leg) const {
  const Stream& stream = incoming[placed.stream];
  ForEachBox(stream, placed.begin, placed.begin + placed.bytes,
             [&](const Section& section, Box& box, int64_t in_stream) {
               const int64_t at = placed.leg_offset + in_stream;
               const Piece chunk{0, box, RegionId(), at, RowMajorStrides(box.extent)};
               const auto chunk_box = static_cast<uint32_t>(leg->received.size());
               leg->received.push_back({placed.stream, IndexOf(stream, section), box, at});
               for (uint32_t t = 0; t < section.targets; ++t) {
                 const SectionTarget target = targets[section.first_target + t];
                 const Piece& piece = destinations[target.destination].layout->pieces[target.piece];
                 std::optional<Box> common = Intersect(box, piece.box);
                 if (!common.has_value()) continue;
                 ChunkMove& move = leg->unpack.emplace_back();
                 move.chunk_box = chunk_box;
                 move.member = target.destination;
                 move.piece = target.piece;
                 move.element_bytes = section.element_bytes;
                 move.member_byte_offset = ByteOffset(piece, *common, section.element_bytes);
                 move.chunk_byte_offset = ByteOffset(chunk, *common, section.element_bytes);
                 move.chunk_strides = chunk.strides;
                 move.box = *std::move(common);
               }
             });
}

std::vector<ExchangeLeg> NodeProgram::Legs(int64_t round, const Course& course) const {
  const Places places = Place(round, course);
  std::vector<ExchangeLeg> list;
  list.reserve(places.legs.size());
  for (const auto& [peer, leg] : places.legs) list.push_back(leg);
  return list;
}

bool NodeProgram::Unpacks(int64_t round, const Course& course) const {
  const Places places = Place(round, course);
  return std::any_of(places.receives.begin(), places.receives.end(), [&](const Placed& placed) {
    return !IsHeld(course, placed.stream, placed.step);
  });
}

void NodeProgram::Hold(int64_t round, Course* course) const {
  course->held.resize(incoming.size());
  for (size_t s = 0; s < incoming.size(); ++s) {
    const int64_t hops = NeighboursIn(incoming[s].chain, node, course->gone).hops;
    const int64_t steps = std::min(round - lag * hops, incoming[s].Rounds());
    course->held[s] = std::max(course->held[s], steps);
  }
}

int64_t NodeProgram::FirstLacking(const Course& course) const {
  int64_t first = rounds;
  for (size_t s = 0; s < incoming.size(); ++s) {
    const int64_t held = s < course.held.size() ? course.held[s] : 0;
    if (held < incoming[s].Rounds()) first = std::min(first, held);
  }
  return first;
}

std::map<uint32_t, std::vector<uint32_t>> NodeProgram::StreamsByReceiver() const {
  std::map<uint32_t, std::vector<uint32_t>> streams;
  for (uint32_t s = 0; s < outgoing.size(); ++s) {
    const Stream& stream = outgoing[s];
    if (stream.chain.empty()) streams[stream.peer].push_back(s);
    for (const uint32_t peer : stream.chain) streams[peer].push_back(s);
  }
  return streams;
}

std::map<uint32_t, std::vector<uint32_t>> NodeProgram::StreamsBySender() const {
  std::map<uint32_t, std::vector<uint32_t>> streams;
  for (uint32_t s = 0; s < incoming.size(); ++s) streams[incoming[s].peer].push_back(s);
  return streams;
}

uint64_t FoldStreams(const std::vector<uint64_t>& streams) {
  if (streams.size() == 1) return streams[0];
  HashChain chain(0);
  for (const uint64_t stream : streams) chain.Add(stream);
  return chain.hash();
}

bool SameStructure(const Layout& a, const Layout& b) {
  if (&a == &b) return true;
  return a.tensors == b.tensors && a.ties == b.ties &&
         std::equal(a.pieces.begin(), a.pieces.end(), b.pieces.begin(), b.pieces.end(),
                    [](const Piece& p, const Piece& q) {
                      return p.tensor == q.tensor && p.box == q.box && p.strides == q.strides;
                    });
}

absl::StatusOr<NodeProgram> CompileNode(const RoutePlan& plan, uint32_t node,
                                        std::vector<LocalMember> sources,
                                        std::vector<LocalMember> destinations,
                                        const NodeProgramOptions& options) {
  return Builder(plan, node, std::move(sources), std::move(destinations), options).Run();
}

}  // namespace refitd
