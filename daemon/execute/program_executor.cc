#include "daemon/execute/program_executor.h"

#include <fmt/format.h>

#include <algorithm>
#include <optional>
#include <set>
#include <string_view>
#include <utility>

#include "absl/container/flat_hash_map.h"
#include "absl/types/span.h"
#include "transport/base/failure.h"
#include "transport/base/status.h"
#include "transport/plan/by_tensor.h"

namespace refitd {
namespace {

bool Skipped(const std::vector<bool>& skip, size_t i) { return i < skip.size() && skip[i]; }

bool ReadsSources(MoveStep step) { return step != MoveStep::kUnpack; }
bool WritesDestinations(MoveStep step) {
  return step == MoveStep::kLocal || step == MoveStep::kUnpack;
}
bool UsesSlot(MoveStep step) { return step == MoveStep::kPack || step == MoveStep::kUnpack; }

absl::StatusOr<std::map<RegionId, MemorySpan>> Regions(MemberId member, const Layout& layout,
                                                       bool destination,
                                                       const MemoryResolver& memory) {
  std::map<RegionId, MemorySpan> regions;
  const RegionId* last = nullptr;
  for (const Piece& piece : layout.pieces) {
    if (last != nullptr && piece.region == *last) continue;
    last = &piece.region;
    const auto [it, added] = regions.try_emplace(piece.region);
    if (!added) continue;
    REFITD_ASSIGN_OR_RETURN(it->second, destination ? memory.Destination(member, piece.region)
                                                    : memory.Region(member, piece.region));
  }
  return regions;
}

// The replicas whose hashes are in the part.
absl::Span<const HeldReplica> InPart(const std::vector<HeldReplica>& replicas,
                                     const ReplicaFraction& part) {
  const auto begin = std::lower_bound(
      replicas.begin(), replicas.end(), part.first,
      [](const HeldReplica& replica, uint64_t hash) { return replica.hash < hash; });
  const auto end = std::upper_bound(
      begin, replicas.end(), part.last,
      [](uint64_t hash, const HeldReplica& replica) { return hash < replica.hash; });
  return absl::MakeConstSpan(replicas).subspan(static_cast<size_t>(begin - replicas.begin()),
                                               static_cast<size_t>(end - begin));
}

absl::StatusOr<BoundPiece> BindPiece(const Layout& layout, const Piece& piece,
                                     const std::map<RegionId, MemorySpan>& regions) {
  const TensorSpec& tensor = layout.tensors[piece.tensor];
  const auto region = regions.find(piece.region);
  REFITD_ASSIGN_OR_RETURN(const int64_t bytes, SpanBytes(piece, tensor.dtype));
  if (region == regions.end() || piece.byte_offset < 0 || bytes > region->second.bytes ||
      piece.byte_offset > region->second.bytes - bytes) {
    return AboutTensor(Error(absl::StatusCode::kInternal,
                             "tensor {}: a piece of {} bytes at byte {} leaves region {}",
                             tensor.name, bytes, piece.byte_offset, piece.region),
                       tensor.name);
  }
  return BoundPiece{
      tensor.dtype, tensor.shape, piece.box, piece.strides, region->second.data + piece.byte_offset,
      tensor.name};
}

// Returns the piece of the layout in force that is that piece of the program's layout.
absl::StatusOr<const Piece*> InForce(const Layout& compiled, const Layout& in_force,
                                     uint32_t piece) {
  if (piece >= compiled.pieces.size()) {
    return Error(absl::StatusCode::kInternal, "program: piece {} of {}", piece,
                 compiled.pieces.size());
  }
  const Piece& p = compiled.pieces[piece];
  if (&compiled == &in_force) return &p;
  const TensorSpec& tensor = compiled.tensors[p.tensor];
  if (piece < in_force.pieces.size()) {
    const Piece& q = in_force.pieces[piece];
    if (q.box == p.box && q.strides == p.strides && in_force.tensors[q.tensor] == tensor) {
      return &q;
    }
  }
  return AboutTensor(
      Error(absl::StatusCode::kFailedPrecondition,
            "tensor {}: the layout in force does not have piece {} as the program does",
            tensor.name, piece),
      tensor.name);
}

class Binder {
 public:
  Binder(const StartMoves& start, const ProgramMemory& memory,
         const std::vector<HeldReplica>* replicas)
      : start_(start),
        bound_(*start.bound),
        program_(*start.bound->program),
        memory_(memory),
        replicas_(replicas) {}

