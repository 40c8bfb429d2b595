// Layouts of ranks of the GPU tests: of real models or random, divided into blocks of memory as an
// allocator does.
//
// Pure: the same options give the same layouts in every process.
#ifndef REFITD_TESTS_GPU_RANK_LAYOUT_H_
#define REFITD_TESTS_GPU_RANK_LAYOUT_H_

#include <cstdint>
#include <string>
#include <vector>

#include "absl/status/statusor.h"
#include "transport/plan/layout.h"

namespace refitd::gpu {

struct LayoutOptions {
  // "megatron", "fsdp", "vllm" or "random"; "push": the rank has every world-th tensor of the
  // model, whole.
  std::string kind = "vllm";
  std::string model = "qwen3-0.6b";  // of tests/workloads/sharding/model.h, or "tensors:N:BYTES": N
                                     // bf16 vectors of BYTES
  int64_t layers = 0;                // 0: the model's; else the first so many
  int64_t experts = 0;               // 0: the model's; else this number
  bool tiny = false;                 // ScaledDown
  int rank = 0;
  int world = 1;  // engines: ranks of one instance
  int64_t tp = 1;
  int64_t pp = 1;
  int64_t ep = 1;  // engines: greater than 1 means expert parallelism over the tp ranks
  int64_t etp = 1;
  bool trainer = false;
  uint64_t random_seed = 1;

  int64_t block_bytes = int64_t{1} << 30;  // the most bytes of a block with several pieces
  bool odd = false;  // pieces begin at any multiple of their element size, with gaps between them
};

struct RankLayout {
  Layout layout;  // pieces come in the order of blocks; RegionId(b + 1) is block b
  std::vector<int64_t> block_bytes;
  std::vector<std::string> piece_names;  // the tensor of each piece
};

absl::StatusOr<RankLayout> MakeRankLayout(const LayoutOptions& options);

}  // namespace refitd::gpu

#endif  // REFITD_TESTS_GPU_RANK_LAYOUT_H_
