#include "transport/plan/layout.h"

#include <algorithm>
#include <iterator>
#include <limits>
#include <set>
#include <tuple>
#include <utility>

#include "absl/container/flat_hash_map.h"
#include "absl/container/flat_hash_set.h"
#include "absl/types/span.h"
#include "transport/base/errors.h"
#include "transport/base/failure.h"
#include "transport/base/status.h"
#include "transport/base/utf8.h"
#include "transport/plan/derived.h"
#include "transport/plan/strided_bytes.h"

namespace refitd {
namespace {

// The limits of the work by which ValidateLayout decides whether pieces overlap: elementary steps
// over boxes of one layout; steps of arithmetic over interleaved storage; contiguous runs of
// storage that are listed if arithmetic takes longer. The first two take well under a second, the
// third takes 24 MiB. Layouts of real models need little of this: their boxes form grids, and their
// storage forms dense blocks, column slices, or alternating elements of a few pieces.
constexpr int64_t kMaxBoxSteps = int64_t{1} << 27;
constexpr int64_t kMaxOverlapSteps = int64_t{1} << 26;
constexpr int64_t kMaxOverlapRuns = int64_t{1} << 20;

// The most bytes of a source piece whose strides repeat memory (torch's expand). Without a limit a
// member could ask for endless work with little memory of its own (P10).
constexpr int64_t kMaxRepeatedBytes = int64_t{256} << 20;

// Below this many boxes all pairs are compared.
constexpr int64_t kPairwiseBoxes = 8;

struct DTypeRow {
  DType dtype;
  int64_t bytes;
  std::string_view name;
};

constexpr DTypeRow kDTypes[] = {
    {DType::kFloat64, 8, "float64"},
    {DType::kFloat32, 4, "float32"},
    {DType::kFloat16, 2, "float16"},
    {DType::kBFloat16, 2, "bfloat16"},
    {DType::kFloat8E4M3FN, 1, "float8_e4m3fn"},
    {DType::kFloat8E5M2, 1, "float8_e5m2"},
    {DType::kInt64, 8, "int64"},
    {DType::kInt32, 4, "int32"},
    {DType::kInt16, 2, "int16"},
    {DType::kInt8, 1, "int8"},
    {DType::kUint8, 1, "uint8"},
    {DType::kBool, 1, "bool"},
};

constexpr bool InOrder() {
  for (size_t i = 0; i < std::size(kDTypes); ++i) {
    if (static_cast<size_t>(kDTypes[i].dtype) != i + 1) return false;
  }
  return true;
}
static_assert(InOrder(), "kDTypes is indexed by value");

const DTypeRow& RowOf(DType dtype) {
  const auto index = static_cast<size_t>(dtype) - 1;
  REFITD_CHECK(index < std::size(kDTypes));
  return kDTypes[index];
}

// Writes dims as "[1, 2]", at most the first 2 * kMaxDims numbers, since untrusted ranks are
// printed too.
std::string ToString(const Dims& dims) {
  constexpr size_t kPrinted = 2 * kMaxDims;
  std::string text = "[";
  for (size_t i = 0; i < std::min(dims.size(), kPrinted); ++i) {
    fmt::format_to(std::back_inserter(text), "{}{}", i == 0 ? "" : ", ", dims[i]);
  }
  return text + (dims.size() > kPrinted ? ", ...]" : "]");
}

std::string ToString(const Box& box) {
  return fmt::format("offset {} extent {}", ToString(box.offset), ToString(box.extent));
}

// An untrusted name in a form that is safe for a message.
std::string Printable(std::string_view name) {
  constexpr size_t kPrinted = 64;
  std::string text;
  for (const char c : Shorten(name, kPrinted)) {
    const auto byte = static_cast<unsigned char>(c);
    if (byte >= 0x20 && byte < 0x7f) {
      text += c;
    } else {
      fmt::format_to(std::back_inserter(text), "\\x{:02x}", byte);
    }
  }
  return name.size() > kPrinted ? text + "..." : text;
}

// Returns what Utf8SequenceBytes returns for the text, but 0 for control characters.
size_t Utf8Length(std::string_view text) {
  const auto byte = [&](size_t i) { return static_cast<unsigned char>(text[i]); };
  const size_t length = Utf8SequenceBytes(text);
  const bool c0 = length == 1 && (byte(0) < 0x20 || byte(0) == 0x7f);
  const bool c1 = length == 2 && byte(0) == 0xc2 && byte(1) < 0xa0;
  return c0 || c1 ? 0 : length;
}

bool IsEmpty(const Box& box) {
  return std::any_of(box.extent.begin(), box.extent.end(), [](int64_t n) { return n == 0; });
}

bool Overlap(const Box& a, const Box& b) {
  for (size_t d = 0; d < a.extent.size(); ++d) {
    if (a.offset[d] >= b.offset[d] + b.extent[d]) return false;
    if (b.offset[d] >= a.offset[d] + a.extent[d]) return false;
  }
  return true;
}

// ---- digest ----

uint64_t Fnv1a(std::string_view text) {
  uint64_t hash = 0xcbf29ce484222325;
  for (const char c : text) {
    hash = (hash ^ static_cast<unsigned char>(c)) * 0x100000001b3;
  }
  return hash;
}

// ---- disjointness of boxes ----

// Finds two overlapping boxes in a set. It cuts the set wherever a plane separates it, and compares
// all pairs in the subsets that no plane separates; grids thus cost only a few sorts.
class BoxOverlap {
 public:
  explicit BoxOverlap(const std::vector<Piece>& pieces) : pieces_(pieces) {}