  absl::StatusOr<BoundStep> Run() {
    result_.transfer.verification = start_.verification;
    KeepAlive();
    switch (start_.step) {
      case MoveStep::kCompare:
        REFITD_RETURN_IF_ERROR(BindCompare());
        break;
      case MoveStep::kWitness:
        REFITD_RETURN_IF_ERROR(BindWitness());
        break;
      case MoveStep::kLocal:
        REFITD_RETURN_IF_ERROR(BindLocal());
        break;
      case MoveStep::kPack:
        REFITD_RETURN_IF_ERROR(BindPack());
        break;
      case MoveStep::kUnpack:
        REFITD_RETURN_IF_ERROR(BindUnpack());
        break;
    }
    return std::move(result_);
  }

 private:
  void KeepAlive() {
    std::set<const void*> kept;
    const auto keep = [&](const MemorySpan& span) {
      if (span.keep_alive != nullptr && kept.insert(span.keep_alive.get()).second) {
        result_.transfer.keep_alive.push_back(span.keep_alive);
      }
    };
    for (const auto* side : {&memory_.sources, &memory_.destinations}) {
      for (const auto& regions : *side) {
        for (const auto& [id, span] : regions) keep(span);
      }
    }
    keep(memory_.slot);
    keep(memory_.received);
  }

  // ---- members' pieces ----

  struct PlacedPiece {
    const Piece* compiled = nullptr;
    uint32_t index = 0;  // index in its list
  };
  // By member, then piece of its layout: 1 + the bound piece's index; 0: not bound yet.
  using PlacedPieces = std::vector<std::vector<uint32_t>>;

  // The layouts in force of one side's members, and their regions.
  struct Members {
    const std::vector<std::shared_ptr<const Layout>>& layouts;
    const std::vector<std::map<RegionId, MemorySpan>>& regions;
  };

  // Returns the piece of a member; binds it and adds it to `list` the first time. `layout` is the
  // program's.
  absl::StatusOr<PlacedPiece> Bind(uint32_t member, uint32_t piece, const Layout& layout,
                                   const Members& members, std::vector<BoundPiece>* list,
                                   PlacedPieces* known) const {
    if (known->empty()) known->resize(members.layouts.size());
    std::vector<uint32_t>& of_member = (*known)[member];
    if (of_member.empty()) of_member.resize(layout.pieces.size());
    if (piece < of_member.size() && of_member[piece] > 0) {
      return PlacedPiece{&layout.pieces[piece], of_member[piece] - 1};
    }
    const bool computed =
        piece < layout.pieces.size() && layout.pieces[piece].computed_from != kNotComputed;
    REFITD_ASSIGN_OR_RETURN(BoundPiece bound, computed
                                                  ? Computed(member, piece)
                                                  : BindInForce(member, piece, layout, members));
    list->push_back(std::move(bound));
    of_member[piece] = static_cast<uint32_t>(list->size());
    return PlacedPiece{&layout.pieces[piece], of_member[piece] - 1};
  }

  static absl::StatusOr<BoundPiece> BindInForce(uint32_t member, uint32_t piece,
                                                const Layout& layout, const Members& members) {
    const Layout& in_force = *members.layouts[member];
    REFITD_ASSIGN_OR_RETURN(const Piece* const held, InForce(layout, in_force, piece));
    return BindPiece(in_force, *held, members.regions[member]);
  }

  Members Sources() const { return {bound_.source_layouts, memory_.sources}; }

