// Parameters laid one after the other in one region, of which the layouts of this folder are built.
//
// A *parameter* is what a framework allocates as one tensor: a dense row-major matrix (or vector)
// into which boxes of one or several global tensors are stacked along the first dimension. A stack
// of matrices [E, 2P, H] is the same bytes as one of E * 2P rows. A fusion is thus only boxes with
// byte offsets and strides.
#ifndef REFITD_TESTS_WORKLOADS_SHARDING_ARENA_H_
#define REFITD_TESTS_WORKLOADS_SHARDING_ARENA_H_

#include <cstdint>
#include <span>
#include <string>
#include <string_view>

#include "absl/container/flat_hash_map.h"
#include "absl/status/statusor.h"
#include "tests/workloads/sharding/model.h"
#include "transport/plan/layout.h"

namespace refitd::sharding {

struct LayoutOptions {
  RegionId region = RegionId(1);
  int64_t alignment_bytes = kPackAlignment;  // of each parameter; a multiple of 8
  uint64_t binding_generation = 1;
  // The embedding's and lm_head's rows are padded to a multiple of this in storage, never in the
  // layout; 0: the framework's own multiple, see megatron.h and vllm.h.
  int64_t vocabulary_multiple = 0;
};

// The size that a region needs to hold all pieces of the layout, in bytes: the largest end of any
// piece, rounded up to kPackAlignment. The layout must be valid.
int64_t ArenaBytes(const Layout& layout);

// A box of a global tensor as a part of a parameter.
struct Part {
  TensorSpec tensor = {};
  Box box = {};
};

class ArenaBuilder {
 public:
  // Fails if an option is out of range.
  static absl::StatusOr<ArenaBuilder> Make(const LayoutOptions& options);

  // Stacks the parts along dimension 0 in a new parameter of at least `min_rows` rows; rows beyond
  // the parts' are padding. The parts must agree in dtype, rank (at least 1) and all other extents.
  // An empty box takes no space and has no piece. A parameter without elements is not added.
  void AddParameter(std::span<const Part> parts, int64_t min_rows = 0);

  // Adds a parameter of the parts' scales, stacked in the order of the parts. It has the scales of
  // the blocks that each part touches. Adds nothing if `config` does not quantize the parts.
  void AddScales(const ModelConfig& config, std::span<const Part> parts);
  // Calls AddParameter, then AddScales.
  void AddQuantizable(const ModelConfig& config, std::span<const Part> parts);

  // Returns the layout. Its tensors are in the order in which they were first added; tensors
  // without a piece are left out.
  Layout Finish() &&;

 private:
  explicit ArenaBuilder(const LayoutOptions& options) : options_(options) {}

  uint32_t IndexOf(const TensorSpec& tensor);

  LayoutOptions options_;
  Layout layout_;
  absl::flat_hash_map<std::string, uint32_t> indices_;
  int64_t end_ = 0;  // bytes
};

// INVALID_ARGUMENT unless `by` divides n: "qwen3-4b: heads 32 is not divisible by tp 3".
absl::Status CheckDivides(const ModelConfig& config, std::string_view what, int64_t n,
                          std::string_view by_what, int64_t by);
// OK: the model is valid, and its dense tensors can be split over `tp` ranks.
absl::Status CheckTensorParallel(const ModelConfig& config, int64_t tp);

// A rank's shard of the embedding or lm_head: its rows of storage, and the part of them that is
// vocabulary.
struct VocabularyShard {
  Part part = {};
  int64_t storage_rows = 0;
};
// The padded vocabulary is the next multiple of `multiple` rows, which tp must divide.
VocabularyShard ShardVocabulary(TensorSpec tensor, int64_t multiple, int64_t tp, int64_t rank);

// Parts of a tensor: the whole, some rows (dimension 0), or some columns (dimension 1).
Part Whole(TensorSpec tensor);
Part Rows(TensorSpec tensor, int64_t begin, int64_t count);
Part Columns(TensorSpec tensor, int64_t begin, int64_t count);

// Shard `index` of `shards` equal shards along dimension 0 or 1; the caller must have checked that
// `shards` divides the dimension.
Part RowShard(TensorSpec tensor, int64_t shards, int64_t index);
Part ColumnShard(TensorSpec tensor, int64_t shards, int64_t index);

}  // namespace refitd::sharding

#endif  // REFITD_TESTS_WORKLOADS_SHARDING_ARENA_H_