  // Returns the indices of two pieces that overlap. `group` has pieces of one tensor, none of them
  // empty, and is reordered. INVALID_ARGUMENT if this takes more than kMaxBoxSteps over all calls.
  absl::StatusOr<std::optional<std::pair<uint32_t, uint32_t>>> Find(absl::Span<uint32_t> group) {
    std::vector<absl::Span<uint32_t>> open = {group};
    while (!open.empty()) {
      const absl::Span<uint32_t> set = open.back();
      open.pop_back();
      if (set.size() > kPairwiseBoxes && Cut(set, &open)) {
        if (steps_ > kMaxBoxSteps) return TooMuch();
        continue;
      }
      for (size_t i = 0; i < set.size(); ++i) {
        for (size_t j = 0; j < i; ++j) {
          if (Overlap(pieces_[set[i]].box, pieces_[set[j]].box)) {
            return std::make_pair(std::min(set[i], set[j]), std::max(set[i], set[j]));
          }
        }
        steps_ += static_cast<int64_t>(i);
        if (steps_ > kMaxBoxSteps) return TooMuch();
      }
    }
    return std::nullopt;
  }

 private:
  static absl::Status TooMuch() {
    return Invalid(
        "its boxes are too irregular to be shown disjoint in {} steps: use fewer pieces, or pieces "
        "that planes separate",
        kMaxBoxSteps);
  }

  // Adds the parts of `set` to `open`, if planes across some dimension separate it into several
  // parts.
  bool Cut(absl::Span<uint32_t> set, std::vector<absl::Span<uint32_t>>* open) {
    const size_t rank = pieces_[set.front()].box.offset.size();
    for (size_t d = 0; d < rank; ++d) {
      steps_ += static_cast<int64_t>(set.size());
      std::sort(set.begin(), set.end(), [&](uint32_t a, uint32_t b) {
        return std::pair(pieces_[a].box.offset[d], a) < std::pair(pieces_[b].box.offset[d], b);
      });
      size_t begin = 0;
      int64_t end_of_part = 0;
      for (size_t i = 0; i < set.size(); ++i) {
        const Box& box = pieces_[set[i]].box;
        if (i > begin && box.offset[d] >= end_of_part) {
          open->push_back(set.subspan(begin, i - begin));
          begin = i;
        }
        end_of_part = std::max(end_of_part, box.offset[d] + box.extent[d]);
      }
      if (begin == 0) continue;
      open->push_back(set.subspan(begin));
      return true;
    }
    return false;
  }

  const std::vector<Piece>& pieces_;
  int64_t steps_ = 0;
};

// ---- disjointness of storage ----

// The place of a piece's elements, in bytes from the region's start.
struct Storage {
  uint32_t piece = 0;
  StridedBytes bytes;
};

// Makes the storage of a piece that is valid and not empty, and whose span is known not to
// overflow.
Storage MakeStorage(const Piece& piece, uint32_t index, int64_t element_bytes, int64_t span_bytes) {
  Storage storage;
  storage.piece = index;
  storage.bytes = MakeStridedBytes(piece.byte_offset, span_bytes, element_bytes, piece.box.extent,
                                   piece.strides);
  return storage;
}

using PiecePair = std::pair<uint32_t, uint32_t>;

// An interval of storage. Two pieces can share bytes only if their intervals meet.
struct Interval {
  int64_t begin = 0;
  int64_t end = 0;
  const Storage* storage = nullptr;
};

// Returns the columns in which storage lies, if all of it has the same outermost stride and lies in
// columns of that stride, as the slices of a fused matrix do. Storage in disjoint columns is
// disjoint, whatever its rows.
std::optional<std::vector<Interval>> Columns(absl::Span<const Storage> cluster) {
  const int64_t first = cluster.front().bytes.begin;
  std::vector<Interval> columns;
  columns.reserve(cluster.size());
  int64_t stride = 0;
  for (const Storage& storage : cluster) {
    if (storage.bytes.outer.empty()) return std::nullopt;
    const Axis& outermost = storage.bytes.outer.front();
    if (stride == 0) stride = outermost.stride;
    if (outermost.stride != stride) return std::nullopt;
    const int64_t begin = (storage.bytes.begin - first) % stride;
    const int64_t bytes = storage.bytes.end - storage.bytes.begin - stride * (outermost.count - 1);
    if (bytes > stride - begin) return std::nullopt;
    columns.push_back({begin, begin + bytes, &storage});
  }
  return columns;
}

std::vector<Interval> IntervalsOf(absl::Span<const Storage> cluster) {
  std::optional<std::vector<Interval>> columns = Columns(cluster);
  std::vector<Interval> intervals;
  if (columns.has_value()) {
    intervals = *std::move(columns);
  } else {
    for (const Storage& storage : cluster) {
      intervals.push_back({storage.bytes.begin, storage.bytes.end, &storage});
    }
  }
  std::sort(intervals.begin(), intervals.end(), [](const Interval& a, const Interval& b) {
    return std::pair(a.begin, a.storage->piece) < std::pair(b.begin, b.storage->piece);
  });
  return intervals;
}

struct Run {
  int64_t begin = 0;  // bytes
  int64_t end = 0;
  uint32_t piece = 0;
};

void AppendRuns(const Storage& storage, std::vector<Run>* runs) {
  const StridedBytes& bytes = storage.bytes;
  absl::InlinedVector<int64_t, 4> index(bytes.outer.size(), 0);
  int64_t at = bytes.begin;
  while (true) {
    runs->push_back({at, at + bytes.run, storage.piece});
    size_t axis = index.size();
    while (axis > 0) {
      const Axis& step = bytes.outer[axis - 1];
      at += step.stride;
      if (++index[axis - 1] < step.count) break;
      at -= step.stride * step.count;
      index[axis - 1] = 0;
      --axis;
    }
    if (axis == 0) return;
  }
}

// Returns two pieces of the cluster that share a byte (or the same piece twice, if the piece shares
// a byte with itself).
std::optional<PiecePair> SharedByRuns(absl::Span<const Storage> cluster) {
  std::vector<Run> runs;
  for (const Storage& storage : cluster) AppendRuns(storage, &runs);
  std::sort(runs.begin(), runs.end(), [](const Run& a, const Run& b) {
    return std::tie(a.begin, a.piece) < std::tie(b.begin, b.piece);
  });
  for (size_t i = 1; i < runs.size(); ++i) {
    if (runs[i].begin < runs[i - 1].end) return std::minmax(runs[i - 1].piece, runs[i].piece);
  }
  return std::nullopt;
}

class MemoryOverlap {
 public:
  explicit MemoryOverlap(const Layout& layout) : layout_(layout) {}