  // Binds a computed piece of a source.
  absl::StatusOr<BoundPiece> Computed(uint32_t member, uint32_t piece) const {
    const Layout& layout = *program_.source_layouts[member];
    const Piece& computed = layout.pieces[piece];
    const TensorSpec& tensor = layout.tensors[computed.tensor];
    auto held = std::make_shared<HeldPiece>();
    held->derivation = tensor.derived;
    REFITD_ASSIGN_OR_RETURN(held->shards.emplace_back(),
                            BindInForce(member, computed.computed_from, layout, Sources()));
    if (const auto more = program_.other_shards.find({member, piece});
        more != program_.other_shards.end()) {
      for (const ShardBox& from : *more->second) {
        REFITD_ASSIGN_OR_RETURN(
            BoundPiece shard,
            BindInForce(from.layout, from.piece, *program_.source_layouts[from.layout], Sources()));
        shard.data += ElementDistance(from.box.offset, shard.box.offset, shard.strides) *
                      ElementBytes(shard.dtype);
        shard.box = from.box;
        held->shards.push_back(std::move(shard));
      }
    }
    char* const data = held->shards.front().data;
    return BoundPiece{tensor.dtype, tensor.shape, computed.box,   computed.strides,
                      data,         tensor.name,  std::move(held)};
  }

  absl::StatusOr<PlacedPiece> Source(uint32_t member, uint32_t piece,
                                     std::vector<BoundPiece>* list) {
    return Bind(member, piece, *program_.source_layouts[member], Sources(), list, &known_sources_);
  }

  absl::StatusOr<PlacedPiece> Destination(uint32_t member, uint32_t piece) {
    std::vector<BoundPiece>& list = result_.transfer.destinations[member];
    const size_t before = list.size();
    REFITD_ASSIGN_OR_RETURN(
        const PlacedPiece known,
        Bind(member, piece, *program_.destinations[member].layout,
             {bound_.destination_layouts, memory_.destinations}, &list, &known_destinations_));
    if (list.size() > before) result_.originals[member].push_back(piece);
    return known;
  }

  void ResizeDestinations() {
    result_.transfer.destinations.resize(program_.destinations.size());
    result_.transfer.readback_now.assign(program_.destinations.size(), false);
    result_.originals.resize(program_.destinations.size());
  }

  void AddMove(CopyMove move, int64_t element_bytes) {
    result_.transfer.plan.bytes += ElementCount(move.box) * element_bytes;
    result_.transfer.plan.moves.push_back(std::move(move));
  }

  // ---- steps ----

  absl::Status BindLocal() {
    ResizeDestinations();
    Transfer& transfer = result_.transfer;
    transfer.plan.moves.reserve(program_.local.moves.size());
    for (const CopyMove& move : program_.local.moves) {
      if (Skipped(start_.skip_destination, move.destination)) continue;
      REFITD_ASSIGN_OR_RETURN(const PlacedPiece source,
                              Source(move.source, move.source_piece, &transfer.source));
      REFITD_ASSIGN_OR_RETURN(const PlacedPiece destination,
                              Destination(move.destination, move.destination_piece));
      AddMove({0, source.index, move.destination, destination.index, move.box,
               move.source_byte_offset - source.compiled->byte_offset,
               move.destination_byte_offset - destination.compiled->byte_offset},
              ElementBytes(transfer.source[source.index].dtype));
    }
    return absl::OkStatus();
  }

  // The address of a chunk in the slot.
  absl::StatusOr<char*> Chunk(int64_t offset, int64_t bytes) const {
    if (bytes <= memory_.slot.bytes && offset <= memory_.slot.bytes - bytes) {
      return memory_.slot.data + offset;
    }
    return Error(absl::StatusCode::kInvalidArgument,
                 "round {}: {} bytes at byte {} of slot {}, which has {}", start_.round, bytes,
                 offset, start_.slot, memory_.slot.bytes);
  }

  absl::Status CheckRound() const {
    if (start_.round >= 0 && start_.round < program_.rounds) return absl::OkStatus();
    return Error(absl::StatusCode::kInvalidArgument, "round: {} of {}", start_.round,
                 program_.rounds);
  }

  // Notes that the next source piece is a part of that section.
  void AddSection(const ChunkBox& box) {
    std::vector<SectionDigest>& sections = result_.sections;
    if (sections.empty() || sections.back().stream != box.stream ||
        sections.back().section != box.section) {
      sections.push_back({box.stream, box.section, 0});
    }
    result_.section_of_piece.push_back(static_cast<uint32_t>(sections.size() - 1));
  }

