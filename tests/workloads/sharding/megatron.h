// Layouts of trainer ranks: as Megatron keeps its weights, and as fully sharded data parallelism
// keeps them.
//
// Pure values: no I/O, no gRPC, no CUDA; thread-safe because nothing is shared.
//
// The tensors that a Megatron rank holds, in the order of its arena (each line a parameter):
//   embedding            first stage: rows by tensor parallel
//   of each layer of its stage:
//     input norm
//     fused QKV          for each of its KV groups [q heads of the group, k, v]: rows by tensor
//                        parallel. With fewer KV heads than tensor-parallel ranks, tp / kv_heads
//                        ranks share a group: each has its own q heads and the whole of k and v
//     projection (o)     columns by tensor parallel
//     q norm, k norm
//   or, for latent attention: input norm, q_a and its norm, q_b (or q), kv_a and its norm, kv_b, o:
//     the down projections q_a and kv_a are replicated, q, q_b and kv_b are rows, o is columns
//     post-attention norm
//     fc1                [gate shard; up shard], rows by tensor parallel
//     fc2 (down)         columns by tensor parallel
//   or, in a layer of experts: the shared experts' fc1 and fc2 by tensor parallel, router,
//     router bias, then fc1 and fc2 of each of its experts: global expert = local + ep rank *
//     experts / ep, rows and columns by expert tensor parallel
//   lm_head              last stage, unless tied: rows by tensor parallel
//   final norm           last stage
// One-dimensional tensors and the router are replicated. Layers are split evenly over the stages;
// if there is a remainder, the first stages have one layer more. The vocabulary's rows are padded
// to a multiple of 128 (LayoutOptions::vocabulary_multiple) times tp, so that the last ranks may
// hold fewer or none. FP8 scales, where the model has them, lie after their parameter, stacked
// tensor by tensor ([q; k; v], [gate; up]): the blocks that the rank's part touches, so that both
// ranks have the scale of a block which a shard boundary cuts.
#ifndef REFITD_TESTS_WORKLOADS_SHARDING_MEGATRON_H_
#define REFITD_TESTS_WORKLOADS_SHARDING_MEGATRON_H_

#include <cstdint>

#include "absl/status/statusor.h"
#include "tests/workloads/sharding/arena.h"
#include "tests/workloads/sharding/mesh.h"
#include "tests/workloads/sharding/model.h"
#include "transport/plan/layout.h"

namespace refitd::sharding {

// Two meshes over one world, the last dimension innermost: dense (pp, dp, cp, tp) with
// dp = world / (pp * cp * tp), expert (pp, edp, ep, etp) with edp = world / (pp * ep * etp).
// A published name such as EP4xTP2xDP2 may list factors of either mesh: the world says which.
struct TrainerParallel {
  int64_t world = 1;
  int64_t pp = 1;
  int64_t tp = 1;
  int64_t ep = 1;
  int64_t etp = 1;
  int64_t cp = 1;  // context parallel: replicas, as data parallel
  bool operator==(const TrainerParallel&) const = default;
};

// INVALID_ARGUMENT unless the product of the given sizes divides the world.
absl::StatusOr<Mesh> DenseMesh(const TrainerParallel& parallel);
absl::StatusOr<Mesh> ExpertMesh(const TrainerParallel& parallel);

// The layers of pipeline stage `stage` of `pp`.
ShardRange LayersOfStage(int64_t layers, int64_t pp, int64_t stage);

// The layout of `rank`. INVALID_ARGUMENT: no such rank, a mesh that does not fit the world, or a
// model that the parallelism does not divide (heads, kv_heads, ffn, moe_ffn, experts, fewer layers
// than stages), naming both numbers.
absl::StatusOr<Layout> MegatronLayout(const ModelConfig& config, const TrainerParallel& parallel,
                                      int64_t rank, const LayoutOptions& options = {});

// The layout of fully sharded data parallelism: every tensor separately, in the model's order,
// dimension 0 divided over the world by torch.chunk (mesh.h); a rank without rows of a tensor does
// not list it.
absl::StatusOr<Layout> FsdpLayout(const ModelConfig& config, int64_t world, int64_t rank,
                                  const LayoutOptions& options = {});

}  // namespace refitd::sharding

#endif  // REFITD_TESTS_WORKLOADS_SHARDING_MEGATRON_H_