  absl::Status Check() {
    std::vector<Span> spans;
    spans.reserve(layout_.pieces.size());
    for (size_t i = 0; i < layout_.pieces.size(); ++i) {
      const Piece& piece = layout_.pieces[i];
      REFITD_ASSIGN_OR_RETURN(const int64_t bytes, SpanBytes(piece, DTypeOf(piece)));
      if (bytes == 0) continue;
      spans.push_back(
          {piece.region, piece.byte_offset, piece.byte_offset + bytes, static_cast<uint32_t>(i)});
    }
    std::sort(spans.begin(), spans.end(), [](const Span& a, const Span& b) {
      return std::tie(a.region, a.begin, a.piece) < std::tie(b.region, b.begin, b.piece);
    });
    for (size_t begin = 0, end = 0; begin < spans.size(); begin = end) {
      int64_t reach = 0;
      do {
        reach = std::max(reach, spans[end++].end);
      } while (end < spans.size() && spans[end].region == spans[begin].region &&
               spans[end].begin < reach);
      REFITD_RETURN_IF_ERROR(CheckCluster(absl::MakeSpan(spans).subspan(begin, end - begin)));
    }
    return absl::OkStatus();
  }

 private:
  struct Span {
    RegionId region;
    int64_t begin = 0;  // bytes
    int64_t end = 0;
    uint32_t piece = 0;
  };

  DType DTypeOf(const Piece& piece) const { return layout_.tensors[piece.tensor].dtype; }

  // Checks pieces whose spans overlap in a chain.
  absl::Status CheckCluster(absl::Span<const Span> spans) {
    std::vector<Storage> cluster;
    cluster.reserve(spans.size());
    for (const Span& span : spans) {
      const Piece& piece = layout_.pieces[span.piece];
      cluster.push_back(
          MakeStorage(piece, span.piece, ElementBytes(DTypeOf(piece)), span.end - span.begin));
      const StridedBytes& bytes = cluster.back().bytes;
      const bool repeats = !bytes.outer.empty() && bytes.outer.back().stride == 0;
      if (repeats) return Shared({span.piece, span.piece});
    }
    if (cluster.size() == 1 && cluster.front().bytes.outer.empty()) return absl::OkStatus();
    // Pieces are compared in pairs, unless there are so many pairs that listing the runs is less
    // work.
    const auto pieces = static_cast<int64_t>(cluster.size());
    const bool by_runs = pieces * (pieces - 1) / 2 > TotalRuns(cluster) && ChargeRuns(cluster);
    if (!by_runs) {
      REFITD_ASSIGN_OR_RETURN(const bool decided, CheckPairs(IntervalsOf(cluster)));
      if (decided) return absl::OkStatus();
      if (!ChargeRuns(cluster)) return TooManyRuns(cluster.front());
    }
    if (const auto pair = SharedByRuns(cluster)) return Shared(*pair);
    return absl::OkStatus();
  }

  static int64_t TotalRuns(absl::Span<const Storage> cluster) {
    int64_t runs = 0;
    for (const Storage& storage : cluster) {
      if (__builtin_add_overflow(runs, storage.bytes.runs(), &runs)) {
        return std::numeric_limits<int64_t>::max();
      }
    }
    return runs;
  }

  // Counts the runs of all these pieces towards the limit, so that they may be listed. False: they
  // are too many, and are not counted.
  bool ChargeRuns(absl::Span<const Storage> cluster) {
    const int64_t runs = TotalRuns(cluster);
    if (runs > kMaxOverlapRuns - runs_) return false;
    runs_ += runs;
    return true;
  }

  // Compares storage in pairs. True: no two pieces share bytes. False: that is not decided, since
  // it takes too many steps. An error: two pieces share bytes.
  absl::StatusOr<bool> CheckPairs(const std::vector<Interval>& intervals) {
    for (size_t i = 0; i < intervals.size(); ++i) {
      const Storage& a = *intervals[i].storage;
      const std::optional<bool> repeats = RepeatsBytes(a.bytes, kMaxOverlapSteps, &steps_);
      if (!repeats.has_value()) return false;
      if (*repeats) return Shared({a.piece, a.piece});
      for (size_t j = i + 1; j < intervals.size() && intervals[j].begin < intervals[i].end; ++j) {
        const Storage& b = *intervals[j].storage;
        const std::optional<bool> share = ShareBytes(a.bytes, b.bytes, kMaxOverlapSteps, &steps_);
        if (!share.has_value() || ++steps_ > kMaxOverlapSteps) return false;
        if (*share) return Shared({a.piece, b.piece});
      }
    }
    return true;
  }