  absl::Status BindPack() {
    REFITD_RETURN_IF_ERROR(CheckRound());
    Transfer& transfer = result_.transfer;
    transfer.destinations.resize(1);
    transfer.readback_now = {true};
    transfer.want_source_digests = start_.verification != Verification::kOff;
    const std::vector<RoundLeg> round = program_.Round(start_.round, start_.course);
    const std::vector<ExchangeLeg> legs = program_.Legs(start_.round, start_.course);
    std::vector<BoundPiece> pieces;  // whole pieces
    for (size_t i = 0; i < round.size(); ++i) {
      if (round[i].bytes_out == 0 || Skipped(start_.course.gone, round[i].peer)) continue;
      REFITD_ASSIGN_OR_RETURN(char* const chunk, Chunk(legs[i].out_offset, legs[i].bytes_out));
      for (const ChunkMove& move : round[i].pack) {
        const ChunkBox& sent = round[i].sent[move.chunk_box];
        REFITD_ASSIGN_OR_RETURN(const PlacedPiece known, Source(move.member, move.piece, &pieces));
        BoundPiece source = pieces[known.index];
        const int64_t inside = ElementDistance(sent.box.offset, source.box.offset, source.strides) *
                               move.element_bytes;
        source.box = sent.box;
        if (source.held == nullptr) source.data += inside;
        BoundPiece packed = source;
        packed.held = nullptr;
        packed.strides = RowMajorStrides(sent.box.extent);
        packed.data = chunk + sent.chunk_byte_offset;
        const auto index = static_cast<uint32_t>(transfer.source.size());
        AddSection(sent);
        transfer.source.push_back(std::move(source));
        transfer.destinations[0].push_back(std::move(packed));
        AddMove({0, index, 0, index, move.box,
                 move.member_byte_offset - known.compiled->byte_offset - inside,
                 move.chunk_byte_offset - sent.chunk_byte_offset},
                move.element_bytes);
      }
    }
    return BindForwards(round, legs);
  }

  // Forwarded bytes are copied as integers of 32 bits where they can be, since the copy computes a
  // digest by element. No digest of them counts here: the bytes that each node of the chain
  // received are compared with those that the source sent (P1).
  absl::Status BindForwards(const std::vector<RoundLeg>& round,
                            const std::vector<ExchangeLeg>& legs) {
    Transfer& transfer = result_.transfer;
    for (size_t i = 0; i < round.size(); ++i) {
      if (round[i].forwards.empty()) continue;
      REFITD_ASSIGN_OR_RETURN(char* const chunk, Chunk(legs[i].out_offset, legs[i].bytes_out));
      for (const Forward& forward : round[i].forwards) {
        if (forward.slot_byte_offset > memory_.received.bytes - forward.bytes) {
          return Error(absl::StatusCode::kInvalidArgument,
                       "round {}: {} bytes to forward at byte {} of slot {}, which has {}",
                       start_.round, forward.bytes, forward.slot_byte_offset, start_.received,
                       memory_.received.bytes);
        }
        if (transfer.destinations.size() == 1) {
          transfer.destinations.emplace_back();
          transfer.readback_now.push_back(false);
        }
        const bool words = (forward.bytes | forward.slot_byte_offset | forward.chunk_byte_offset) %
                               ElementBytes(DType::kInt32) ==
                           0;
        const DType dtype = words ? DType::kInt32 : DType::kUint8;
        const int64_t elements = forward.bytes / ElementBytes(dtype);
        const Box box{{0}, {elements}};
        BoundPiece source{dtype,
                          {elements},
                          box,
                          {1},
                          memory_.received.data + forward.slot_byte_offset,
                          "forwarded bytes"};
        BoundPiece packed = source;
        packed.data = chunk + forward.chunk_byte_offset;
        const auto from = static_cast<uint32_t>(transfer.source.size());
        const auto to = static_cast<uint32_t>(transfer.destinations[1].size());
        transfer.source.push_back(std::move(source));
        transfer.destinations[1].push_back(std::move(packed));
        AddMove({0, from, 1, to, box, 0, 0}, 1);
      }
    }
    return absl::OkStatus();
  }

