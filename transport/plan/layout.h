// Layouts: which boxes of which named global tensors a member holds, and where their bytes lie.
//
// Pure: no I/O, no gRPC, no CUDA. Everything here is a value; functions are thread-safe because
// they share nothing.
//
// Invariants
//  - Global shapes are unpadded; boxes lie inside them; storage outside the boxes is neither read,
//    written nor digested.
//  - Untrusted numbers (shapes, boxes, offsets) become statuses that name the field and value, and
//    never an allocation, an offset or a loop bound (P10). Every count has a named limit below.
#ifndef REFITD_TRANSPORT_PLAN_LAYOUT_H_
#define REFITD_TRANSPORT_PLAN_LAYOUT_H_

#include <cstdint>
#include <functional>
#include <initializer_list>
#include <memory>
#include <optional>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

#include "absl/container/inlined_vector.h"
#include "absl/status/statusor.h"
#include "transport/base/ids.h"

namespace refitd {

// The values are those of refitd.v1.DType.
enum class DType : uint8_t {
  kFloat64 = 1,
  kFloat32 = 2,
  kFloat16 = 3,
  kBFloat16 = 4,
  kFloat8E4M3FN = 5,
  kFloat8E5M2 = 6,
  kInt64 = 7,
  kInt32 = 8,
  kInt16 = 9,
  kInt8 = 10,
  kUint8 = 11,
  kBool = 12,
};

// Returns the size of an element: 1, 2, 4 or 8.
int64_t ElementBytes(DType dtype);
// Returns torch's name of the type without its prefix: "bfloat16", "float8_e4m3fn", ...
std::string_view DTypeName(DType dtype);
// The DType of a number from the wire; INVALID_ARGUMENT with the number if unknown.
absl::StatusOr<DType> DTypeFromProto(int value);

inline constexpr int kMaxDims = 8;  // of a tensor
inline constexpr int64_t kMaxTensorBytes =
    int64_t{1} << 48;  // of one tensor; no model comes near it, and sums can't overflow
inline constexpr int64_t kMaxNameBytes = 512;             // of a tensor's name
inline constexpr int64_t kMaxTensorsPerLayout = 262'144;  // DeepSeek-V3 has 45,395
// RESOURCE_EXHAUSTED, naming `what`, its number of tensors and the limit.
absl::Status TooManyTensors(std::string_view what, int64_t tensors);
inline constexpr int64_t kMaxPiecesPerLayout = 4'194'304;
inline constexpr int64_t kMaxBacksPerLayout = 4096;  // as many regions as a member may have

using Dims = absl::InlinedVector<int64_t, 4>;

struct Derivation;

struct TensorSpec {
  std::string name;
  DType dtype = DType::kUint8;
  Dims shape;  // elements; empty: a scalar
  // How refits compute the tensor from one that trainers hold (derived.h). Null: it is moved as
  // trainers hold it.
  std::shared_ptr<const Derivation> derived = nullptr;
  bool operator==(const TensorSpec& other) const;
};

// Returns a text such as "bfloat16 [1024, 3072]".
std::string ToString(DType dtype, const Dims& shape);

// Returns the product of dims, at most kMaxTensorBytes. INVALID_ARGUMENT for a negative dim, more
// than kMaxDims dims, or a larger product.
absl::StatusOr<int64_t> ElementCount(const Dims& shape);
// Checks the shape as ElementCount does, the dtype, and the name: 1 to kMaxNameBytes bytes of
// printable ASCII or UTF-8 without control characters.
absl::Status ValidateTensor(const TensorSpec& tensor);

// Offset and extent per dimension (elements). For a scalar both are empty. An extent may be 0: the
// box is then empty.
struct Box {
  Dims offset;
  Dims extent;
  bool operator==(const Box&) const = default;
};

// Returns the box that covers all of `shape`.
Box WholeBox(const Dims& shape);
// Returns the number of elements inside the box, which must be valid.
int64_t ElementCount(const Box& box);
// Checks that box and shape have the same rank, that offsets and extents are >= 0, and that offset
// + extent <= shape.
absl::Status ValidateBox(const Box& box, const Dims& shape);
// The intersection of two boxes of the same rank; nullopt if it is empty.
std::optional<Box> Intersect(const Box& a, const Box& b);
// Whether all of `inner` lies in `outer`, which has the same rank.
bool Contains(const Box& outer, const Box& inner);
// Returns how many elements of memory lie between two indices of a tensor: the sum over the
// dimensions of `at` of the distance from `from`, times the stride.
inline int64_t ElementDistance(const Dims& at, const Dims& from, const Dims& strides) {
  int64_t sum = 0;
  for (size_t d = 0; d < at.size(); ++d) sum += (at[d] - from[d]) * strides[d];
  return sum;
}
// Row-major (C order) element strides of a dense array of `extent`.
Dims RowMajorStrides(const Dims& extent);
// Returns the row-major index of the box's first element in the global shape.
int64_t FirstIndex(const Box& box, const Dims& shape);
// Returns the elements [start, start+count) of a row-major tensor as at most 2*rank-1 disjoint
// boxes in ascending order. The range must lie inside the shape.
std::vector<Box> BoxesOfRange(const Dims& shape, int64_t start, int64_t count);

inline constexpr uint32_t kNotComputed = ~uint32_t{0};

// One box of one tensor, and where it lies in a region.
struct Piece {
  uint32_t tensor = 0;  // index into the layout's tensors
  Box box;
  RegionId region;
  int64_t byte_offset =
      0;  // of the box's first element, from the region's start; a multiple of the element size
  Dims strides;  // in elements, one for each dimension, each >= 0; always filled in
                 // (RowMajorStrides(box.extent) where dense)
  // Planners only (derived_layouts.h): the index of the layout's piece from which this
  // box is computed. The box then lies nowhere; offset and strides are those of a dense box at 0.
  uint32_t computed_from = kNotComputed;
  bool operator==(const Piece&) const = default;
};

// Returns how many bytes a piece's storage spans, from the start of its first element to the end of
// its last; 0 for an empty box. INVALID_ARGUMENT on overflow.
absl::StatusOr<int64_t> SpanBytes(const Piece& piece, DType dtype);

// A hash of numbers in order. For each number h = S(h xor number), where S is one splitmix64 step:
// x += 0x9e3779b97f4a7c15; x = (x ^ x >> 30) * 0xbf58476d1ce4e5b9;
// x = (x ^ x >> 27) * 0x94d049bb133111eb; x ^ x >> 31.
class HashChain {
 public:
  explicit HashChain(uint64_t start) : hash_(start) {}
  void Add(uint64_t number);
  void Add(const Dims& dims);
  uint64_t hash() const { return hash_; }

