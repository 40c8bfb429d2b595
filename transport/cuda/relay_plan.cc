#include "transport/cuda/relay_plan.h"

#include <algorithm>
#include <map>
#include <utility>

#include "transport/base/status.h"

namespace refitd {
namespace {

// Whether the elements follow one another in row-major order without gaps. A stride matters only if
// the box has more than one index in that dimension.
bool IsDense(const BoundPiece& piece) {
  int64_t expected = 1;
  for (size_t d = piece.box.extent.size(); d-- > 0;) {
    if (piece.box.extent[d] == 1) continue;
    if (piece.strides[d] != expected) return false;
    expected *= piece.box.extent[d];
  }
  return true;
}

absl::StatusOr<std::vector<RelayRun>> Sorted(const std::vector<BoundPiece>& source,
                                             const std::vector<int64_t>& byte_offsets,
                                             int64_t slot_bytes) {
  REFITD_CHECK(source.size() == byte_offsets.size());
  std::vector<RelayRun> runs;
  runs.reserve(source.size());
  for (size_t i = 0; i < source.size(); ++i) {
    const int64_t bytes = ElementCount(source[i].box) * ElementBytes(source[i].dtype);
    if (bytes == 0) continue;
    if (!IsDense(source[i])) {
      return Error(absl::StatusCode::kInternal, "piece of \"{}\" is not row-major", source[i].name);
    }
    if (byte_offsets[i] < 0 || bytes > slot_bytes - byte_offsets[i]) {
      return Error(absl::StatusCode::kInternal,
                   "piece of \"{}\": {} bytes at {} leave the slot of {}", source[i].name, bytes,
                   byte_offsets[i], slot_bytes);
    }
    runs.push_back({source[i].data, byte_offsets[i], bytes});
  }
  std::sort(runs.begin(), runs.end(),
            [](const RelayRun& a, const RelayRun& b) { return a.offset < b.offset; });
  return runs;
}

// Joins runs that are adjacent in the source and in the slot.
absl::StatusOr<std::vector<RelayRun>> Joined(const std::vector<RelayRun>& runs) {
  std::vector<RelayRun> joined;
  for (const RelayRun& run : runs) {
    if (joined.empty()) {
      joined.push_back(run);
      continue;
    }
    RelayRun& last = joined.back();
    const int64_t end = last.offset + last.bytes;
    if (run.offset < end) {
      return Error(absl::StatusCode::kInternal, "two pieces overlap at byte {} of a slot",
                   run.offset);
    }
    if (run.offset == end && run.from == last.from + last.bytes) {
      last.bytes += run.bytes;
    } else {
      joined.push_back(run);
    }
  }
  return joined;
}

}  // namespace

absl::StatusOr<std::vector<RelayRun>> RunsOf(const std::vector<BoundPiece>& source,
                                             const std::vector<int64_t>& byte_offsets,
                                             int64_t slot_bytes) {
  REFITD_ASSIGN_OR_RETURN(const std::vector<RelayRun> runs,
                          Sorted(source, byte_offsets, slot_bytes));
  return Joined(runs);
}

std::vector<RelayChunk> CutIntoChunks(const std::vector<RelayRun>& runs, int64_t chunk_bytes) {
  REFITD_CHECK(chunk_bytes > 0);
  std::vector<RelayChunk> chunks;
  int64_t limit = 0;  // where the last chunk must end
  for (RelayRun run : runs) {
    while (run.bytes > 0) {
      if (chunks.empty() || run.offset >= limit) {
        limit = (run.offset / chunk_bytes + 1) * chunk_bytes;
        chunks.push_back({.runs = {}, .begin = run.offset, .end = run.offset});
      }
      RelayRun head = run;
      head.bytes = std::min(run.bytes, limit - run.offset);
      chunks.back().runs.push_back(head);
      chunks.back().end = head.offset + head.bytes;
      run.from += head.bytes;
      run.offset += head.bytes;
      run.bytes -= head.bytes;
    }
  }
  return chunks;
}

std::vector<RelayRun> RunsWithin(const std::vector<RelayRun>& runs, int64_t begin, int64_t end) {
  std::vector<RelayRun> within;
  auto run = std::partition_point(
      runs.begin(), runs.end(), [begin](const RelayRun& r) { return r.offset + r.bytes <= begin; });
  for (; run != runs.end() && run->offset < end; ++run) {
    const int64_t first = std::max(run->offset, begin);
    within.push_back({run->from + (first - run->offset), first,
                      std::min(run->offset + run->bytes, end) - first});
  }
  return within;
}

Transfer FromSlots(Transfer transfer, const std::function<int(const char*)>& device_of) {
  const Broadcast broadcast = *std::exchange(transfer.broadcast, std::nullopt);
  const size_t pieces = transfer.source.size();
  std::map<int, size_t> slot_on;  // by device
  // Piece p in slot s becomes source piece pieces * (1 + s) + p, after the source's own pieces.
  transfer.source.reserve(pieces * (1 + broadcast.slots.size()));
  for (size_t s = 0; s < broadcast.slots.size(); ++s) {
    slot_on.emplace(device_of(broadcast.slots[s].data), s);
    for (size_t p = 0; p < pieces; ++p) {
      BoundPiece piece = transfer.source[p];
      piece.data = broadcast.slots[s].data + broadcast.byte_offsets[p];
      transfer.source.push_back(std::move(piece));
    }
  }
  for (CopyMove& move : transfer.plan.moves) {
    const BoundPiece& to = transfer.destinations[move.destination][move.destination_piece];
    const auto slot = slot_on.find(device_of(to.data));
    if (slot == slot_on.end()) continue;
    move.source_piece += static_cast<uint32_t>(pieces * (1 + slot->second));
  }
  std::stable_sort(
      transfer.plan.moves.begin(), transfer.plan.moves.end(),
      [](const CopyMove& a, const CopyMove& b) { return a.source_piece < b.source_piece; });
  transfer.want_source_digests =
      transfer.want_source_digests || transfer.verification != Verification::kOff;
  return transfer;
}

void CompareSlots(const Transfer& from_slots, size_t slots, bool wanted, TransferResult* result) {
  std::vector<uint64_t>& digests = result->source_digests;
  const size_t pieces = from_slots.source.size() / (1 + slots);
  const bool verified = from_slots.verification != Verification::kOff;
  if (verified && result->status.ok()) {
    for (size_t at = pieces; at < digests.size() && result->status.ok(); ++at) {
      const uint64_t expected = digests[at % pieces];
      if (digests[at] == expected) continue;
      const BoundPiece& piece = from_slots.source[at];
      result->status =
          Error(absl::StatusCode::kDataLoss,
                "{}: verification of \"{}\" in slot {} of the broadcast failed in the piece from "
                "element {}: digest of the source is {:016x}, of the slot {:016x}",
                from_slots.label, piece.name, at / pieces - 1, FirstIndex(piece.box, piece.shape),
                expected, digests[at]);
    }
  }
  digests.resize(wanted ? std::min(digests.size(), pieces) : 0);
}

}  // namespace refitd