  absl::Status BindUnpack() {
    REFITD_RETURN_IF_ERROR(CheckRound());
    ResizeDestinations();
    Transfer& transfer = result_.transfer;
    transfer.want_source_digests = start_.verification != Verification::kOff;
    const std::vector<RoundLeg> round = program_.Round(start_.round, start_.course);
    const std::vector<ExchangeLeg> legs = program_.Legs(start_.round, start_.course);
    for (size_t i = 0; i < round.size(); ++i) {
      if (round[i].bytes_in == 0 || Skipped(start_.course.gone, round[i].peer)) continue;
      REFITD_ASSIGN_OR_RETURN(char* const chunk, Chunk(legs[i].in_offset, legs[i].bytes_in));
      const auto first = static_cast<uint32_t>(transfer.source.size());
      for (const ChunkBox& received : round[i].received) {
        // Every section that arrives has a target.
        const Stream& stream = program_.incoming[received.stream];
        const SectionTarget& target =
            program_.targets[stream.sections[received.section].first_target];
        const Layout& layout = *program_.destinations[target.destination].layout;
        const TensorSpec& tensor = layout.tensors[layout.pieces[target.piece].tensor];
        AddSection(received);
        transfer.source.push_back({tensor.dtype, tensor.shape, received.box,
                                   RowMajorStrides(received.box.extent),
                                   chunk + received.chunk_byte_offset, tensor.name});
      }
      for (const ChunkMove& move : round[i].unpack) {
        if (Skipped(start_.skip_destination, move.member)) continue;
        REFITD_ASSIGN_OR_RETURN(const PlacedPiece known, Destination(move.member, move.piece));
        const ChunkBox& received = round[i].received[move.chunk_box];
        AddMove({0, first + move.chunk_box, move.member, known.index, move.box,
                 move.chunk_byte_offset - received.chunk_byte_offset,
                 move.member_byte_offset - known.compiled->byte_offset},
                move.element_bytes);
      }
    }
    return absl::OkStatus();
  }

  absl::Status BindWitness() {
    Transfer& transfer = result_.transfer;
    transfer.want_source_digests = true;
    const std::vector<std::vector<RegionId>> unknown = UnknownSources(memory_.places);
    for (size_t m = 0; m < program_.sources.size() && m < unknown.size(); ++m) {
      const PlacedLayout& member = memory_.places[m];
      for (const Piece& piece : member.layout->pieces) {
        const auto& regions = unknown[m];
        if (std::find(regions.begin(), regions.end(), piece.region) == regions.end()) continue;
        REFITD_ASSIGN_OR_RETURN(BoundPiece bound,
                                BindPiece(*member.layout, piece, memory_.sources[m]));
        bound.name = fmt::format("{} of {}", bound.name, member.label);
        transfer.source.push_back(std::move(bound));
      }
    }
    return absl::OkStatus();
  }

  absl::Status BindCompare() {
    result_.transfer.want_source_digests = true;
    std::vector<const HeldReplica*> held;
    for (const HeldReplica& replica : InPart(*replicas_, start_.part)) held.push_back(&replica);
    // The digests travel in the order of the shares.
    std::sort(held.begin(), held.end(),
              [](const HeldReplica* a, const HeldReplica* b) { return a->share < b->share; });
    result_.transfer.source.reserve(held.size());
    for (const HeldReplica* replica : held) {
      const Layout& layout = *bound_.source_layouts[replica->member];
      REFITD_ASSIGN_OR_RETURN(BoundPiece piece, BindPiece(layout, layout.pieces[replica->piece],
                                                          memory_.sources[replica->member]));
      const Box& box = (*bound_.replicas)[replica->share].box;
      piece.data +=
          ElementDistance(box.offset, piece.box.offset, piece.strides) * ElementBytes(piece.dtype);
      piece.box = box;
      result_.transfer.source.push_back(std::move(piece));
    }
    return absl::OkStatus();
  }

