// Meshes of ranks and how a tensor's dimensions are divided over them.
//
// Pure values: no I/O, no gRPC, no CUDA; thread-safe because nothing is shared. All sizes, offsets
// and ranks are counts of elements or ranks, never bytes. Errors are INVALID_ARGUMENT with the
// offending value.
#ifndef REFITD_TESTS_WORKLOADS_SHARDING_MESH_H_
#define REFITD_TESTS_WORKLOADS_SHARDING_MESH_H_

#include <cstdint>
#include <span>
#include <string>
#include <string_view>
#include <vector>

#include "absl/status/statusor.h"
#include "transport/plan/layout.h"

namespace refitd::sharding {

inline constexpr int64_t kMaxMeshRanks = int64_t{1} << 20;
inline constexpr size_t kMaxMeshDims = 8;

struct MeshDim {
  std::string name = {};
  int64_t size = 1;  // ranks
  bool operator==(const MeshDim&) const = default;
};

// Ranks 0 to ranks()-1 in row-major order of their coordinates: the last dimension is innermost.
class Mesh {
 public:
  // Fails unless there are 1 to kMaxMeshDims dimensions, each of size 1 or more, with names that
  // are not empty and differ, and at most kMaxMeshRanks ranks in all.
  static absl::StatusOr<Mesh> Make(std::vector<MeshDim> dims);

  const std::vector<MeshDim>& dims() const { return dims_; }
  int64_t ranks() const { return ranks_; }

  // One coordinate for each dimension. The rank must be inside the mesh.
  absl::StatusOr<Dims> Coordinates(int64_t rank) const;
  absl::StatusOr<int64_t> Coordinate(std::string_view dim, int64_t rank) const;
  // The inverse of Coordinates.
  absl::StatusOr<int64_t> RankOf(const Dims& coordinates) const;

 private:
  Mesh(std::vector<MeshDim> dims, int64_t ranks) : dims_(std::move(dims)), ranks_(ranks) {}

  std::vector<MeshDim> dims_;
  int64_t ranks_ = 1;
};

enum class ShardRule : uint8_t {
  // The rule of torch.chunk and DTensor: every shard has ceil(n / shards) elements while elements
  // are left; the last shards may be short or empty. 10 over 4: 3, 3, 3, 1.
  kChunk,
  // Sizes differ by at most one, larger shards first. 10 over 4: 3, 3, 2, 2.
  kBalanced,
};

// Elements [offset, offset + extent).
struct ShardRange {
  int64_t offset = 0;
  int64_t extent = 0;
  int64_t end() const { return offset + extent; }
  bool operator==(const ShardRange&) const = default;
};

// Shard `index` of `shards` over n elements; an empty shard lies at n. The caller must pass n >= 0
// and 0 <= index < shards.
ShardRange ShardOf(int64_t n, int64_t shards, int64_t index, ShardRule rule = ShardRule::kChunk);

// The way in which one mesh dimension divides a tensor.
struct Placement {
  enum class Kind : uint8_t { kReplicate, kShard };
  static Placement Replicate() { return {}; }
  static Placement Shard(int dim, ShardRule rule = ShardRule::kChunk) {
    return {Kind::kShard, dim, rule};
  }

  Kind kind = Kind::kReplicate;
  int dim = 0;  // of the tensor, from 0
  ShardRule rule = ShardRule::kChunk;
};

// The box that `rank` holds of a tensor of `shape`. There is one placement for each mesh dimension.
// If several mesh dimensions shard one tensor dimension, the outer one divides it first and the
// inner one divides the result, as DTensor does. The box may be empty.
absl::StatusOr<Box> ShardBox(const Dims& shape, const Mesh& mesh,
                             std::span<const Placement> placements, int64_t rank);

}  // namespace refitd::sharding

#endif  // REFITD_TESTS_WORKLOADS_SHARDING_MESH_H_
