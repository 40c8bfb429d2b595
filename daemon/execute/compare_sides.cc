#include "daemon/execute/compare_sides.h"

#include <sys/stat.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
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
  std::vector<ByteRange> outside;
  int64_t at = 0;
  for (const ByteRange& range : named) {
    if (range.begin > at) outside.push_back({at, range.begin});
    at = std::max(at, range.end);
  }
  if (at < bytes) outside.push_back({at, bytes});
  return outside;
}

// A stretch of a side is all data, or all hole of the side's memfd; it ends before byte `end`.
struct Stretch {
  bool hole = false;
  int64_t end = 0;
};

// How far data reaches is not asked of the kernel, which would look at all of its pages.
Stretch NextOf(const UniqueFd* memfd, const ByteRange& range) {
  if (memfd == nullptr) return {.hole = false, .end = range.end};
  const int64_t data = lseek(memfd->get(), range.begin, SEEK_DATA);
  if (data < 0 && errno == ENXIO) return {.hole = true, .end = range.end};
  if (data > range.begin) return {.hole = true, .end = std::min(data, range.end)};
  const int64_t page = sysconf(_SC_PAGESIZE);
  return {.hole = false, .end = std::min((range.begin / page + 1) * page, range.end)};
}

// A chunk lies in both sides of one pair (an index) at the same range. At most one side has a hole
// there, and it has nothing else.
struct Chunk {
  size_t sides = 0;
  ByteRange range;
  bool front_hole = false;
  bool back_hole = false;
};

bool HasHoles(const UniqueFd& memfd) {
  struct stat file {};
  constexpr int64_t kStatBlockBytes = 512;
  return fstat(memfd.get(), &file) != 0 || file.st_blocks * kStatBlockBytes < file.st_size;
}

// Goes through all that is to be compared, once.
class Chunks {
 public:
  explicit Chunks(const std::vector<ComparedSides>* sides) : sides_(*sides) {}

  // The next chunks, at most kComparedChunks; none: all have come.
  std::vector<Chunk> Next() {
    std::vector<Chunk> chunks;
    files_of_ = sides_.size();  // may have got holes since the last call
    for (; side_ < sides_.size(); ++side_, range_ = 0) {
      const std::vector<ByteRange>& ranges = sides_[side_].ranges;
      for (; range_ < ranges.size(); ++range_, at_ = 0) {
        at_ = std::max(at_, ranges[range_].begin);
        while (at_ < ranges[range_].end) {
          if (chunks.size() == kComparedChunks) return chunks;
          Add({at_, ranges[range_].end}, &chunks);
        }
      }
    }
    return chunks;
  }

 private:
  // Adds a chunk of where `range` begins, unless both sides have a hole there, and goes on behind
  // it.
  void Add(ByteRange range, std::vector<Chunk>* chunks) {
    LookAtFiles();
    const Stretch front = NextOf(front_file_, range);
    const Stretch back = NextOf(back_file_, range);
    at_ = std::min(front.end, back.end);
    if (front.hole && back.hole) return;
    at_ = range.end = std::min(at_, range.begin + kChunkBytes);
    // Pages in a row are one chunk, as far as it reaches.
    const auto continues = [&](const Chunk& last) {
      return last.sides == side_ && last.range.end == range.begin &&
             last.front_hole == front.hole && last.back_hole == back.hole &&
             range.end - last.range.begin <= kChunkBytes;
    };
    if (!chunks->empty() && continues(chunks->back())) {
      chunks->back().range.end = range.end;
    } else {
      chunks->push_back({side_, range, front.hole, back.hole});
    }
  }
  void LookAtFiles() {
    if (std::exchange(files_of_, side_) == side_) return;
    const auto sparse = [](const std::shared_ptr<const UniqueFd>& memfd) {
      return memfd != nullptr && HasHoles(*memfd) ? memfd.get() : nullptr;
    };
    front_file_ = sparse(sides_[side_].front_file);
    back_file_ = sparse(sides_[side_].back_file);
  }

  const std::vector<ComparedSides>& sides_;
  size_t side_ = 0;
  size_t range_ = 0;
  int64_t at_ = 0;
  size_t files_of_ = 0;  // whose files these are; null: without holes
  const UniqueFd* front_file_ = nullptr;
  const UniqueFd* back_file_ = nullptr;
};