  const StartMoves& start_;
  const BoundProgram& bound_;
  const NodeProgram& program_;
  const ProgramMemory& memory_;
  const std::vector<HeldReplica>* const replicas_;
  BoundStep result_;
  PlacedPieces known_sources_;
  PlacedPieces known_destinations_;
};

// ---- replicas ----

class ReplicaFinder {
 public:
  explicit ReplicaFinder(const BoundProgram& bound) : bound_(bound) {
    const std::vector<LocalMember>& sources = bound.program->sources;
    for (uint32_t m = 0; m < sources.size(); ++m) member_of_.emplace(sources[m].rank, m);
    const std::vector<TensorSpec>& tensors = bound.plan->tensors;
    number_of_.reserve(tensors.size());
    for (uint32_t t = 0; t < tensors.size(); ++t) number_of_.emplace(tensors[t].name, t);
    holdings_.resize(sources.size());
  }

  absl::StatusOr<std::vector<HeldReplica>> Run() {
    const std::vector<TensorSpec>& tensors = bound_.plan->tensors;
    std::vector<HeldReplica> found;
    found.reserve(bound_.replicas->size());
    auto hashed = static_cast<uint32_t>(tensors.size());  // the tensor that tensor_hash is of
    uint64_t tensor_hash = 0;
    for (const ReplicaShare& share : *bound_.replicas) {
      const auto member = member_of_.find(share.source);
      if (member == member_of_.end() || share.tensor >= tensors.size()) {
        return Error(absl::StatusCode::kFailedPrecondition,
                     "replicas: source {}, tensor {}: not of this daemon", share.source,
                     share.tensor);
      }
      if (share.tensor != hashed) {
        hashed = share.tensor;
        tensor_hash = TensorHash(tensors[hashed]);
      }
      REFITD_ASSIGN_OR_RETURN(const uint32_t piece, PieceOf(share, member->second));
      found.push_back({ReplicaHash(tensor_hash, share.box), static_cast<uint32_t>(found.size()),
                       member->second, piece});
    }
    std::stable_sort(found.begin(), found.end(),
                     [](const HeldReplica& a, const HeldReplica& b) { return a.hash < b.hash; });
    return found;
  }

 private:
  // Indices of a layout's pieces, in order, by the plan's number of their tensor. Pieces of tensors
  // that the plan does not have are left out.
  using Holdings = ByTensor<uint32_t>;

  Holdings HoldingsOf(const Layout& layout) const {
    const std::vector<TensorSpec>& tensors = bound_.plan->tensors;
    const auto none = static_cast<uint32_t>(tensors.size());
    std::vector<uint32_t> numbers;
    numbers.reserve(layout.tensors.size());
    for (const TensorSpec& tensor : layout.tensors) {
      const auto it = number_of_.find(tensor.name);
      const bool known = it != number_of_.end() && tensors[it->second] == tensor;
      numbers.push_back(known ? it->second : none);
    }
    return Holdings(tensors.size(), [&](const auto& visit) {
      for (uint32_t p = 0; p < layout.pieces.size(); ++p) {
        const uint32_t number = numbers[layout.pieces[p].tensor];
        if (number != none) visit(number, p);
      }
    });
  }

  static bool Holds(const Piece& piece, const Box& box) {
    return box.offset.size() == piece.box.offset.size() && Contains(piece.box, box);
  }

  absl::StatusOr<uint32_t> PieceOf(const ReplicaShare& share, uint32_t member) {
    const Layout& layout = *bound_.source_layouts[member];
    std::optional<Holdings>& held = holdings_[member];
    if (!held.has_value()) held = HoldingsOf(layout);
    for (const uint32_t piece : held->Of(share.tensor)) {
      if (Holds(layout.pieces[piece], share.box)) return piece;
    }
    const std::string& name = bound_.plan->tensors[share.tensor].name;
    return AboutTensor(
        Error(absl::StatusCode::kFailedPrecondition,
              "tensor {}: source {} does not hold the box at [{}] of extent [{}]", name,
              share.source, fmt::join(share.box.offset, ", "), fmt::join(share.box.extent, ", ")),
        name);
  }

