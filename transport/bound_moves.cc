#include "transport/bound_moves.h"

#include <algorithm>
#include <optional>
#include <string_view>

#include "transport/base/status.h"
#include "transport/plan/boxes.h"

namespace refitd {
namespace {

// The most comparisons of shards in one transfer (P10). Shards that are rows, columns or tiles of a
// matrix need few for each shard.
constexpr int64_t kMaxShardSteps = int64_t{1} << 28;

// INTERNAL unless the shards of all computed pieces are disjoint, of the rank of the tensor that
// they hold. RESOURCE_EXHAUSTED: there are too many comparisons.
absl::Status CheckShards(const std::vector<BoundPiece>& pieces) {
  int64_t steps = 0;
  for (const BoundPiece& piece : pieces) {
    if (piece.held == nullptr) continue;
    std::vector<const Box*> boxes;
    for (const BoundPiece& shard : piece.held->shards) {
      REFITD_RETURN_IF_ERROR(CheckRanks(shard));
      if (shard.shape.size() != piece.held->derivation->from.shape.size()) {
        return Error(absl::StatusCode::kInternal, "program: a shard of \"{}\" has {} dimensions",
                     piece.name, shard.shape.size());
      }
      boxes.push_back(&shard.box);
    }
    bool meet = false;
    const BoxIndex index(boxes);
    for (uint32_t i = 0; i < boxes.size() && !meet && steps <= kMaxShardSteps; ++i) {
      steps += index.Query(*boxes[i], [&](uint32_t other) {
        meet = meet || (other < i && Meet(*boxes[i], *boxes[other]));
      });
    }
    if (meet) {
      return Error(absl::StatusCode::kInternal, "program: shards of \"{}\" have common elements",
                   piece.name);
    }
  }
  if (steps <= kMaxShardSteps) return absl::OkStatus();
  return Error(absl::StatusCode::kResourceExhausted,
               "program: comparing the shards of computed pieces takes more than {} steps",
               kMaxShardSteps);
}

// INTERNAL unless the shards of a computed piece, which are disjoint, hold all of the blocks that
// `box` meets.
absl::Status CheckHeld(const BoundPiece& piece, const Box& box) {
  const Box blocks = ComputedFrom(*piece.held->derivation, box);
  int64_t held = 0;
  for (const BoundPiece& shard : piece.held->shards) {
    const std::optional<Box> common = Intersect(shard.box, blocks);
    if (common.has_value()) held += ElementCount(*common);
  }
  if (held == ElementCount(blocks)) return absl::OkStatus();
  return Error(absl::StatusCode::kInternal,
               "program: \"{}\" is computed from {} elements, of which its shards have {}",
               piece.name, ElementCount(blocks), held);
}

absl::Status CheckSide(const BoundPiece& piece, const Box& box, int64_t byte_offset,
                       std::string_view side) {
  REFITD_RETURN_IF_ERROR(CheckRanks(piece));
  if (box.offset.size() != piece.shape.size() || box.extent.size() != piece.shape.size() ||
      ElementCount(box) == 0 || !Contains(piece.box, box)) {
    return Error(absl::StatusCode::kInternal, "program: move of \"{}\" is not inside its {} piece",
                 piece.name, side);
  }
  const int64_t element_bytes = ElementBytes(piece.dtype);
  const int64_t end = ByteSpan(piece.box.extent, piece.strides, element_bytes);
  if (byte_offset < 0 || byte_offset + ByteSpan(box.extent, piece.strides, element_bytes) > end) {
    return Error(absl::StatusCode::kInternal,
                 "program: move of \"{}\" at byte {} leaves its {} piece of {} bytes", piece.name,
                 byte_offset, side, end);
  }
  if (piece.held == nullptr) return absl::OkStatus();
  // The box alone decides what a computed piece reads, so the program must say the same (P1).
  if (byte_offset != ByteDistance(box, piece.box, piece.strides, element_bytes)) {
    return Error(absl::StatusCode::kInternal,
                 "program: move of \"{}\" at byte {} is not where its {} piece has the box",
                 piece.name, byte_offset, side);
  }
  return CheckHeld(piece, box);
}

absl::StatusOr<BoundMove> BindMove(const Transfer& transfer, const CopyMove& move) {
  if (move.source != 0 || move.source_piece >= transfer.source.size() ||
      move.destination >= transfer.destinations.size() ||
      move.destination_piece >= transfer.destinations[move.destination].size()) {
    return Error(absl::StatusCode::kInternal,
                 "program: move from piece {} of source {} to piece {} of destination {}: no such",
                 move.source_piece, move.source, move.destination_piece, move.destination);
  }
  const BoundPiece& source = transfer.source[move.source_piece];
  const BoundPiece& destination = transfer.destinations[move.destination][move.destination_piece];
  REFITD_RETURN_IF_ERROR(CheckSide(source, move.box, move.source_byte_offset, "source"));
  REFITD_RETURN_IF_ERROR(
      CheckSide(destination, move.box, move.destination_byte_offset, "destination"));
  if (source.dtype != destination.dtype || source.shape != destination.shape) {
    return Error(absl::StatusCode::kInternal, "program: \"{}\" is {} at the source, {} at \"{}\"",
                 source.name, ToString(source.dtype, source.shape),
                 ToString(destination.dtype, destination.shape), destination.name);
  }
  return BoundMove{.source = &source,
                   .destination = &destination,
                   .box = &move.box,
                   .from = move.source_byte_offset,
                   .to = move.destination_byte_offset,
                   .destination_index = move.destination,
                   .destination_piece = move.destination_piece};
}

// Gives each destination piece that is written its index in the sums.
void NumberSums(const Transfer& transfer, BoundMoves* bound) {
  std::vector<std::vector<size_t>> numbers;  // 0: not written; else its index plus 1
  numbers.reserve(transfer.destinations.size());
  for (const auto& pieces : transfer.destinations) numbers.emplace_back(pieces.size());
  for (const BoundMove& move : bound->moves) {
    numbers[move.destination_index][move.destination_piece] = 1;
  }
  for (uint32_t d = 0; d < numbers.size(); ++d) {
    for (uint32_t piece = 0; piece < numbers[d].size(); ++piece) {
      if (numbers[d][piece] == 0) continue;
      bound->sums.push_back({.destination = d, .piece = piece});
      numbers[d][piece] = bound->sums.size();
    }
  }
  for (BoundMove& move : bound->moves) {
    move.sum = numbers[move.destination_index][move.destination_piece] - 1;
  }
}

}  // namespace

int64_t ByteDistance(const Box& box, const Box& from, const Dims& strides, int64_t element_bytes) {
  return ElementDistance(box.offset, from.offset, strides) * element_bytes;
}

int64_t ByteSpan(const Dims& extent, const Dims& strides, int64_t element_bytes) {
  int64_t last = 0;
  for (size_t d = 0; d < strides.size(); ++d) last += (extent[d] - 1) * strides[d];
  return (last + 1) * element_bytes;
}

absl::Status CheckRanks(const BoundPiece& piece) {
  const size_t rank = piece.shape.size();
  if (rank <= kMaxDims && piece.box.offset.size() == rank && piece.box.extent.size() == rank &&
      piece.strides.size() == rank) {
    return absl::OkStatus();
  }
  return Error(absl::StatusCode::kInternal, "piece of \"{}\": shape, box and strides disagree",
               piece.name);
}

absl::StatusOr<BoundMoves> BindMoves(const Transfer& transfer) {
  BoundMoves bound;
  bound.bytes.resize(transfer.destinations.size());
  bound.moves.reserve(transfer.plan.moves.size());
  REFITD_RETURN_IF_ERROR(CheckShards(transfer.source));
  for (const CopyMove& copy : transfer.plan.moves) {
    REFITD_ASSIGN_OR_RETURN(const BoundMove move, BindMove(transfer, copy));
    bound.bytes[move.destination_index] +=
        ElementCount(*move.box) * ElementBytes(move.source->dtype);
    bound.moves.push_back(move);
  }
  if (transfer.want_source_digests) {
    for (const BoundPiece& piece : transfer.source) {
      REFITD_RETURN_IF_ERROR(CheckRanks(piece));
      if (piece.held != nullptr && WantsDigest(transfer, piece) && ElementCount(piece.box) > 0) {
        REFITD_RETURN_IF_ERROR(CheckHeld(piece, piece.box));
      }
    }
  }
  const auto by_source = [](const BoundMove& a, const BoundMove& b) { return a.source < b.source; };
  // Most programs are in this order already.
  if (!std::is_sorted(bound.moves.begin(), bound.moves.end(), by_source)) {
    std::stable_sort(bound.moves.begin(), bound.moves.end(), by_source);
  }
  NumberSums(transfer, &bound);
  return bound;
}

ReadbackResult CompareReadback(const ReadbackJob& job, const std::vector<uint64_t>& expected,
                               const std::vector<uint64_t>& found) {
  ReadbackResult result;
  std::vector<uint32_t>& failed = result.failed_destinations;
  for (size_t i = 0; i < job.pieces.size(); ++i) {
    if (found[i] == expected[i]) continue;
    const ReadbackPiece& piece = job.pieces[i];
    failed.push_back(piece.destination);
    if (!result.status.ok()) continue;
    result.status =
        Error(absl::StatusCode::kDataLoss,
              "verification of \"{}\" at destination {} failed: digest of the source is "
              "{:016x}, read back {:016x}",
              piece.piece.name, piece.destination, expected[i], found[i]);
  }
  std::sort(failed.begin(), failed.end());
  failed.erase(std::unique(failed.begin(), failed.end()), failed.end());
  return result;
}

}  // namespace refitd
