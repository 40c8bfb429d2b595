// Layouts of engine ranks, as vLLM keeps its parameters.
//
// Pure values: no I/O, no gRPC, no CUDA; thread-safe because nothing is shared.
//
// The tensors that a rank r of tp holds, in the order of its arena (each line a parameter):
//   embed_tokens             rows, of a vocabulary padded to a multiple of 64
//                            (LayoutOptions::vocabulary_multiple); the last ranks may hold fewer or
//                            no rows
//   of each layer:
//     input_layernorm
//     qkv_proj               [q_r | k_r | v_r] stacked rows; with fewer KV heads than ranks,
//                            tp / kv_heads ranks hold the same head
//     o_proj                 columns
//     q_norm, k_norm
//   or, for latent attention: input_layernorm, fused_qkv_a_proj [q_a | kv_a] replicated,
//     q_a_layernorm, q_b_proj rows (without q_lora: q_proj rows, kv_a_proj_with_mqa replicated),
//     kv_a_layernorm, kv_b_proj rows, o_proj columns
//     post_attention_layernorm
//     gate_up_proj           [gate_r; up_r]
//     down_proj              columns
//   or, in a layer of experts: shared_experts' gate_up_proj and down_proj, gate (router),
//     e_score_correction_bias,
//     w13 [E_local, 2P, H]   of each expert gate, then up
//     w2 [E_local, H, P]
//     With expert parallelism (over the tp ranks) E_local experts in rank order, one more on the
//     first ranks where there is a remainder, and P = moe_ffn; else all experts, P = moe_ffn / tp.
//   lm_head                  unless tied: as embed_tokens
//   norm
// FP8 scales lie after their parameter, and are fused as the parameter is. They are the scales of
// the blocks that each part touches; CheckFloat8Scales (transport/plan/block_scales.h) tells where
// a shard cuts a block.
#ifndef REFITD_TESTS_WORKLOADS_SHARDING_VLLM_H_
#define REFITD_TESTS_WORKLOADS_SHARDING_VLLM_H_

#include <cstdint>

#include "absl/status/statusor.h"
#include "tests/workloads/sharding/arena.h"
#include "tests/workloads/sharding/mesh.h"
#include "tests/workloads/sharding/model.h"
#include "transport/plan/layout.h"

namespace refitd::sharding {

struct EngineParallel {
  int64_t tp = 1;
  bool ep = false;        // experts by expert parallel over the tp ranks, else by tensor parallel
  int64_t instances = 1;  // data parallel
  int64_t world() const { return tp * instances; }
  bool operator==(const EngineParallel&) const = default;
};

// The layout of `rank` of tp * instances, tp innermost: ranks with the same rank % tp have equal
// layouts. INVALID_ARGUMENT: no such rank, or a model that tp does not divide, naming both numbers.
absl::StatusOr<Layout> VllmLayout(const ModelConfig& config, const EngineParallel& parallel,
                                  int64_t rank, const LayoutOptions& options = {});

}  // namespace refitd::sharding

#endif  // REFITD_TESTS_WORKLOADS_SHARDING_VLLM_H_
