#include "daemon/execute/executor.h"

#include <algorithm>
#include <iterator>
#include <set>
#include <string>
#include <utility>

#include "absl/container/flat_hash_map.h"
#include "transport/base/mutex.h"
#include "transport/base/status.h"
#include "transport/broadcast.h"
#include "transport/plan/derived.h"
#include "transport/plan/node_program.h"
#include "transport/plan/refit_plan.h"

namespace refitd {
namespace {

// How many witnessed pieces of pushes are kept for one set of destinations: more than a model's
// tensors (8 bytes each); when there are more, all are looked at again.
constexpr size_t kMaxWitnessed = size_t{1} << 20;

// The pieces of a part, as the planner reads them and bound to their memory. Piece i of both is the
// same box. Its byte offset for the planner is 0, so that a move's source offset is relative to the
// piece.
struct BoundSource {
  absl::Span<const TensorSpec> tensors;  // of the bucket: from the part's first to its last
  std::vector<Piece> planned;
  std::vector<BoundPiece> pieces;
  // These three are the same for the tensors that engines derive from the pieces.
  std::vector<TensorSpec> derived;
  std::vector<Piece> planned_derived;
  std::vector<BoundPiece> computed;
  std::vector<uint32_t> range_of_piece;  // index into the part's ranges
  std::vector<MemoryOrigin> origins;     // of the pieces
  std::vector<std::shared_ptr<const void>> keep_alive;
};

// Whether another daemon sent the part into this daemon's slot.
bool CameOverTheWire(const StartTransfer& start) { return start.bucket_call == CallId(); }

MemorySpan Advance(MemorySpan span, int64_t bytes) {
  span.data += bytes;
  span.origin.begin += bytes;
  return span;
}

// The memory from the first element of the part's range i on.
absl::StatusOr<MemorySpan> SourceOf(const StartTransfer& start, size_t i,
                                    const MemoryResolver& memory) {
  const PartContent& content = *start.content;
  const TensorRange& range = content.ranges[i];
  if (CameOverTheWire(start)) {
    REFITD_ASSIGN_OR_RETURN(MemorySpan span, memory.SlotOf(start.trainer, start.source_slot->slot));
    span.data += content.byte_offsets[i];
    return span;
  }
  const CheckedBucket& bucket = *content.bucket;
  const CheckedBucket::Place& place = bucket.places[range.tensor];
  const int64_t within = (range.start - bucket.ranges[range.tensor].start) *
                         ElementBytes(bucket.tensors[range.tensor].dtype);
  switch (bucket.source) {
    case CheckedBucket::Source::kNone:
      break;
    case CheckedBucket::Source::kInline:
      // The request outlives its answer, which comes after the last read (P6).
      return MemorySpan{const_cast<char*>(place.inline_data) + within, 0, nullptr};
    case CheckedBucket::Source::kDevice:
      return Advance({const_cast<char*>(place.inline_data), 0, place.keep_alive, place.origin},
                     within);
    case CheckedBucket::Source::kRegions: {
      REFITD_ASSIGN_OR_RETURN(MemorySpan span, memory.Region(start.trainer, place.region));
      return Advance(std::move(span), place.byte_offset + within);
    }
    case CheckedBucket::Source::kSlot: {
      REFITD_ASSIGN_OR_RETURN(MemorySpan span,
                              memory.SlotOf(start.trainer, start.source_slot->slot));
      span.data += place.byte_offset + within;
      return span;
    }
  }
  return absl::InternalError("unknown source kind");
}

absl::StatusOr<BoundSource> BindSource(const StartTransfer& start, const MemoryResolver& memory) {
  BoundSource source;
  const PartContent& content = *start.content;
  if (content.ranges.empty()) return source;
  const auto [first, last] = std::minmax_element(
      content.ranges.begin(), content.ranges.end(),
      [](const TensorRange& a, const TensorRange& b) { return a.tensor < b.tensor; });
  const uint32_t begin = first->tensor;
  source.tensors =
      absl::MakeConstSpan(content.bucket->tensors).subspan(begin, size_t{last->tensor} - begin + 1);
  std::shared_ptr<const void> last_kept;
  for (uint32_t i = 0; i < content.ranges.size(); ++i) {
    const TensorRange& range = content.ranges[i];
    const TensorSpec& tensor = content.tensor(i);
    REFITD_ASSIGN_OR_RETURN(MemorySpan span, SourceOf(start, i, memory));
    if (span.keep_alive != nullptr && span.keep_alive != last_kept) {
      last_kept = span.keep_alive;
      source.keep_alive.push_back(span.keep_alive);
    }
    const int64_t element_bytes = ElementBytes(tensor.dtype);
    const Dims strides = RowMajorStrides(tensor.shape);
    for (Box& box : BoxesOfRange(tensor.shape, range.start, range.count)) {
      const int64_t from = (FirstIndex(box, tensor.shape) - range.start) * element_bytes;
      char* data = span.data + from;
      source.origins.push_back(span.origin);
      source.origins.back().begin += from;
      source.planned.push_back({range.tensor - begin, box, RegionId(), 0, strides});
      source.pieces.push_back({tensor.dtype, tensor.shape, box, strides, data, tensor.name});
      source.range_of_piece.push_back(i);
    }
  }
  return source;
}

// Adds what destinations derive from the source's pieces. The coordinator lets only whole blocks be
// pushed, so each piece has all blocks that it meets.
void AddDerived(const DestinationIndex& index, BoundSource* source) {
  absl::flat_hash_map<uint32_t, uint32_t> numbers;  // in source->derived, by tensor of the index
  for (const BoundPiece& piece : source->pieces) {
    for (const uint32_t t : index.DerivedFrom(piece.name)) {
      const TensorSpec& tensor = *index.tensors()[t].spec;
      std::optional<Box> box = ComputableBox(*tensor.derived, piece.box);
      if (!box.has_value()) continue;
      const auto [number, added] =
          numbers.try_emplace(t, static_cast<uint32_t>(source->derived.size()));
      if (added) source->derived.push_back(tensor);
      const Dims strides = RowMajorStrides(box->extent);
      source->planned_derived.push_back({number->second, *box, RegionId(), 0, strides});
      auto held = std::make_shared<const HeldPiece>(
          HeldPiece{.derivation = tensor.derived, .shards = {piece}, .digested = false});
      source->computed.push_back({tensor.dtype, tensor.shape, *std::move(box), strides, piece.data,
                                  tensor.name, std::move(held)});
    }
  }
}

// The plan of the moves from the source's pieces, and then from those that are computed. Leaves of
// these only the pieces that are stored.
absl::StatusOr<MovePlan> PlanOf(const StartTransfer& start, BoundSource* source) {
  PlanOptions options;
  options.skip_destination = start.skip_destination;
  REFITD_ASSIGN_OR_RETURN(MovePlan plan,
                          Compile({source->tensors, source->planned}, *start.index, options));
  AddDerived(*start.index, source);
  if (source->derived.empty()) return plan;
  options.max_moves -= static_cast<int64_t>(plan.moves.size());
  REFITD_ASSIGN_OR_RETURN(
      MovePlan derived, Compile({source->derived, source->planned_derived}, *start.index, options));
  plan.bytes += derived.bytes;
  std::vector<BoundPiece> stored;
  std::optional<uint32_t> last;  // moves are ordered by source piece
  for (CopyMove& move : derived.moves) {
    if (last != move.source_piece) {
      last = move.source_piece;
      stored.push_back(std::move(source->computed[*last]));
    }
    move.source_piece = static_cast<uint32_t>(source->pieces.size() + stored.size() - 1);
    plan.moves.push_back(std::move(move));
  }
  source->computed = std::move(stored);
  return plan;
}

// The pieces of which nothing tells whether they lie in a destination's memory, and a key of each,
// equal for the same elements at the same place.
struct Unrecognised {
  std::vector<BoundPiece> pieces;
  std::vector<uint64_t> keys;
};

Unrecognised UnrecognisedOf(const StartTransfer& start, const BoundSource& source,
                            const DestinationPlaces& places,
                            const absl::flat_hash_set<uint64_t>& witnessed) {
  Unrecognised found;
  for (size_t p = 0; p < source.pieces.size(); ++p) {
    const BoundPiece& piece = source.pieces[p];
    if (!places.IsUnknown(source.origins[p])) continue;
    const uint32_t tensor = start.content->ranges[source.range_of_piece[p]].tensor;
    HashChain key(TensorHash(start.content->bucket->tensors[tensor]));
    key.Add(piece.box.offset);
    key.Add(piece.box.extent);
    key.Add(start.trainer.value());
    key.Add(start.content->bucket->places[tensor].region.value());
    key.Add(reinterpret_cast<uintptr_t>(piece.data));
    if (witnessed.contains(key.hash())) continue;
    found.pieces.push_back(piece);
    found.keys.push_back(key.hash());
  }
  return found;
}

absl::Status Changed(std::string_view tensor) {
  return Error(absl::StatusCode::kDataLoss,
               "tensor {}: its bytes changed while they were being moved: it shares memory with an "
               "engine's tensor at another place, or the trainer wrote to it",
               tensor);
}

// P11: runs a transfer between two readings of its sources. DATA_LOSS: their bytes changed. Like a
// transport it lets go of all memory before it calls `done` (P8).
class Witnessing : public std::enable_shared_from_this<Witnessing> {
 public:
  Witnessing(Transport* transport, Transfer sources, Transfer transfer,
             std::function<void(TransferResult)> done)
      : transport_(transport),
        sources_(std::move(sources)),
        transfer_(std::move(transfer)),
        done_(std::move(done)) {}

