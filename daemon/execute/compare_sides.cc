#include "daemon/execute/compare_sides.h"

#include <algorithm>
#include <limits>
#include <map>
#include <memory>
#include <utility>

#include "transport/base/errors.h"
#include "transport/base/failure.h"
#include "transport/base/status.h"

namespace refitd {
namespace {

constexpr int64_t kChunkBytes = 64 << 10;  // whose digests are compared at a time

// A dimension over which a piece's runs repeat.
struct Repeat {
  int64_t count = 0;
  int64_t step = 0;  // bytes
};

// A piece as runs of bytes: the dimensions that are dense in memory, in whatever order, are one
// run, which the others repeat.
struct Runs {
  int64_t bytes = 0;  // of a run
  std::vector<Repeat> repeats;
  int64_t count = 1;
};

Runs RunsOf(const Piece& piece, int64_t element_bytes) {
  std::vector<Repeat> dims;
  for (size_t d = 0; d < piece.strides.size(); ++d) {
    const int64_t extent = piece.box.extent[d];
    if (extent > 1) dims.push_back({extent, piece.strides[d] * element_bytes});
  }
  std::sort(dims.begin(), dims.end(),
            [](const Repeat& a, const Repeat& b) { return a.step < b.step; });
  Runs runs{.bytes = element_bytes, .repeats = {}};
  for (const Repeat& dim : dims) {
    if (runs.repeats.empty() && dim.step == runs.bytes) {
      runs.bytes *= dim.count;
    } else {
      runs.repeats.push_back(dim);
      runs.count =
          dim.count > kMaxNamedRuns / runs.count ? kMaxNamedRuns + 1 : runs.count * dim.count;
    }
  }
  return runs;
}

void AddRuns(const Runs& runs, size_t repeat, int64_t at, std::vector<ByteRange>* named) {
  if (repeat == runs.repeats.size()) {
    named->push_back({at, at + runs.bytes});
    return;
  }
  for (int64_t i = 0; i < runs.repeats[repeat].count; ++i) {
    AddRuns(runs, repeat + 1, at + i * runs.repeats[repeat].step, named);
  }
}

std::vector<ByteRange> Complement(std::vector<ByteRange> named, int64_t bytes) {
  std::sort(named.begin(), named.end(),
            [](const ByteRange& a, const ByteRange& b) { return a.begin < b.begin; });
  std::vector<ByteRange> unnamed;
  int64_t at = 0;
  for (const ByteRange& range : named) {
    if (range.begin > at) unnamed.push_back({at, range.begin});
    at = std::max(at, range.end);
  }
  if (at < bytes) unnamed.push_back({at, bytes});
  return unnamed;
}

// A chunk of bytes lies in both sides of one pair (an index) at the same range.
struct Chunk {
  size_t sides = 0;
  ByteRange range;
};

std::vector<Chunk> ChunksOf(const std::vector<ComparedSides>& sides) {
  std::vector<Chunk> chunks;
  for (size_t s = 0; s < sides.size(); ++s) {
    for (const ByteRange& range : sides[s].ranges) {
      for (int64_t at = range.begin; at < range.end; at += kChunkBytes) {
        chunks.push_back({s, {at, std::min(at + kChunkBytes, range.end)}});
      }
    }
  }
  return chunks;
}

// Digests of 8 bytes at a time are faster than of one.
BoundPiece Bytes(const MemorySpan& memory, const ByteRange& range) {
  constexpr int64_t kWide = 8;
  const int64_t bytes = range.end - range.begin;
  const bool wide = bytes % kWide == 0 && range.begin % kWide == 0;
  const Dims shape = {wide ? bytes / kWide : bytes};
  return {wide ? DType::kInt64 : DType::kUint8,
          shape,
          WholeBox(shape),
          {1},
          memory.data + range.begin,
          "unnamed bytes"};
}

absl::Status Differ(const ComparedSides& sides, const ByteRange& range, const std::string& label) {
  return AboutField(
      Error(absl::StatusCode::kFailedPrecondition,
            "layout.backs: region {} and its back {} of {} differ within bytes {} to {}, where no "
            "box of a tensor lies",
            sides.pair.region, sides.pair.back, label, range.begin, range.end),
      "layout.backs");
}

}  // namespace

UnnamedBytes UnnamedIn(const Layout& layout,
                       const std::function<std::optional<int64_t>(RegionId)>& region_bytes) {
  if (layout.backs.empty()) return nullptr;
  std::map<RegionId, std::vector<ByteRange>> named;
  int64_t left = kMaxNamedRuns;
  for (const Piece& piece : layout.pieces) {
    if (ElementCount(piece.box) == 0) continue;
    const DType dtype = layout.tensors[piece.tensor].dtype;
    std::vector<ByteRange>* const ranges = &named[piece.region];
    const Runs runs = RunsOf(piece, ElementBytes(dtype));
    if (runs.count <= left) {
      left -= runs.count;
      AddRuns(runs, 0, piece.byte_offset, ranges);
    } else {
      ranges->push_back(
          {piece.byte_offset, piece.byte_offset + SpanBytes(piece, dtype).value_or(0)});
    }
  }
  auto unnamed = std::make_shared<std::vector<std::vector<ByteRange>>>();
  unnamed->reserve(layout.backs.size());
  for (const RegionBack& pair : layout.backs) {
    unnamed->push_back(
        Complement(std::move(named[pair.region]), region_bytes(pair.region).value_or(0)));
  }
  return unnamed;
}

int64_t BytesOf(const UnnamedBytes& unnamed) {
  int64_t ranges = 0;
  if (unnamed == nullptr) return 0;
  for (const std::vector<ByteRange>& of : *unnamed) ranges += static_cast<int64_t>(of.size());
  return ranges * static_cast<int64_t>(sizeof(ByteRange));
}

void CompareSides(Transport* transport, std::vector<ComparedSides> sides, const std::string& label,
                  std::function<void(absl::Status)> done) {
  const auto chunks = std::make_shared<const std::vector<Chunk>>(ChunksOf(sides));
  if (chunks->empty()) return done(absl::OkStatus());
  Transfer transfer;
  transfer.want_source_digests = true;
  transfer.label = label;
  for (const Chunk& chunk : *chunks) {
    transfer.source.push_back(Bytes(sides[chunk.sides].front, chunk.range));
    transfer.source.push_back(Bytes(sides[chunk.sides].back, chunk.range));
  }
  for (const ComparedSides& each : sides) {
    transfer.keep_alive.push_back(each.front.keep_alive);
    transfer.keep_alive.push_back(each.back.keep_alive);
  }
  // P8: the memory is held by the job alone.
  for (ComparedSides& each : sides) each.front = each.back = {};
  transport->Submit(std::move(transfer), [sides = std::move(sides), chunks, label,
                                          done = std::move(done)](const TransferResult& result) {
    if (!result.status.ok()) return done(result.status);
    for (size_t c = 0; c < chunks->size(); ++c) {
      if (result.source_digests[2 * c] == result.source_digests[2 * c + 1]) continue;
      const Chunk& chunk = (*chunks)[c];
      return done(Differ(sides[chunk.sides], chunk.range, label));
    }
    done(absl::OkStatus());
  });
}

}  // namespace refitd