 private:
  uint64_t hash_;
};

// The hash of a tensor's name, dtype, shape and derivation, as Layout::Digest defines it.
uint64_t TensorHash(const TensorSpec& tensor);

// The odd number by which ContentDigest multiplies the digests of a tensor's elements.
inline uint64_t ContentFactor(const TensorSpec& tensor) { return TensorHash(tensor) | 1; }
// Closes the sum, modulo 2^64, of the digests of what a rank holds of each tensor, each times the
// tensor's ContentFactor. The result is never 0, which stands for content that is not known.
inline uint64_t ContentDigest(uint64_t sum) { return sum == 0 ? 1 : sum; }

// Says that a tensor of an engine has no pieces because its memory is that of another tensor.
struct Tie {
  uint32_t tensor = 0;   // index into the layout's tensors
  uint32_t same_as = 0;  // another index
  bool operator==(const Tie&) const = default;
};

// The tensors of a layout, in order: a vector, or a reference to a vector that other layouts share
// (ShareTensors in shared_tensors.h), since most ranks of a model declare the same tensors.
class TensorList {
 public:
  using List = std::vector<TensorSpec>;
  TensorList() = default;
  // NOLINTNEXTLINE(google-explicit-constructor): stands for a vector
  TensorList(List tensors) : own_(std::move(tensors)) {}
  TensorList(std::initializer_list<TensorSpec> tensors) : own_(tensors) {}
  explicit TensorList(std::shared_ptr<const List> shared) : shared_(std::move(shared)) {}

  const List& get() const { return shared_ != nullptr ? *shared_ : own_; }
  // NOLINTNEXTLINE(google-explicit-constructor): stands for a vector
  operator const List&() const { return get(); }
  size_t size() const { return get().size(); }
  bool empty() const { return get().empty(); }
  const TensorSpec& operator[](size_t i) const { return get()[i]; }
  const TensorSpec& back() const { return get().back(); }
  const TensorSpec* data() const { return get().data(); }
  List::const_iterator begin() const { return get().begin(); }
  List::const_iterator end() const { return get().end(); }
  bool operator==(const TensorList& other) const { return get() == other.get(); }

  // A list of this object alone, to be changed. Other layouts keep what they share.
  List& Edit();
  void push_back(TensorSpec tensor) { Edit().push_back(std::move(tensor)); }

 private:
  List own_;
  std::shared_ptr<const List> shared_;  // null: own_ counts
};

// Another region of as many bytes, into which versions are written while the region is read.
struct RegionBack {
  RegionId region;
  RegionId back;
  bool operator==(const RegionBack&) const = default;
};

// The tensors and pieces of one member.
struct Layout {
  TensorList tensors;
  std::vector<Piece> pieces;
  uint64_t binding_generation = 0;
  // Trainers only: indices into `tensors`, ascending, of the tensors that are pushed in buckets
  // rather than moved by a compiled refit. Not part of the digest.
  std::vector<uint32_t> pushed_tensors = {};
  // Engines only: ascending by `tensor`. Not part of the digest.
  std::vector<Tie> ties = {};
  // Engines only: empty, or one entry for each region that a piece names. Not part of the digest.
  std::vector<RegionBack> backs = {};
  // With backs: how many commits of this lease have exchanged them, as far as the rank has heard.
  uint64_t flips = 0;
  // With backs: the backs do not hold what their regions hold. The layout is checked, and the rank
  // has none until it registers one without this.
  bool backs_differ = false;