  void Start() {
    transport_->Submit(sources_, [self = shared_from_this()](TransferResult before) {
      self->Move(std::move(before));
    });
  }

 private:
  void Move(TransferResult before) {
    TransferResult failed;
    failed.status = std::move(before.status);
    if (!failed.status.ok()) return End(std::move(failed));
    before_ = std::move(before.source_digests);
    transport_->Submit(std::move(transfer_), [self = shared_from_this()](TransferResult moved) {
      self->ReadAgain(std::move(moved));
    });
  }
  void ReadAgain(TransferResult moved) {
    if (!moved.status.ok()) return End(std::move(moved));
    transport_->Submit(sources_, [self = shared_from_this(),
                                  moved = std::move(moved)](TransferResult after) mutable {
      moved.status = self->Compare(after);
      self->End(std::move(moved));
    });
  }
  absl::Status Compare(const TransferResult& after) const {
    for (size_t i = 0; i < before_.size() && after.status.ok(); ++i) {
      if (before_[i] != after.source_digests[i]) return Changed(sources_.source[i].name);
    }
    return after.status;
  }
  void End(TransferResult result) {
    sources_ = Transfer();
    transfer_ = Transfer();
    done_(std::move(result));
  }

  Transport* const transport_;
  Transfer sources_;
  Transfer transfer_;
  const std::function<void(TransferResult)> done_;
  std::vector<uint64_t> before_;  // digests of sources_, from the first reading
};

void AddUnique(MemorySpan slot, std::vector<MemorySpan>* slots) {
  const bool known = std::any_of(slots->begin(), slots->end(),
                                 [&](const MemorySpan& s) { return s.data == slot.data; });
  if (!known) slots->push_back(std::move(slot));
}

const std::optional<SlotGrant>& GrantOf(const StartTransfer& start) {
  return start.source_slot.has_value() ? start.source_slot : start.fill_slot;
}

// Whether the slot was granted for a broadcast alone: no loader rank is handed it, and it crosses
// to no other daemon.
bool SlotIsSpare(const StartTransfer& start) {
  return start.broadcast != BroadcastMethod::kDirect && start.readers.empty();
}

// The slots to pack the part into for loader ranks and the wire: one in each place that reads it,
// except the place that is the source.
absl::StatusOr<std::vector<MemorySpan>> SlotsToFill(const StartTransfer& start,
                                                    const MemoryResolver& memory) {
  std::vector<MemorySpan> slots;
  if (SlotIsSpare(start)) return slots;
  if (start.source_slot.has_value() && (start.wired || !start.readers.empty())) {
    REFITD_ASSIGN_OR_RETURN(MemorySpan source,
                            memory.SlotOf(start.trainer, start.source_slot->slot));
    AddUnique(std::move(source), &slots);
  }
  const size_t sources = slots.size();
  const std::optional<SlotGrant>& grant = GrantOf(start);
  if (grant.has_value()) {
    for (const MemberId reader : start.readers) {
      REFITD_ASSIGN_OR_RETURN(MemorySpan slot, memory.SlotOf(reader, grant->slot));
      AddUnique(std::move(slot), &slots);
    }
  }
  if (grant.has_value() &&
      (start.wired || (start.fill_slot.has_value() && start.readers.empty()))) {
    REFITD_ASSIGN_OR_RETURN(MemorySpan slot, memory.Slot(grant->slot));
    AddUnique(std::move(slot), &slots);
  }
  slots.erase(slots.begin(), slots.begin() + static_cast<std::ptrdiff_t>(sources));
  return slots;
}

// The offset in a slot of a source piece's first element.
int64_t SlotOffset(const PartContent& content, const BoundSource& source, uint32_t piece) {
  const BoundPiece& of = source.pieces[piece];
  const uint32_t r = source.range_of_piece[piece];
  return content.byte_offsets[r] +
         (FirstIndex(of.box, of.shape) - content.ranges[r].start) * ElementBytes(of.dtype);
}

// Adds the slot as one more destination, packed as the part's content says.
void AddSlot(const StartTransfer& start, const BoundSource& source, char* slot_data,
             Transfer* transfer) {
  const auto slot_index = static_cast<uint32_t>(transfer->destinations.size());
  std::vector<BoundPiece>& slot_pieces = transfer->destinations.emplace_back();
  std::vector<CopyMove> slot_moves;
  for (uint32_t p = 0; p < source.pieces.size(); ++p) {
    BoundPiece piece = source.pieces[p];
    piece.data = slot_data + SlotOffset(*start.content, source, p);
    slot_moves.push_back({0, p, slot_index, p, piece.box, 0, 0});
    transfer->plan.bytes += ElementCount(piece.box) * ElementBytes(piece.dtype);
    slot_pieces.push_back(std::move(piece));
  }
  // Keeps all moves of one source piece together: the transport then reads each chunk once for all
  // its destinations.
  std::vector<CopyMove>& moves = transfer->plan.moves;
  moves.insert(moves.end(), slot_moves.begin(), slot_moves.end());
  std::stable_sort(moves.begin(), moves.end(), [](const CopyMove& a, const CopyMove& b) {
    return a.source_piece < b.source_piece;
  });
}

// Binds only the pieces that the program writes, and rewrites the moves to index them.
// originals[d][i] is the layout's index of bound piece i.
absl::Status BindDestinations(const StartTransfer& start, const MemoryResolver& memory,
                              Transfer* transfer, std::vector<std::vector<uint32_t>>* originals) {
  const auto& layouts = start.index->destinations();
  transfer->destinations.resize(layouts.size());
  originals->resize(layouts.size());
  std::vector<absl::flat_hash_map<uint32_t, uint32_t>> bound(layouts.size());
  std::vector<absl::flat_hash_map<uint64_t, MemorySpan>> spans(layouts.size());
  for (CopyMove& move : transfer->plan.moves) {
    const uint32_t d = move.destination;
    const Layout& layout = *layouts[d];
    const Piece& piece = layout.pieces[move.destination_piece];
    move.destination_byte_offset -= piece.byte_offset;
    const auto [it, added] = bound[d].emplace(
        move.destination_piece, static_cast<uint32_t>(transfer->destinations[d].size()));
    if (added) {
      auto span = spans[d].find(piece.region.value());
      if (span == spans[d].end()) {
        REFITD_ASSIGN_OR_RETURN(MemorySpan region,
                                memory.Destination(start.destinations[d], piece.region));
        transfer->keep_alive.push_back(region.keep_alive);
        span = spans[d].emplace(piece.region.value(), std::move(region)).first;
      }
      const TensorSpec& tensor = layout.tensors[piece.tensor];
      transfer->destinations[d].push_back({tensor.dtype, tensor.shape, piece.box, piece.strides,
                                           span->second.data + piece.byte_offset, tensor.name});
      (*originals)[d].push_back(move.destination_piece);
    }
    move.destination_piece = it->second;
  }
  return absl::OkStatus();
}

// ---- broadcasts through slots ----

// How many bytes each device other than the source's is to receive.
BroadcastLoad LoadOf(const StartTransfer& start, const Transfer& transfer,
                     const MemoryResolver& memory) {
  const std::optional<int> source = memory.DeviceOf(start.trainer);
  BroadcastLoad load;
  load.packed_bytes = start.content->bytes;
  const auto add = [&](MemberId member, int64_t bytes) {
    const std::optional<int> device = memory.DeviceOf(member);
    if (device.has_value() && device != source) load.direct_bytes[*device] += bytes;
  };
  for (const CopyMove& move : transfer.plan.moves) {
    const DType dtype = transfer.destinations[move.destination][move.destination_piece].dtype;
    add(start.destinations[move.destination], ElementCount(move.box) * ElementBytes(dtype));
  }
  // Each device has one slot, however many ranks read it.
  std::set<std::optional<int>> filled;
  for (const MemberId reader : start.readers) {
    if (filled.insert(memory.DeviceOf(reader)).second) add(reader, start.content->bytes);
  }
  return load;
}

// The method by which the part's bytes go: kDirect unless they are on GPUs.
absl::StatusOr<BroadcastMethod> MethodOf(const StartTransfer& start, const Transfer& transfer,
                                         const MemoryResolver& memory, const Transport& transport) {
  const bool on_devices = GrantOf(start).has_value() &&
                          start.content->bucket->source != CheckedBucket::Source::kInline &&
                          memory.DeviceOf(start.trainer).has_value();
  if (!on_devices || start.broadcast == BroadcastMethod::kDirect) return BroadcastMethod::kDirect;
  const BroadcastLoad load = LoadOf(start, transfer, memory);
  if (start.broadcast == BroadcastMethod::kAuto) return FastestBroadcast(load, transport);
  REFITD_RETURN_IF_ERROR(transport.CanBroadcast(start.broadcast));
  // If all receivers are on the source's device, there is nothing to broadcast.
  return load.direct_bytes.empty() ? BroadcastMethod::kDirect : start.broadcast;
}

// Lists the slot on every device that needs the part, except where it is the source.
absl::StatusOr<Broadcast> BroadcastOf(const StartTransfer& start, BroadcastMethod method,
                                      const BoundSource& source, const Transfer& transfer,
                                      const MemoryResolver& memory) {
  Broadcast broadcast;
  broadcast.method = method;
  const SlotIndex slot = GrantOf(start)->slot;
  const auto add = [&](MemberId member) -> absl::Status {
    if (!memory.DeviceOf(member).has_value()) return absl::OkStatus();
    REFITD_ASSIGN_OR_RETURN(MemorySpan span, memory.SlotOf(member, slot));
    AddUnique(std::move(span), &broadcast.slots);
    return absl::OkStatus();
  };
  for (const MemberId reader : start.readers) REFITD_RETURN_IF_ERROR(add(reader));
  for (size_t d = 0; d < transfer.destinations.size(); ++d) {
    if (!transfer.destinations[d].empty()) REFITD_RETURN_IF_ERROR(add(start.destinations[d]));
  }
  if (start.source_slot.has_value()) {
    REFITD_ASSIGN_OR_RETURN(const MemorySpan from, memory.SlotOf(start.trainer, slot));
    std::erase_if(broadcast.slots, [&](const MemorySpan& s) { return s.data == from.data; });
  }
  for (uint32_t p = 0; p < source.pieces.size(); ++p) {
    broadcast.byte_offsets.push_back(SlotOffset(*start.content, source, p));
  }
  return broadcast;
}

absl::StatusOr<Transfer> MakeTransfer(const StartTransfer& start, BoundSource source,
                                      const MemoryResolver& memory, const Transport& transport,
                                      std::vector<std::vector<uint32_t>>* originals,
                                      std::vector<uint32_t>* range_of_piece) {
  Transfer transfer;
  transfer.want_source_digests = start.want_source_digests;
  transfer.verification = start.verification;
  transfer.label = "version " + std::to_string(start.version.value()) + ", part " +
                   std::to_string(start.part.value());
  transfer.keep_alive = std::move(source.keep_alive);
  if (start.index != nullptr && !start.index->destinations().empty()) {
    REFITD_ASSIGN_OR_RETURN(transfer.plan, PlanOf(start, &source));
    REFITD_RETURN_IF_ERROR(BindDestinations(start, memory, &transfer, originals));
  }
  transfer.readback_now.assign(transfer.destinations.size(), false);
  // A broadcast would not help computed pieces: its slots would have to be read once more.
  REFITD_ASSIGN_OR_RETURN(const BroadcastMethod method,
                          source.computed.empty()
                              ? MethodOf(start, transfer, memory, transport)
                              : absl::StatusOr<BroadcastMethod>(BroadcastMethod::kDirect));
  if (method == BroadcastMethod::kDirect) {
    REFITD_ASSIGN_OR_RETURN(const std::vector<MemorySpan> slots, SlotsToFill(start, memory));
    for (const MemorySpan& slot : slots) {
      AddSlot(start, source, slot.data, &transfer);
      transfer.readback_now.push_back(true);
      transfer.keep_alive.push_back(slot.keep_alive);
    }
  } else {
    REFITD_ASSIGN_OR_RETURN(transfer.broadcast,
                            BroadcastOf(start, method, source, transfer, memory));
    for (const MemorySpan& slot : transfer.broadcast->slots) {
      transfer.keep_alive.push_back(slot.keep_alive);
    }
  }
  transfer.source = std::move(source.pieces);
  transfer.source.insert(transfer.source.end(), std::make_move_iterator(source.computed.begin()),
                         std::make_move_iterator(source.computed.end()));
  *range_of_piece = std::move(source.range_of_piece);
  return transfer;
}

// Pieces without elements are neither written nor read.
size_t FilledPieces(const Layout& layout) {
  return static_cast<size_t>(std::count_if(layout.pieces.begin(), layout.pieces.end(),
                                           [](const Piece& p) { return ElementCount(p.box) > 0; }));
}

}  // namespace

absl::Status Executor::Start(const StartTransfer& start, const MemoryResolver& memory,
                             std::function<void(Done)> done) {
  const size_t destinations = start.index == nullptr ? 0 : start.index->destinations().size();
  std::vector<std::vector<uint32_t>> originals;
  std::vector<uint32_t> range_of_piece;
  REFITD_ASSIGN_OR_RETURN(BoundSource source, BindSource(start, memory));
  Transfer sources;
  Done base;
  if (const KeptPlaces* const kept = PlacesFor(start, memory); kept != nullptr) {
    Unrecognised unrecognised = UnrecognisedOf(start, source, *kept->places, kept->witnessed);
    sources.source = std::move(unrecognised.pieces);
    sources.want_source_digests = true;
    if (!sources.source.empty()) sources.keep_alive = source.keep_alive;
    base.witnessed = {kept->places, std::move(unrecognised.keys)};
  }
  REFITD_ASSIGN_OR_RETURN(
      Transfer transfer,
      MakeTransfer(start, std::move(source), memory, *transport_, &originals, &range_of_piece));
  sources.label = transfer.label;
  const size_t ranges = start.want_source_digests ? start.content->ranges.size() : 0;
  base.update = start.update;
  base.part = start.part;
  size_t slots = transfer.destinations.size() - destinations;
  if (transfer.broadcast.has_value()) {
    slots = transfer.broadcast->slots.size();
    base.broadcast = transfer.broadcast->method;
  }
  base.slot_bytes = static_cast<int64_t>(slots) * start.content->bytes;
  if (start.verification == Verification::kReadback && destinations > 0) {
    auto& sums = sums_[start.update].by_piece;
    sums.resize(std::max(sums.size(), destinations));
    for (size_t d = 0; d < destinations; ++d) {
      if (!originals[d].empty()) sums[d].resize(start.index->destinations()[d]->pieces.size());
    }
  }
  auto finish = [result_base = std::move(base), originals = std::move(originals),
                 range_of_piece = std::move(range_of_piece), ranges, destinations,
                 done = std::move(done)](TransferResult result) mutable {
    result_base.status = std::move(result.status);
    result_base.bytes_written = std::move(result.bytes_written);
    result_base.bytes_written.resize(destinations);  // slots, if any, come last
    const bool in_layout = result.failed_destination < static_cast<int>(destinations);
    result_base.failed_destination = in_layout ? result.failed_destination : -1;
    result_base.digests.resize(ranges);
    for (size_t p = 0; p < std::min(result.source_digests.size(), range_of_piece.size()); ++p) {
      if (ranges > 0) result_base.digests[range_of_piece[p]] += result.source_digests[p];
    }
    result_base.sums.reserve(result.expected.size());
    for (const PieceDigest& e : result.expected) {
      if (e.destination >= destinations) continue;
      result_base.sums.push_back({e.destination, originals[e.destination][e.piece], e.digest});
    }
    done(std::move(result_base));
  };
  if (sources.source.empty()) {
    transport_->Submit(std::move(transfer), std::move(finish));
  } else {
    std::make_shared<Witnessing>(transport_, std::move(sources), std::move(transfer),
                                 std::move(finish))
        ->Start();
  }
  return absl::OkStatus();
}

// Only members' memory can be an engine's, so buckets in slots and in requests cost nothing here.
Executor::KeptPlaces* Executor::PlacesFor(const StartTransfer& start,
                                          const MemoryResolver& memory) {
  const CheckedBucket::Source source = start.content->bucket->source;
  const bool members =
      source == CheckedBucket::Source::kRegions || source == CheckedBucket::Source::kDevice;
  if (!members || CameOverTheWire(start) || start.index == nullptr) return nullptr;
  Sides sides = SidesOf(start.destinations, memory);
  for (KeptPlaces& kept : kept_places_) {
    if (kept.index.lock() == start.index && kept.destinations == start.destinations &&
        kept.sides == sides) {
      return &kept;
    }
  }
  std::vector<PlacedLayout> placed;
  for (size_t d = 0; d < start.index->destinations().size(); ++d) {
    const std::shared_ptr<const Layout>& layout = start.index->destinations()[d];
    if (layout != nullptr) placed.push_back(PlaceOf(start.destinations[d], layout, true, memory));
  }
  auto places = std::make_shared<const DestinationPlaces>(std::move(placed));
  std::erase_if(kept_places_, [](const KeptPlaces& kept) { return kept.index.expired(); });
  return &kept_places_.emplace_back(
      KeptPlaces{start.index, start.destinations, std::move(sides), places, {}});
}

Executor::Sides Executor::SidesOf(const std::vector<MemberId>& members,
                                  const MemoryResolver& memory) {
  Sides sides;
  for (const MemberId member : members) sides.push_back(memory.Flipped(member));
  return sides;
}

Executor::Sides Executor::SidesOf(const BoundProgram& bound, const MemoryResolver& memory) {
  Sides sides = SidesOf(bound.sources, memory);
  const Sides of_destinations = SidesOf(bound.destinations, memory);
  sides.insert(sides.end(), of_destinations.begin(), of_destinations.end());
  return sides;
}

void Executor::UpdateSums::Add(uint32_t destination, uint32_t piece, uint64_t digest) {
  if (by_piece.size() <= destination) by_piece.resize(destination + 1);
  std::vector<std::optional<uint64_t>>& of = by_piece[destination];
  if (of.size() <= piece) of.resize(piece + 1);
  of[piece] = of[piece].value_or(0) + digest;
}

void Executor::UpdateSums::Add(const Pieces& of, const std::vector<uint64_t>& shares) {
  for (size_t i = 0; i < shares.size(); ++i) Add(of[i].first, of[i].second, shares[i]);
}

void Executor::UpdateSums::AddUp() {
  if (pieces == nullptr) return;
  Add(*pieces, digests);
  pieces = nullptr;
  digests.clear();
}

// The same bytes at the same place are not looked at again.
void Executor::Keep(const Witnessed& witnessed) {
  for (KeptPlaces& kept : kept_places_) {
    if (kept.places != witnessed.places.lock()) continue;
    if (kept.witnessed.size() > kMaxWitnessed) kept.witnessed.clear();
    kept.witnessed.insert(witnessed.keys.begin(), witnessed.keys.end());
  }
}

void Executor::Finished(const Done& done) {
  if (done.status.ok() && !done.witnessed.keys.empty()) Keep(done.witnessed);
  const auto it = sums_.find(done.update);
  if (it == sums_.end()) return;
  it->second.AddUp();
  for (const Done::Sum& sum : done.sums) it->second.Add(sum.destination, sum.piece, sum.digest);
}

void Executor::Finished(Moved* moved) {
  if (moved->witnessed != nullptr && moved->done.status.ok()) {
    moved->done.status = Witness(*moved);
    moved->witnessed = nullptr;
  }
  const auto it = sums_.find(moved->done.update);
  if (it == sums_.end() || moved->pieces == nullptr) return;
  UpdateSums& sums = it->second;
  if (sums.pieces == nullptr && sums.by_piece.empty()) {
    sums.pieces = std::move(moved->pieces);
    sums.digests = std::move(moved->digests);
    return;
  }
  sums.AddUp();
  sums.Add(*moved->pieces, moved->digests);
}

// The first run of a binding shows whether the destinations' memory is the sources' (P11).
absl::Status Executor::Witness(const Moved& moved) {
  const std::vector<uint64_t>& digests = moved.done.digests;
  const auto known = std::find_if(before_.begin(), before_.end(), [&moved](const Before& b) {
    return b.bound.lock() == moved.witnessed;
  });
  if (known == before_.end()) {
    before_.push_back({moved.witnessed, {moved.done.update}, digests});
    return absl::OkStatus();
  }
  known->updates.insert(moved.done.update);
  for (size_t i = 0; i < std::min(digests.size(), known->digests.size()); ++i) {
    if (digests[i] == known->digests[i]) continue;
    return Changed((*moved.names)[i]);
  }
  std::erase_if(unwitnessed_,
                [&moved](const BoundSides& run) { return run.bound.lock() == moved.witnessed; });
  return absl::OkStatus();
}

// ---- compiled refits ----

// A transport reports a step's digests for the same pieces in every run. Which pieces these are is
// worked out once, outside the node's mutex. Thread-safe.
class Executor::StepSums {
 public:
  // `originals`: as in BoundStep. A piece may be reported in several shares.
  void Fill(const std::vector<PieceDigest>& told,
            const std::vector<std::vector<uint32_t>>& originals, Moved* moved) {
    if (told.empty()) return;
    const std::shared_ptr<const Order> order = OrderOf(told, originals);
    moved->pieces = {order, &order->pieces};
    moved->digests.resize(order->pieces.size());
    for (size_t i = 0; i < told.size(); ++i) moved->digests[order->places[i]] += told[i].digest;
  }