  const BoundProgram& bound_;
  absl::flat_hash_map<uint32_t, uint32_t> member_of_;  // by the plan's number
  absl::flat_hash_map<std::string_view, uint32_t> number_of_;
  std::vector<std::optional<Holdings>> holdings_;  // by member
};

}  // namespace

absl::StatusOr<ProgramMemory> ResolveMemory(const StartMoves& start, const MemoryResolver& memory,
                                            const std::vector<HeldReplica>* replicas) {
  const BoundProgram& bound = *start.bound;
  const size_t sources = bound.program->sources.size();
  const size_t destinations = bound.program->destinations.size();
  if (bound.sources.size() != sources || bound.source_layouts.size() != sources ||
      bound.destinations.size() != destinations ||
      bound.destination_layouts.size() != destinations) {
    return Error(absl::StatusCode::kInternal,
                 "bound program: {} sources and {} destinations, bound to {} and {}", sources,
                 destinations, bound.sources.size(), bound.destinations.size());
  }
  ProgramMemory found;
  found.sources.resize(sources);
  found.destinations.resize(destinations);
  if (replicas != nullptr) {
    for (const HeldReplica& replica : InPart(*replicas, start.part)) {
      const RegionId region = bound.source_layouts[replica.member]->pieces[replica.piece].region;
      const auto [it, added] = found.sources[replica.member].try_emplace(region);
      if (!added) continue;
      REFITD_ASSIGN_OR_RETURN(it->second, memory.Region(bound.sources[replica.member], region));
    }
  }
  for (size_t i = 0; i < sources && ReadsSources(start.step) && replicas == nullptr; ++i) {
    REFITD_ASSIGN_OR_RETURN(found.sources[i], Regions(bound.sources[i], *bound.source_layouts[i],
                                                      /*destination=*/false, memory));
  }
  for (size_t i = 0; i < destinations && WritesDestinations(start.step); ++i) {
    if (Skipped(start.skip_destination, i)) continue;
    REFITD_ASSIGN_OR_RETURN(found.destinations[i],
                            Regions(bound.destinations[i], *bound.destination_layouts[i],
                                    /*destination=*/true, memory));
  }
  if (start.step == MoveStep::kWitness) found.places = PlacesOf(bound, memory);
  if (UsesSlot(start.step)) {
    REFITD_ASSIGN_OR_RETURN(found.slot, memory.Slot(start.slot));
  }
  if (start.step == MoveStep::kPack && bound.program->lag > 0) {
    REFITD_ASSIGN_OR_RETURN(found.received, memory.Slot(start.received));
  }
  return found;
}

std::string MemoryResolver::LabelOf(MemberId member) const {
  return fmt::format("member {}", member);
}

PlacedLayout PlaceOf(MemberId member, const std::shared_ptr<const Layout>& layout, bool destination,
                     const MemoryResolver& memory) {
  PlacedLayout placed{layout, {}, memory.LabelOf(member), destination};
  const absl::StatusOr<std::map<RegionId, MemorySpan>> regions =
      Regions(member, *layout, destination, memory);
  if (!regions.ok()) return placed;
  for (const auto& [id, span] : *regions) placed.origins.emplace(id, span.origin);
  return placed;
}

std::vector<PlacedLayout> PlacesOf(const BoundProgram& bound, const MemoryResolver& memory) {
  std::vector<PlacedLayout> places;
  for (size_t i = 0; i < bound.sources.size(); ++i) {
    places.push_back(PlaceOf(bound.sources[i], bound.source_layouts[i], false, memory));
  }
  for (size_t i = 0; i < bound.destinations.size(); ++i) {
    places.push_back(PlaceOf(bound.destinations[i], bound.destination_layouts[i], true, memory));
  }
  return places;
}

absl::StatusOr<std::vector<HeldReplica>> FindReplicas(const BoundProgram& bound) {
  if (bound.replicas == nullptr || bound.replicas->empty()) return std::vector<HeldReplica>();
  return ReplicaFinder(bound).Run();
}

absl::StatusOr<BoundStep> BindStep(const StartMoves& start, const ProgramMemory& memory,
                                   const std::vector<HeldReplica>* replicas) {
  REFITD_RETURN_IF_ERROR(CheckOverlap(memory.places));
  return Binder(start, memory, replicas).Run();
}

}  // namespace refitd