  // Digest of the structure: tensors' names, dtypes, shapes, boxes and strides. It does not depend
  // on the order of tensors and pieces, on regions, byte offsets or the binding generation. The
  // layout must be valid. All arithmetic modulo 2^64:
  //   tensor hash = HashChain from the 64-bit FNV-1a hash of the name over: length of the name,
  //     dtype's wire value, rank, dims of the shape; of a derived tensor then the tensor hash of
  //     what it is derived from, and the wire values of kind and role.
  //   piece hash = HashChain from its tensor's hash over: offsets, extents, strides.
  //   digest = sum of all tensor hashes and all piece hashes.
  uint64_t Digest() const;
  // Returns the sum over the pieces of elements * element size, or INT64_MAX if the sum is larger.
  int64_t Bytes() const;
};

// Makes ties of tensors that lie in exactly the memory of an earlier tensor, piece by piece and of
// the same dtype and shape, and removes their pieces. Other pieces that share memory stay;
// ValidateLayout refuses them.
void TieSharedTensors(Layout* layout);

// Returns the size in bytes of a region, or nullopt if the member has no such region.
using RegionBytes = std::function<std::optional<int64_t>(RegionId)>;

// Checks a layout completely: tensors are valid and uniquely named, boxes lie inside their tensors,
// strides have the right rank, storage lies inside its region and is aligned to the element size.
// With `destination` also: quantised tensors have values and scales; boxes of one tensor are
// disjoint, and no two pieces share memory (so that every element is written exactly once); spans
// may interleave, as column slices of one matrix do; a tied tensor has no pieces and the dtype and
// shape of one that is not tied. Errors name tensor, field and value: NOT_FOUND unknown region;
// RESOURCE_EXHAUSTED more tensors or pieces than a layout may have; else INVALID_ARGUMENT, also if
// proving that pieces are disjoint takes more work than a limit that layouts of real models don't
// come near.
absl::Status ValidateLayout(const Layout& layout, const RegionBytes& region_bytes,
                            bool destination);
// Checks the layout's backs: every region that a piece names has one of as many bytes, no region
// has two, and no back is the back of two regions or has pieces. NOT_FOUND: unknown region; else
// INVALID_ARGUMENT.
absl::Status ValidateBacks(const Layout& layout, const RegionBytes& region_bytes);

// A set of disjoint half-open ranges of element indices, which merges neighbours. It shows whether
// each tensor is covered exactly once.
class IntervalSet {
 public:
  // Adds [begin, end). Returns false, and changes nothing, if it overlaps a range in the set. Empty
  // ranges are accepted and ignored.
  bool Add(int64_t begin, int64_t end);
  int64_t total() const { return total_; }
  // Returns the first index in [0, size) that is missing, or nullopt.
  std::optional<int64_t> FirstGap(int64_t size) const;

 private:
  // The ranges are ascending and do not touch. Most tensors are pushed as a whole and have a single
  // range.
  absl::InlinedVector<std::pair<int64_t, int64_t>, 1> ranges_;
  int64_t total_ = 0;
};

// ---- bucket forming ----

// A run of elements of one tensor that a bucket carries.
struct TensorRange {
  uint32_t tensor = 0;  // index into the caller's tensors
  int64_t start = 0;    // first element, row-major
  int64_t count = 0;    // elements
  bool operator==(const TensorRange&) const = default;
};

// A packed bucket: its ranges, and where each range lies.
struct PackedBucket {
  std::vector<TensorRange> ranges;
  std::vector<int64_t> byte_offsets;  // one for each range, multiples of kPackAlignment
  int64_t bytes = 0;                  // end of the last range
};

// The alignment in bytes that torch's allocator and NeMo-RL's packing have.
inline constexpr int64_t kPackAlignment = 512;
constexpr int64_t AlignUp(int64_t bytes) {
  return (bytes + kPackAlignment - 1) / kPackAlignment * kPackAlignment;
}

// Tensors are cut after a multiple of so many rows, so that no block of 128 x 128 that is quantised
// together is cut.
inline constexpr int64_t kCutRows = 128;

// Packs `ranges` in order into as few buckets of at most `bucket_bytes` as order and cuts allow. A
// range that does not fit into the rest of a bucket is split after a multiple of kCutRows rows of
// the tensor's last two dimensions. If so many rows do not fit into an empty bucket, it is split
// after a row, else at an element, as tensors of one dimension always are. bucket_bytes must be at
// least kPackAlignment. Ranges of no elements are kept (a tensor of size 0 is still delivered).
// Each bucket has at most `max_ranges` ranges.
std::vector<PackedBucket> FormBuckets(const std::vector<TensorSpec>& tensors,
                                      const std::vector<TensorRange>& ranges, int64_t bucket_bytes,
                                      int64_t max_ranges = 65'536);

}  // namespace refitd

#endif  // REFITD_TRANSPORT_PLAN_LAYOUT_H_