 private:
  struct Order {
    std::vector<std::pair<uint32_t, uint32_t>> told;  // destination, bound piece
    Pieces pieces;
    std::vector<uint32_t> places;  // by reported piece: its index in `pieces`
    bool IsOf(const std::vector<PieceDigest>& other) const {
      return std::equal(told.begin(), told.end(), other.begin(), other.end(),
                        [](const auto& a, const PieceDigest& b) {
                          return a.first == b.destination && a.second == b.piece;
                        });
    }
  };

  std::shared_ptr<const Order> OrderOf(const std::vector<PieceDigest>& told,
                                       const std::vector<std::vector<uint32_t>>& originals) {
    {
      MutexLock lock(&mutex_);
      if (order_ != nullptr && order_->IsOf(told)) return order_;
    }
    auto made = std::make_shared<Order>();
    Pieces of_told;
    for (const PieceDigest& e : told) {
      made->told.emplace_back(e.destination, e.piece);
      of_told.emplace_back(e.destination, originals[e.destination][e.piece]);
    }
    made->pieces = of_told;
    std::sort(made->pieces.begin(), made->pieces.end());
    made->pieces.erase(std::unique(made->pieces.begin(), made->pieces.end()), made->pieces.end());
    for (const auto& piece : of_told) {
      const auto at = std::lower_bound(made->pieces.begin(), made->pieces.end(), piece);
      made->places.push_back(static_cast<uint32_t>(at - made->pieces.begin()));
    }
    MutexLock lock(&mutex_);
    order_ = made;
    return made;
  }