  std::string Where(uint32_t index) const {
    const Piece& piece = layout_.pieces[index];
    return fmt::format("tensor {}: piece {} ({}, strides {}, region {}, byte_offset {})",
                       layout_.tensors[piece.tensor].name, index, ToString(piece.box),
                       ToString(piece.strides), piece.region, piece.byte_offset);
  }

  absl::Status InPiece(uint32_t index, absl::Status status) const {
    return AboutTensor(std::move(status), layout_.tensors[layout_.pieces[index].tensor].name);
  }

  absl::Status Shared(PiecePair pair) const {
    if (pair.first == pair.second) {
      return InPiece(pair.first, Invalid("{}: several elements share memory", Where(pair.first)));
    }
    const auto [first, second] = std::minmax(pair.first, pair.second);
    return InPiece(first, Invalid("{} shares memory with {}", Where(first), Where(second)));
  }

  absl::Status TooManyRuns(const Storage& storage) const {
    return Invalid(
        "{} interleaves with others in memory so irregularly that {} steps do not show it "
        "disjoint, "
        "in more than {} contiguous runs",
        Where(storage.piece), kMaxOverlapSteps, kMaxOverlapRuns);
  }

  const Layout& layout_;
  int64_t steps_ = 0;
  int64_t runs_ = 0;  // counted towards kMaxOverlapRuns
};

// ---- validation ----

absl::Status ValidatePiece(const TensorSpec& tensor, const Piece& piece,
                           const RegionBytes& region_bytes) {
  REFITD_RETURN_IF_ERROR(ValidateBox(piece.box, tensor.shape));
  if (piece.strides.size() != tensor.shape.size()) {
    return Invalid("strides {} have rank {}, the tensor has rank {}", ToString(piece.strides),
                   piece.strides.size(), tensor.shape.size());
  }
  for (const int64_t stride : piece.strides) {
    if (stride < 0) return Invalid("strides {} are negative", ToString(piece.strides));
  }
  const int64_t element_bytes = ElementBytes(tensor.dtype);
  if (piece.byte_offset < 0 || piece.byte_offset % element_bytes != 0) {
    return Invalid("byte_offset {} is not a multiple of {}, the size of {}", piece.byte_offset,
                   element_bytes, DTypeName(tensor.dtype));
  }
  REFITD_ASSIGN_OR_RETURN(const int64_t span, SpanBytes(piece, tensor.dtype));
  const std::optional<int64_t> bytes = region_bytes(piece.region);
  if (!bytes.has_value()) {
    return Error(absl::StatusCode::kNotFound, "region {} is not known", piece.region);
  }
  if (piece.byte_offset > *bytes || span > *bytes - piece.byte_offset) {
    return Invalid("byte_offset {} and {} bytes end outside region {} of {} bytes",
                   piece.byte_offset, span, piece.region, *bytes);
  }
  const int64_t all = ElementCount(piece.box) * element_bytes;
  if (all > span && all > kMaxRepeatedBytes) {
    return Invalid("strides {} repeat {} bytes of memory as {}, more than {}",
                   ToString(piece.strides), span, all, kMaxRepeatedBytes);
  }
  return absl::OkStatus();
}

absl::Status ValidateTensors(const std::vector<TensorSpec>& tensors) {
  absl::flat_hash_set<std::string_view> names;
  names.reserve(tensors.size());
  for (const TensorSpec& tensor : tensors) {
    REFITD_RETURN_IF_ERROR(ValidateTensor(tensor));
    if (tensor.derived != nullptr) REFITD_RETURN_IF_ERROR(ValidateDerived(tensor));
    if (!names.insert(tensor.name).second) {
      return AboutTensor(Invalid("tensor {}: declared twice", tensor.name), tensor.name);
    }
  }
  return absl::OkStatus();
}

// Whether two names may be one memory: versions bring both in one form. Derived tensors of two
// sources may not, since their values are not compared.
bool SameForm(const TensorSpec& a, const TensorSpec& b) {
  const TensorSpec renamed{b.name, a.dtype, a.shape, a.derived};
  return renamed == b;
}

absl::Status ValidateTies(const Layout& layout) {
  const size_t tensors = layout.tensors.size();
  std::vector<bool> tied(tensors);
  for (size_t i = 0; i < layout.ties.size(); ++i) {
    const Tie& tie = layout.ties[i];
    if (tie.tensor >= tensors || tie.same_as >= tensors) {
      return Invalid("tied_tensors[{}] is {} tied to {}, of {} tensors", i, tie.tensor, tie.same_as,
                     tensors);
    }
    if (i > 0 && tie.tensor <= layout.ties[i - 1].tensor) {
      return Invalid("tied_tensors[{}] is {}, which comes after {}: they must ascend", i,
                     tie.tensor, layout.ties[i - 1].tensor);
    }
    tied[tie.tensor] = true;
  }
  for (const Tie& tie : layout.ties) {
    const TensorSpec& tensor = layout.tensors[tie.tensor];
    const TensorSpec& kept = layout.tensors[tie.same_as];
    if (tied[tie.same_as]) {
      return Invalid("tensor {}: tied to tensor {}, which is tied itself", tensor.name, kept.name);
    }
    if (!SameForm(tensor, kept)) {
      return Invalid("tensor {}: {}, but tied to tensor {} of {}", tensor.name,
                     ToString(tensor.dtype, tensor.shape), kept.name,
                     ToString(kept.dtype, kept.shape));
    }
  }
  for (const Piece& piece : layout.pieces) {
    if (!tied[piece.tensor]) continue;
    return Invalid("tensor {}: is tied to another tensor, and has a piece of its own",
                   layout.tensors[piece.tensor].name);
  }
  return absl::OkStatus();
}

// By tensor: the indices of its pieces that are not empty.
std::vector<std::vector<uint32_t>> PiecesByTensor(const Layout& layout) {
  std::vector<std::vector<uint32_t>> pieces(layout.tensors.size());
  for (uint32_t p = 0; p < layout.pieces.size(); ++p) {
    if (!IsEmpty(layout.pieces[p].box)) pieces[layout.pieces[p].tensor].push_back(p);
  }
  return pieces;
}

// Whether the two tensors' pieces, in their order, are the same boxes at the same places.
bool SamePlaces(const Layout& layout, const std::vector<uint32_t>& a,
                const std::vector<uint32_t>& b) {
  return std::equal(a.begin(), a.end(), b.begin(), b.end(), [&layout](uint32_t i, uint32_t j) {
    const Piece& p = layout.pieces[i];
    const Piece& q = layout.pieces[j];
    return p.box == q.box && p.region == q.region && p.byte_offset == q.byte_offset &&
           p.strides == q.strides;
  });
}

using Place = std::pair<uint64_t, int64_t>;  // region, byte offset
Place PlaceOf(const Piece& piece) { return {piece.region.value(), piece.byte_offset}; }

bool AnyPlaceTwice(const Layout& layout) {
  absl::flat_hash_map<Place, uint32_t> tensor_at;
  tensor_at.reserve(layout.pieces.size());
  return std::any_of(layout.pieces.begin(), layout.pieces.end(), [&tensor_at](const Piece& piece) {
    if (IsEmpty(piece.box)) return false;
    return tensor_at.try_emplace(PlaceOf(piece), piece.tensor).first->second != piece.tensor;
  });
}

absl::Status ValidateDisjointBoxes(const Layout& layout) {
  std::vector<uint32_t> order;
  order.reserve(layout.pieces.size());
  for (size_t i = 0; i < layout.pieces.size(); ++i) {
    if (!IsEmpty(layout.pieces[i].box)) order.push_back(static_cast<uint32_t>(i));
  }
  const auto tensor_of = [&](uint32_t i) { return layout.pieces[i].tensor; };
  std::sort(order.begin(), order.end(), [&](uint32_t a, uint32_t b) {
    return std::pair(tensor_of(a), a) < std::pair(tensor_of(b), b);
  });
  BoxOverlap overlap(layout.pieces);
  for (size_t begin = 0, end = 0; begin < order.size(); begin = end) {
    const uint32_t tensor = tensor_of(order[begin]);
    while (end < order.size() && tensor_of(order[end]) == tensor) ++end;
    const std::string& name = layout.tensors[tensor].name;
    const auto found = overlap.Find(absl::MakeSpan(order).subspan(begin, end - begin));
    if (!found.ok())
      return AboutTensor(Invalid("tensor {}: {}", name, Message(found.status())), name);
    if (!found->has_value()) continue;
    const auto [a, b] = **found;
    return AboutTensor(Invalid("tensor {}: piece {} ({}) and piece {} ({}) overlap", name, a,
                               ToString(layout.pieces[a].box), b, ToString(layout.pieces[b].box)),
                       name);
  }
  return absl::OkStatus();
}

}  // namespace

// ---- dtypes ----

int64_t ElementBytes(DType dtype) { return RowOf(dtype).bytes; }

std::string_view DTypeName(DType dtype) { return RowOf(dtype).name; }

absl::StatusOr<DType> DTypeFromProto(int value) {
  if (value < 1 || value > static_cast<int>(std::size(kDTypes))) {
    return Invalid("dtype {} is not known", value);
  }
  return kDTypes[value - 1].dtype;
}

// ---- tensors and boxes ----

bool TensorSpec::operator==(const TensorSpec& other) const {
  return name == other.name && dtype == other.dtype && shape == other.shape &&
         (derived == other.derived ||
          (derived != nullptr && other.derived != nullptr && *derived == *other.derived));
}

std::string ToString(DType dtype, const Dims& shape) {
  return fmt::format("{} {}", DTypeName(dtype), ToString(shape));
}

absl::StatusOr<int64_t> ElementCount(const Dims& shape) {
  if (shape.size() > kMaxDims) {
    return Invalid("shape {} has {} dimensions, at most {} are possible", ToString(shape),
                   shape.size(), kMaxDims);
  }
  // A dimension of 0 counts as 1 for the limit, so that strides of such a shape can't overflow.
  int64_t product = 1;
  bool empty = false;
  for (const int64_t n : shape) {
    if (n < 0) return Invalid("shape {} has a negative dimension", ToString(shape));
    empty |= n == 0;
    const int64_t factor = std::max<int64_t>(n, 1);
    if (factor > kMaxTensorBytes / product) {
      return Invalid("shape {} has more than {} elements", ToString(shape), kMaxTensorBytes);
    }
    product *= factor;
  }
  return empty ? 0 : product;
}

absl::Status ValidateTensor(const TensorSpec& tensor) {
  // The name is made printable only where an error needs it, since most tensors are valid.
  const auto name = [&tensor] { return Printable(tensor.name); };
  if (tensor.name.empty()) return Invalid("tensor name is empty");
  if (tensor.name.size() > static_cast<size_t>(kMaxNameBytes)) {
    return AboutTensor(Invalid("tensor {}: name has {} bytes, at most {} are possible", name(),
                               tensor.name.size(), kMaxNameBytes),
                       tensor.name);
  }
  // Most names are ASCII as a whole, so skip the ASCII characters first.
  const auto ascii = std::find_if_not(tensor.name.begin(), tensor.name.end(),
                                      [](char c) { return c >= 0x20 && c < 0x7f; });
  for (std::string_view rest(ascii, tensor.name.end()); !rest.empty();) {
    const size_t length = Utf8Length(rest);
    if (length == 0) {
      return AboutTensor(
          Invalid("tensor {}: name has a control character or is not UTF-8 at byte {}", name(),
                  tensor.name.size() - rest.size()),
          tensor.name);
    }
    rest.remove_prefix(length);
  }
  const auto dtype = static_cast<size_t>(tensor.dtype);
  if (dtype < 1 || dtype > std::size(kDTypes)) {
    return AboutTensor(Invalid("tensor {}: dtype {} is not known", name(), dtype), tensor.name);
  }
  const absl::StatusOr<int64_t> count = ElementCount(tensor.shape);
  if (!count.ok())
    return AboutTensor(Invalid("tensor {}: {}", name(), Message(count.status())), tensor.name);
  if (*count > kMaxTensorBytes / ElementBytes(tensor.dtype)) {
    return AboutTensor(Invalid("tensor {}: shape {} of {} has more than {} bytes", name(),
                               ToString(tensor.shape), DTypeName(tensor.dtype), kMaxTensorBytes),
                       tensor.name);
  }
  return absl::OkStatus();
}

Box WholeBox(const Dims& shape) { return {Dims(shape.size(), 0), shape}; }

int64_t ElementCount(const Box& box) {
  int64_t count = 1;
  for (const int64_t n : box.extent) count *= n;
  return count;
}

absl::Status ValidateBox(const Box& box, const Dims& shape) {
  if (box.offset.size() != shape.size() || box.extent.size() != shape.size()) {
    return Invalid("box {} is not of the rank of shape {}", ToString(box), ToString(shape));
  }
  for (size_t d = 0; d < shape.size(); ++d) {
    if (box.offset[d] < 0 || box.extent[d] < 0 || box.offset[d] > shape[d] ||
        box.extent[d] > shape[d] - box.offset[d]) {
      return Invalid("box {} is not inside shape {} in dimension {}", ToString(box),
                     ToString(shape), d);
    }
  }
  return absl::OkStatus();
}

std::optional<Box> Intersect(const Box& a, const Box& b) {
  Box box;
  box.offset.resize(a.offset.size());
  box.extent.resize(a.offset.size());
  for (size_t d = 0; d < a.offset.size(); ++d) {
    const int64_t begin = std::max(a.offset[d], b.offset[d]);
    const int64_t end = std::min(a.offset[d] + a.extent[d], b.offset[d] + b.extent[d]);
    if (begin >= end) return std::nullopt;
    box.offset[d] = begin;
    box.extent[d] = end - begin;
  }
  return box;
}

bool Contains(const Box& outer, const Box& inner) {
  for (size_t d = 0; d < outer.offset.size(); ++d) {
    if (inner.offset[d] < outer.offset[d]) return false;
    if (inner.offset[d] + inner.extent[d] > outer.offset[d] + outer.extent[d]) return false;
  }
  return true;
}

Dims RowMajorStrides(const Dims& extent) {
  Dims strides(extent.size(), 1);
  for (size_t d = extent.size(); d-- > 1;) {
    strides[d - 1] = strides[d] * std::max<int64_t>(extent[d], 1);
  }
  return strides;
}

int64_t FirstIndex(const Box& box, const Dims& shape) {
  int64_t index = 0;
  for (size_t d = 0; d < shape.size(); ++d) index = index * shape[d] + box.offset[d];
  return index;
}

std::vector<Box> BoxesOfRange(const Dims& shape, int64_t start, int64_t count) {
  std::vector<Box> boxes;
  if (count == 0) return boxes;
  if (shape.empty()) return {Box()};
  const Dims strides = RowMajorStrides(shape);
  const int64_t end = start + count;
  for (int64_t at = start; at < end;) {
    // The outermost dimension along which a whole step starts and fits here.
    size_t dim = 0;
    while (at % strides[dim] != 0 || strides[dim] > end - at) ++dim;
    Box box = WholeBox(shape);
    int64_t rest = at;
    for (size_t d = 0; d <= dim; ++d) {
      box.offset[d] = rest / strides[d];
      box.extent[d] = 1;
      rest %= strides[d];
    }
    box.extent[dim] = std::min((end - at) / strides[dim], shape[dim] - box.offset[dim]);
    at += box.extent[dim] * strides[dim];
    boxes.push_back(std::move(box));
  }
  return boxes;
}

// ---- layouts ----

void HashChain::Add(uint64_t number) {
  uint64_t x = hash_ ^ number;
  x += 0x9e3779b97f4a7c15;
  x = (x ^ x >> 30U) * 0xbf58476d1ce4e5b9;
  x = (x ^ x >> 27U) * 0x94d049bb133111eb;
  hash_ = x ^ x >> 31U;
}

void HashChain::Add(const Dims& dims) {
  for (const int64_t n : dims) Add(static_cast<uint64_t>(n));
}

uint64_t TensorHash(const TensorSpec& tensor) {
  HashChain chain(Fnv1a(tensor.name));
  chain.Add(tensor.name.size());
  chain.Add(static_cast<uint64_t>(tensor.dtype));
  chain.Add(tensor.shape.size());
  chain.Add(tensor.shape);
  if (tensor.derived != nullptr) {
    chain.Add(TensorHash(tensor.derived->from));
    chain.Add(static_cast<uint64_t>(tensor.derived->kind));
    chain.Add(static_cast<uint64_t>(tensor.derived->role));
  }
  return chain.hash();
}

TensorList::List& TensorList::Edit() {
  if (shared_ != nullptr) own_ = *std::exchange(shared_, nullptr);
  return own_;
}

absl::StatusOr<int64_t> SpanBytes(const Piece& piece, DType dtype) {
  if (IsEmpty(piece.box)) return 0;
  int64_t elements = 1;
  bool overflow = false;
  for (size_t d = 0; d < piece.strides.size(); ++d) {
    int64_t reach = 0;
    overflow |= __builtin_mul_overflow(piece.box.extent[d] - 1, piece.strides[d], &reach);
    overflow |= __builtin_add_overflow(elements, reach, &elements);
  }
  int64_t bytes = 0;
  overflow |= __builtin_mul_overflow(elements, ElementBytes(dtype), &bytes);
  if (overflow) {
    return Invalid("strides {} with extent {} overflow", ToString(piece.strides),
                   ToString(piece.box.extent));
  }
  return bytes;
}

uint64_t Layout::Digest() const {
  std::vector<uint64_t> tensor_hashes;
  tensor_hashes.reserve(tensors.size());
  uint64_t sum = 0;
  for (const TensorSpec& tensor : tensors) {
    tensor_hashes.push_back(TensorHash(tensor));
    sum += tensor_hashes.back();
  }
  for (const Piece& piece : pieces) {
    REFITD_CHECK(piece.tensor < tensor_hashes.size());
    HashChain chain(tensor_hashes[piece.tensor]);
    chain.Add(piece.box.offset);
    chain.Add(piece.box.extent);
    chain.Add(piece.strides);
    sum += chain.hash();
  }
  return sum;
}

int64_t Layout::Bytes() const {
  int64_t bytes = 0;
  for (const Piece& piece : pieces) {
    const int64_t piece_bytes = ElementCount(piece.box) * ElementBytes(tensors[piece.tensor].dtype);
    // Boxes of a source may overlap, so the sum over valid pieces may overflow.
    if (__builtin_add_overflow(bytes, piece_bytes, &bytes)) {
      return std::numeric_limits<int64_t>::max();
    }
  }
  return bytes;
}

void TieSharedTensors(Layout* layout) {
  const auto tensors = static_cast<uint32_t>(layout->tensors.size());
  const bool valid = std::all_of(layout->pieces.begin(), layout->pieces.end(),
                                 [tensors](const Piece& p) { return p.tensor < tensors; });
  if (!valid || !AnyPlaceTwice(*layout)) return;
  const std::vector<std::vector<uint32_t>> pieces = PiecesByTensor(*layout);
  absl::flat_hash_map<Place, uint32_t> first_at;
  std::vector<bool> tied(tensors);
  for (uint32_t t = 0; t < tensors; ++t) {
    if (pieces[t].empty()) continue;
    const auto [at, added] = first_at.try_emplace(PlaceOf(layout->pieces[pieces[t].front()]), t);
    const uint32_t first = at->second;
    const TensorSpec& spec = layout->tensors[t];
    const TensorSpec& kept = layout->tensors[first];
    if (added || !SameForm(spec, kept) || !SamePlaces(*layout, pieces[first], pieces[t])) {
      continue;
    }
    tied[t] = true;
    layout->ties.push_back({t, first});
  }
  std::erase_if(layout->pieces, [&tied](const Piece& piece) { return tied[piece.tensor]; });
  std::sort(layout->ties.begin(), layout->ties.end(),
            [](const Tie& a, const Tie& b) { return a.tensor < b.tensor; });
}

absl::Status TooManyTensors(std::string_view what, int64_t tensors) {
  return AboutField(Error(absl::StatusCode::kResourceExhausted,
                          "{}: {} tensors, and a model has at most {} (kMaxTensorsPerLayout)", what,
                          tensors, kMaxTensorsPerLayout),
                    what);
}

absl::Status ValidateLayout(const Layout& layout, const RegionBytes& region_bytes,
                            bool destination) {
  const auto tensors = static_cast<int64_t>(layout.tensors.size());
  const auto pieces = static_cast<int64_t>(layout.pieces.size());
  if (tensors > kMaxTensorsPerLayout) return TooManyTensors("layout", tensors);
  if (pieces > kMaxPiecesPerLayout) {
    return Error(absl::StatusCode::kResourceExhausted, "layout has {} pieces, at most {} may be",
                 pieces, kMaxPiecesPerLayout);
  }
  REFITD_RETURN_IF_ERROR(ValidateTensors(layout.tensors));
  for (size_t i = 0; i < layout.pieces.size(); ++i) {
    const Piece& piece = layout.pieces[i];
    if (piece.tensor >= layout.tensors.size()) {
      return Invalid("piece {}: tensor {} is not one of the layout's {}", i, piece.tensor, tensors);
    }
    const TensorSpec& tensor = layout.tensors[piece.tensor];
    const absl::Status status = ValidatePiece(tensor, piece, region_bytes);
    if (!status.ok()) {
      return AboutTensor(Prefixed(status, "tensor {}: piece {}", tensor.name, i), tensor.name);
    }
  }
  if (!destination) return absl::OkStatus();
  REFITD_RETURN_IF_ERROR(CheckDerivedTogether(layout.tensors));
  REFITD_RETURN_IF_ERROR(ValidateTies(layout));
  REFITD_RETURN_IF_ERROR(ValidateDisjointBoxes(layout));
  return MemoryOverlap(layout).Check();
}

absl::Status ValidateBacks(const Layout& layout, const RegionBytes& region_bytes) {
  if (layout.backs.empty()) return absl::OkStatus();
  std::set<RegionId> fronts;
  std::set<RegionId> backs;
  for (const RegionBack& pair : layout.backs) {
    if (!fronts.insert(pair.region).second) {
      return InvalidField("layout.fronts", "layout.fronts: region {} has two backs", pair.region);
    }
    if (!backs.insert(pair.back).second) {
      return InvalidField("layout.backs", "layout.backs: region {} is the back of two regions",
                          pair.back);
    }
    const std::optional<int64_t> bytes = region_bytes(pair.region);
    const std::optional<int64_t> back_bytes = region_bytes(pair.back);
    if (!bytes.has_value() || !back_bytes.has_value()) {
      return AboutField(Error(absl::StatusCode::kNotFound, "layout.backs: no region {}",
                              bytes.has_value() ? pair.back : pair.region),
                        "layout.backs");
    }
    if (*bytes == *back_bytes) continue;
    return InvalidField("layout.backs", "layout.backs: region {} has {} bytes, its back {} has {}",
                        pair.region, *bytes, pair.back, *back_bytes);
  }
  for (const RegionId back : backs) {
    if (!fronts.contains(back)) continue;
    return InvalidField("layout.backs", "layout.backs: region {} has a back, and is one itself",
                        back);
  }
  for (const Piece& piece : layout.pieces) {
    if (fronts.contains(piece.region)) continue;
    return InvalidField("layout.fronts", "layout.fronts: region {} of tensor '{}' has no back",
                        piece.region, layout.tensors[piece.tensor].name);
  }
  return absl::OkStatus();
}

// ---- intervals ----

bool IntervalSet::Add(int64_t begin, int64_t end) {
  if (begin >= end) return true;
  // The first range that ends after `begin`.
  auto next = std::upper_bound(ranges_.begin(), ranges_.end(), begin,
                               [](int64_t at, const auto& range) { return at < range.second; });
  if (next != ranges_.end() && next->first < end) return false;
  total_ += end - begin;
  const bool joins_next = next != ranges_.end() && next->first == end;
  const bool joins_previous = next != ranges_.begin() && std::prev(next)->second == begin;
  if (joins_previous && joins_next) {
    std::prev(next)->second = next->second;
    ranges_.erase(next);
  } else if (joins_previous) {
    std::prev(next)->second = end;
  } else if (joins_next) {
    next->first = begin;
  } else {
    ranges_.insert(next, {begin, end});
  }
  return true;
}

std::optional<int64_t> IntervalSet::FirstGap(int64_t size) const {
  int64_t covered = 0;
  for (const auto& [begin, end] : ranges_) {
    if (begin > covered) break;
    covered = std::max(covered, end);
  }
  if (covered >= size) return std::nullopt;
  return covered;
}

// ---- bucket forming ----

namespace {

// Returns the most elements from `start` on, up to `count`, that end after a multiple of `rows`
// rows of the last two dimensions; 0: there is no such end.
int64_t CountToRowEnd(const Dims& shape, int64_t start, int64_t count, int64_t rows) {
  if (shape.size() < 2) return count;
  const int64_t row = shape.back();
  const int64_t matrix = row * shape[shape.size() - 2];
  const int64_t end = start + count;
  const int64_t cut = end - end % matrix % (rows * row);
  return std::max<int64_t>(cut - start, 0);
}

// Returns how many of the next `count` elements go into a bucket that has no room for the rest of
// their range. `empty`: the bucket has nothing yet.
int64_t CountToCut(const Dims& shape, int64_t start, int64_t count, bool empty) {
  const int64_t whole = CountToRowEnd(shape, start, count, kCutRows);
  if (whole > 0 || !empty) return whole;
  const int64_t row = CountToRowEnd(shape, start, count, 1);
  return row > 0 ? row : count;
}

}  // namespace

std::vector<PackedBucket> FormBuckets(const std::vector<TensorSpec>& tensors,
                                      const std::vector<TensorRange>& ranges, int64_t bucket_bytes,
                                      int64_t max_ranges) {
  REFITD_CHECK(bucket_bytes >= kPackAlignment && max_ranges > 0);
  std::vector<PackedBucket> buckets;
  for (TensorRange rest : ranges) {
    const int64_t element_bytes = ElementBytes(tensors[rest.tensor].dtype);
    bool placed = false;
    while (!placed) {
      if (buckets.empty()) buckets.emplace_back();
      PackedBucket* bucket = &buckets.back();
      const int64_t offset = AlignUp(bucket->bytes);
      int64_t count = std::clamp<int64_t>((bucket_bytes - offset) / element_bytes, 0, rest.count);
      if (count < rest.count) {
        count = CountToCut(tensors[rest.tensor].shape, rest.start, count, /*empty=*/offset == 0);
      }
      const bool full = static_cast<int64_t>(bucket->ranges.size()) >= max_ranges ||
                        offset > bucket_bytes || (count == 0 && rest.count > 0);
      if (full) {
        buckets.emplace_back();
        continue;
      }
      bucket->ranges.push_back({rest.tensor, rest.start, count});
      bucket->byte_offsets.push_back(offset);
      bucket->bytes = offset + count * element_bytes;
      rest.start += count;
      rest.count -= count;
      placed = rest.count == 0;
    }
  }
  return buckets;
}

}  // namespace refitd