// A hole reads as zeros: data is compared with these instead of with the hole's pages.
char* Zeros() {
  static char zeros[kChunkBytes] = {};
  return zeros;
}

// Digests of 8 bytes at a time are faster than of one.
BoundPiece Bytes(const MemorySpan& memory, const ByteRange& range, bool hole) {
  constexpr int64_t kWide = 8;
  const int64_t bytes = range.end - range.begin;
  const bool wide = bytes % kWide == 0 && range.begin % kWide == 0;
  const Dims shape = {wide ? bytes / kWide : bytes};
  return {wide ? DType::kInt64 : DType::kUint8,       shape,          WholeBox(shape), {1},
          hole ? Zeros() : memory.data + range.begin, "outside bytes"};
}

absl::Status Differ(const ComparedSides& sides, const ByteRange& range, const std::string& label) {
  return AboutField(
      Error(absl::StatusCode::kFailedPrecondition,
            "layout.backs: region {} and its back {} of {} differ within bytes {} to {}, where no "
            "box of a tensor lies",
            sides.pair.region, sides.pair.back, label, range.begin, range.end),
      "layout.backs");
}

// Compares chunks until all are compared, or one differs.
class Comparison : public std::enable_shared_from_this<Comparison> {
 public:
  Comparison(Transport* transport, std::vector<ComparedSides> sides, std::string label,
             std::function<void(absl::Status)> done)
      : transport_(*transport),
        sides_(std::move(sides)),
        label_(std::move(label)),
        done_(std::move(done)) {}

  void GoOn() {
    std::vector<Chunk> chunks = chunks_.Next();
    if (chunks.empty()) return End(absl::OkStatus());
    Transfer transfer;
    transfer.want_source_digests = true;
    transfer.label = label_;
    for (const Chunk& chunk : chunks) {
      const ComparedSides& sides = sides_[chunk.sides];
      transfer.source.push_back(Bytes(sides.front, chunk.range, chunk.front_hole));
      transfer.source.push_back(Bytes(sides.back, chunk.range, chunk.back_hole));
    }
    for (const ComparedSides& each : sides_) {
      transfer.keep_alive.push_back(each.front.keep_alive);
      transfer.keep_alive.push_back(each.back.keep_alive);
    }
    transport_.Submit(std::move(transfer), [self = shared_from_this(), chunks = std::move(chunks)](
                                               const TransferResult& result) {
      if (!result.status.ok()) return self->End(result.status);
      for (size_t c = 0; c < chunks.size(); ++c) {
        if (result.source_digests[2 * c] == result.source_digests[2 * c + 1]) continue;
        const Chunk& chunk = chunks[c];
        return self->End(Differ(self->sides_[chunk.sides], chunk.range, self->label_));
      }
      self->GoOn();
    });
  }

 private:
  // Drops the mappings before done_: whoever it tells may close the memory at once (P8).
  void End(const absl::Status& status) {
    sides_.clear();
    done_(status);
  }

  Transport& transport_;
  std::vector<ComparedSides> sides_;
  const std::string label_;
  const std::function<void(absl::Status)> done_;
  Chunks chunks_{&sides_};
};

}  // namespace

OutsideBytes BytesOutside(const Layout& layout,
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
  auto outside = std::make_shared<std::vector<std::vector<ByteRange>>>();
  outside->reserve(layout.backs.size());
  for (const RegionBack& pair : layout.backs) {
    outside->push_back(
        Complement(std::move(named[pair.region]), region_bytes(pair.region).value_or(0)));
  }
  return outside;
}

int64_t BytesOf(const OutsideBytes& outside) {
  int64_t ranges = 0;
  if (outside == nullptr) return 0;
  for (const std::vector<ByteRange>& of : *outside) ranges += static_cast<int64_t>(of.size());
  return ranges * static_cast<int64_t>(sizeof(ByteRange));
}

void CompareSides(Transport* transport, std::vector<ComparedSides> sides, const std::string& label,
                  std::function<void(absl::Status)> done) {
  std::make_shared<Comparison>(transport, std::move(sides), label, std::move(done))->GoOn();
}

}  // namespace refitd