  Mutex mutex_;
  std::shared_ptr<const Order> order_ ABSL_GUARDED_BY(mutex_);  // order of the last run
};

class Executor::Moves {
 public:
  Moves(StartMoves of, Sides with) : start(std::move(of)), sides(std::move(with)) {}
  const StartMoves start;
  const Sides sides;
  ProgramMemory memory;
  std::shared_ptr<const Prepared> prepared;                  // null: not bound yet
  std::shared_ptr<const std::vector<HeldReplica>> replicas;  // compare; null: not found yet
  bool released = false;  // a member was released since Resolve; Bind does not touch it
};

bool Executor::IsBound(const Moves& moves) { return moves.prepared != nullptr; }

absl::StatusOr<std::shared_ptr<Executor::Moves>> Executor::Resolve(const StartMoves& start,
                                                                   const MemoryResolver& memory) {
  auto moves = std::make_shared<Moves>(start, SidesOf(*start.bound, memory));
  TakeKept(moves.get());
  if (IsBound(*moves)) return moves;
  REFITD_ASSIGN_OR_RETURN(moves->memory, ResolveMemory(start, memory, moves->replicas.get()));
  if (!Lists(checked_, *moves) && moves->memory.places.empty()) {
    moves->memory.places = PlacesOf(*start.bound, memory);
  }
  std::erase_if(binding_, [](const std::weak_ptr<Moves>& other) { return other.expired(); });
  binding_.push_back(moves);
  return moves;
}

absl::Status Executor::Bind(Transport* transport, Moves* moves) {
  if (moves->start.step == MoveStep::kCompare && moves->replicas == nullptr) {
    REFITD_ASSIGN_OR_RETURN(std::vector<HeldReplica> replicas, FindReplicas(*moves->start.bound));
    moves->replicas = std::make_shared<const std::vector<HeldReplica>>(std::move(replicas));
  }
  REFITD_ASSIGN_OR_RETURN(BoundStep bound,
                          BindStep(moves->start, moves->memory, moves->replicas.get()));
  auto prepared = std::make_shared<Prepared>();
  prepared->originals = std::move(bound.originals);
  prepared->sections = std::move(bound.sections);
  prepared->section_of_piece = std::move(bound.section_of_piece);
  prepared->sums = std::make_shared<StepSums>();
  const auto unknown = UnknownSources(moves->memory.places);
  prepared->unknown = std::any_of(unknown.begin(), unknown.end(),
                                  [](const auto& regions) { return !regions.empty(); });
  if (moves->start.step == MoveStep::kWitness) {
    std::vector<std::string> names;
    for (const BoundPiece& piece : bound.transfer.source) names.push_back(piece.name);
    prepared->names = std::make_shared<const std::vector<std::string>>(std::move(names));
  }
  REFITD_ASSIGN_OR_RETURN(prepared->transfer, transport->Prepare(std::move(bound.transfer)));
  moves->prepared = std::move(prepared);
  moves->memory = {};  // the transfer holds it
  return absl::OkStatus();
}

const StartMoves& Executor::StartOf(const Moves& moves) { return moves.start; }

bool Executor::Lists(const std::vector<BoundSides>& list, const Moves& moves) {
  return std::any_of(list.begin(), list.end(), [&moves](const BoundSides& run) {
    return run.bound.lock() == moves.start.bound && run.sides == moves.sides;
  });
}

bool Executor::Kept::Serves(const Moves& moves) const {
  const StartMoves& start = moves.start;
  if (start.step != step || bound.lock() != start.bound || sides != moves.sides) return false;
  return step == MoveStep::kCompare ? part == start.part
                                    : skip_destination == start.skip_destination;
}

void Executor::TakeKept(Moves* moves) const {
  const StartMoves& start = moves->start;
  for (const Kept& kept : kept_) {
    if (!kept.Serves(*moves)) continue;
    moves->prepared = kept.prepared;
    moves->memory = {};  // the transfer holds it
    return;
  }
  if (start.step != MoveStep::kCompare) return;
  for (const KeptReplicas& kept : kept_replicas_) {
    if (kept.bound.lock() == start.bound) moves->replicas = kept.replicas;
  }
}

void Executor::Keep(const Moves& moves) {
  const StartMoves& start = moves.start;
  DropUnused();
  const bool compare = start.step == MoveStep::kCompare;
  if (!compare && start.step != MoveStep::kLocal) return;
  if (compare && moves.replicas != nullptr) {
    const auto known = [&start](const KeptReplicas& kept) {
      return kept.bound.lock() == start.bound;
    };
    if (std::none_of(kept_replicas_.begin(), kept_replicas_.end(), known)) {
      kept_replicas_.push_back({start.bound, moves.replicas});
    }
  }
  if (moves.released) return;
  std::erase_if(kept_, [&](const Kept& kept) {
    return kept.step == start.step && kept.bound.lock() == start.bound &&
           kept.sides == moves.sides && (!compare || kept.part.Overlaps(start.part));
  });
  kept_.push_back(
      {start.bound, moves.sides, start.step, start.skip_destination, start.part, moves.prepared});
}

void Executor::Submit(const std::shared_ptr<Moves>& moves, std::function<void(Moved)> done) {
  const StartMoves& start = moves->start;
  const BoundProgram& bound = *start.bound;
  const bool writes = start.step == MoveStep::kLocal || start.step == MoveStep::kUnpack;
  const size_t destinations = writes ? bound.destinations.size() : 0;
  Keep(*moves);
  if (!Lists(checked_, *moves)) {
    checked_.push_back({start.bound, moves->sides});
    if (moves->prepared->unknown) unwitnessed_.push_back({start.bound, moves->sides});
  }
  if (writes && start.verification == Verification::kReadback) sums_.try_emplace(start.update);
  Moved base;
  base.done.update = start.update;
  base.done.step = start.step;
  base.done.round = start.round;
  base.done.witness = start.step == MoveStep::kCompare && Lists(unwitnessed_, *moves);
  if (start.step == MoveStep::kWitness) {
    base.witnessed = start.bound;
    base.names = moves->prepared->names;
  }
  std::string label = fmt::format("version {}", start.version);
  transport_->Replay(moves->prepared->transfer, start.verification, std::move(label),
                     [moved = std::move(base), prepared = moves->prepared, destinations,
                      sections = start.verification != Verification::kOff,
                      done = std::move(done)](TransferResult result) mutable {
                       MovesDone& to = moved.done;
                       to.status = std::move(result.status);
                       for (const int64_t bytes : result.bytes_written) moved.bytes += bytes;
                       if (destinations > 0) {
                         to.bytes_written = std::move(result.bytes_written);
                         to.failed_destination = result.failed_destination;
                       }
                       if (to.step == MoveStep::kCompare || to.step == MoveStep::kWitness) {
                         to.digests = std::move(result.source_digests);
                       } else if (sections) {
                         to.sections = prepared->sections;
                         // A run that failed may have no digests; forwarded pieces have no section.
                         const size_t digests = std::min(prepared->section_of_piece.size(),
                                                         result.source_digests.size());
                         for (size_t p = 0; p < digests; ++p) {
                           to.sections[prepared->section_of_piece[p]].digest +=
                               result.source_digests[p];
                         }
                       }
                       if (destinations > 0)
                         prepared->sums->Fill(result.expected, prepared->originals, &moved);
                       prepared.reset();  // P8: the receiver of `done` may close the memory
                       done(std::move(moved));
                     });
}

absl::Status Executor::Start(const StartMoves& start, const MemoryResolver& memory,
                             std::function<void(Moved)> done) {
  REFITD_ASSIGN_OR_RETURN(const std::shared_ptr<Moves> moves, Resolve(start, memory));
  if (!IsBound(*moves)) REFITD_RETURN_IF_ERROR(Bind(transport_, moves.get()));
  Submit(moves, std::move(done));
  return absl::OkStatus();
}

void Executor::DropUnused() {
  std::erase_if(kept_, [](const Kept& kept) { return kept.bound.expired(); });
  std::erase_if(kept_replicas_, [](const KeptReplicas& kept) { return kept.bound.expired(); });
  std::erase_if(kept_readbacks_, [](const KeptReadback& kept) { return kept.index.expired(); });
  std::erase_if(checked_, [](const BoundSides& run) { return run.bound.expired(); });
  std::erase_if(unwitnessed_, [](const BoundSides& run) { return run.bound.expired(); });
}

void Executor::Release(MemberId member) {
  const auto of = [member](const BoundProgram& bound) {
    const auto in = [member](const std::vector<MemberId>& members) {
      return std::find(members.begin(), members.end(), member) != members.end();
    };
    return in(bound.sources) || in(bound.destinations);
  };
  for (const std::weak_ptr<Moves>& binding : binding_) {
    if (const auto moves = binding.lock(); moves != nullptr && of(*moves->start.bound)) {
      moves->released = true;
    }
  }
  std::erase_if(kept_, [of](const Kept& kept) {
    const std::shared_ptr<const BoundProgram> bound = kept.bound.lock();
    return bound == nullptr || of(*bound);
  });
  std::erase_if(kept_readbacks_, [member](const KeptReadback& kept) {
    return std::find(kept.destinations.begin(), kept.destinations.end(), member) !=
           kept.destinations.end();
  });
}

void Executor::Forget(UpdateId update) {
  sums_.erase(update);
  std::erase_if(before_, [update](const Before& b) { return b.updates.contains(update); });
  DropUnused();
}

// A piece that was never written (engine-only tensors; the group checks coverage) has no expected
// digest and is not read.
Executor::Written Executor::WrittenIn(const StartVerify& verify) {
  const auto skipped = [&verify](uint32_t d) {
    return d >= verify.destinations.size() ||
           (d < verify.skip_destination.size() && verify.skip_destination[d]);
  };
  UpdateSums& sums = sums_[verify.update];
  const bool none_skipped =
      std::find(verify.skip_destination.begin(), verify.skip_destination.end(), true) ==
      verify.skip_destination.end();
  // If one step wrote everything, its list is ascending and the same object in every version.
  const bool of_step =
      sums.pieces != nullptr && (sums.pieces->empty() || !skipped(sums.pieces->back().first));
  if (of_step && none_skipped) return {sums.pieces, sums.digests};
  sums.AddUp();
  Pieces pieces;
  Written written;
  for (uint32_t d = 0; d < sums.by_piece.size(); ++d) {
    if (skipped(d)) continue;
    for (uint32_t p = 0; p < sums.by_piece[d].size(); ++p) {
      if (!sums.by_piece[d][p].has_value()) continue;
      pieces.emplace_back(d, p);
      written.expected.push_back(*sums.by_piece[d][p]);
    }
  }
  written.pieces = std::make_shared<const Pieces>(std::move(pieces));
  return written;
}

std::vector<uint64_t> Executor::FactorsOf(const StartVerify& verify, const Pieces& pieces) {
  const auto& layouts = verify.index->destinations();
  std::vector<size_t> count(layouts.size());
  for (const auto& [d, p] : pieces) ++count[d];
  std::vector<uint64_t> factors;
  factors.reserve(pieces.size());
  std::vector<uint64_t> of_tensor;  // of the destination that the last piece was of
  bool whole = false;               // whether all of that destination is there
  uint32_t last = UINT32_MAX;
  for (const auto& [d, p] : pieces) {
    const Layout& layout = *layouts[d];
    if (d != last) {
      of_tensor.assign(layout.tensors.size(), 0);
      whole = count[d] == FilledPieces(layout);
    }
    last = d;
    uint64_t& factor = of_tensor[layout.pieces[p].tensor];
    if (factor == 0 && whole) factor = ContentFactor(layout.tensors[layout.pieces[p].tensor]);
    factors.push_back(factor);
  }
  return factors;
}

std::vector<uint64_t> Executor::ContentOf(const KeptReadback& kept,
                                          const std::vector<uint64_t>& digests) {
  std::vector<uint64_t> sums(kept.destinations.size());
  std::vector<bool> whole(kept.destinations.size());
  for (size_t i = 0; i < digests.size(); ++i) {
    const uint32_t d = (*kept.pieces)[i].first;
    whole[d] = kept.factors[i] != 0;
    sums[d] += kept.factors[i] * digests[i];
  }
  for (size_t d = 0; d < sums.size(); ++d) sums[d] = whole[d] ? ContentDigest(sums[d]) : 0;
  return sums;
}

absl::StatusOr<const Executor::KeptReadback*> Executor::PrepareReadback(
    const StartVerify& verify, std::shared_ptr<const Pieces> pieces, const MemoryResolver& memory) {
  // Regions that a layout names live as long as the layout, and the layout as long as the index.
  Sides sides = SidesOf(verify.destinations, memory);
  for (const KeptReadback& kept : kept_readbacks_) {
    if (kept.index.lock() == verify.index && kept.destinations == verify.destinations &&
        kept.sides == sides && (kept.pieces == pieces || *kept.pieces == *pieces)) {
      return &kept;
    }
  }
  ReadbackJob job;
  job.pieces.reserve(pieces->size());
  std::map<std::pair<uint32_t, RegionId>, MemorySpan> spans;
  for (const auto& [d, p] : *pieces) {
    const Layout& layout = *verify.index->destinations()[d];
    const Piece& piece = layout.pieces[p];
    const TensorSpec& tensor = layout.tensors[piece.tensor];
    auto span = spans.find({d, piece.region});
    if (span == spans.end()) {
      REFITD_ASSIGN_OR_RETURN(MemorySpan region,
                              memory.Destination(verify.destinations[d], piece.region));
      job.keep_alive.push_back(region.keep_alive);
      span = spans.emplace(std::pair(d, piece.region), std::move(region)).first;
    }
    job.pieces.push_back({{tensor.dtype, tensor.shape, piece.box, piece.strides,
                           span->second.data + piece.byte_offset, tensor.name},
                          0,
                          d});
  }
  auto readback = transport_->Prepare(std::move(job));
  std::erase_if(kept_readbacks_, [&](const KeptReadback& kept) {
    return kept.index.lock() == verify.index && kept.sides == sides;
  });
  std::vector<uint64_t> factors = FactorsOf(verify, *pieces);
  kept_readbacks_.push_back({verify.index, verify.destinations, std::move(sides), std::move(pieces),
                             std::move(readback), std::move(factors)});
  return &kept_readbacks_.back();
}

absl::Status Executor::Start(const StartVerify& verify, const MemoryResolver& memory,
                             std::function<void(VerifyDone)> done) {
  DropUnused();
  Written written = WrittenIn(verify);
  REFITD_ASSIGN_OR_RETURN(const KeptReadback* const kept,
                          PrepareReadback(verify, std::move(written.pieces), memory));
  VerifyDone verified{verify.update, absl::OkStatus(), {}, ContentOf(*kept, written.expected)};
  transport_->Replay(
      kept->readback, std::move(written.expected),
      [result = std::move(verified), done = std::move(done)](ReadbackResult found) mutable {
        result.status = std::move(found.status);
        result.failed_destinations = std::move(found.failed_destinations);
        done(std::move(result));
      });
  return absl::OkStatus();
}

// The digests of whole source pieces, of a transfer that moves nothing.
absl::Status Executor::Digest(MemberId member, const std::shared_ptr<const Layout>& layout,
                              const MemoryResolver& memory,
                              std::function<void(absl::StatusOr<uint64_t>)> done) {
  Transfer transfer;
  transfer.want_source_digests = true;
  transfer.label = fmt::format("the memory of {}", memory.LabelOf(member));
  transfer.source.reserve(layout->pieces.size());
  std::map<RegionId, MemorySpan> spans;
  for (const Piece& piece : layout->pieces) {
    auto span = spans.find(piece.region);
    if (span == spans.end()) {
      REFITD_ASSIGN_OR_RETURN(MemorySpan region, memory.Region(member, piece.region));
      transfer.keep_alive.push_back(region.keep_alive);
      span = spans.emplace(piece.region, std::move(region)).first;
    }
    const TensorSpec& tensor = layout->tensors[piece.tensor];
    transfer.source.push_back({tensor.dtype, tensor.shape, piece.box, piece.strides,
                               span->second.data + piece.byte_offset, tensor.name});
  }
  transport_->Submit(std::move(transfer), [layout, done = std::move(done)](TransferResult result) {
    if (!result.status.ok()) return done(std::move(result.status));
    std::vector<uint64_t> of_tensor(layout->tensors.size());
    for (size_t p = 0; p < result.source_digests.size(); ++p) {
      of_tensor[layout->pieces[p].tensor] += result.source_digests[p];
    }
    uint64_t sum = 0;
    for (size_t t = 0; t < of_tensor.size(); ++t) {
      if (of_tensor[t] != 0) sum += ContentFactor(layout->tensors[t]) * of_tensor[t];
    }
    done(ContentDigest(sum));
  });
  return absl::OkStatus();
}

MovesDone Refused(const StartMoves& start, absl::Status why) {
  MovesDone refused;
  refused.update = start.update;
  refused.step = start.step;
  refused.round = start.round;
  refused.status = std::move(why);
  return refused;
}

RefitPlanned CompilePlan(const PlanRefit& a) {
  absl::StatusOr<std::shared_ptr<const RefitPlan>> plan =
      CompileRefit(a.sources, a.destinations, a.options);
  if (!plan.ok()) return {a.program, plan.status(), nullptr};
  return {a.program, absl::OkStatus(), *std::move(plan)};
}

ProgramBuilt CompilePart(BuildProgram a) {
  absl::StatusOr<NodeProgram> program =
      CompileNode(*a.plan, a.node, std::move(a.sources), std::move(a.destinations), a.options);
  if (!program.ok()) return {a.program, a.build, program.status(), nullptr};
  return {a.program, a.build, absl::OkStatus(),
          std::make_shared<const NodeProgram>(*std::move(program))};
}

}  // namespace refitd
