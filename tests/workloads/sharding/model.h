// Models as tables of tensors, in the names and shapes of Hugging Face checkpoints: Qwen3 dense and
// mixture of experts, and models with multi-head latent attention (Moonlight, DeepSeek-V3).
//
// Pure values: no I/O, no gRPC, no CUDA; thread-safe because nothing is shared. Sizes are counts of
// elements unless they say bytes.
#ifndef REFITD_TESTS_WORKLOADS_SHARDING_MODEL_H_
#define REFITD_TESTS_WORKLOADS_SHARDING_MODEL_H_

#include <cstdint>
#include <optional>
#include <span>
#include <string>
#include <string_view>
#include <vector>

#include "absl/status/statusor.h"
#include "transport/plan/block_scales.h"
#include "transport/plan/layout.h"

namespace refitd::sharding {

// Multi-head latent attention; kv_lora 0: the model has ordinary (grouped) attention.
struct LatentAttention {
  int64_t q_lora = 0;  // 0: queries are projected directly
  int64_t kv_lora = 0;
  int64_t nope = 0;  // of a head, without rotary positions
  int64_t rope = 0;
  int64_t v = 0;
  bool operator==(const LatentAttention&) const = default;
};

struct ModelConfig {
  std::string name = {};
  int64_t hidden = 0;
  int64_t layers = 0;
  int64_t heads = 0;
  int64_t kv_heads = 0;  // ordinary attention only, as are head_dim and qk_norms
  int64_t head_dim = 0;
  bool qk_norms = false;  // self_attn.q_norm and k_norm, of head_dim
  LatentAttention mla = {};
  int64_t ffn = 0;      // of the dense layers
  int64_t experts = 0;  // 0: every layer is dense
  int64_t moe_ffn = 0;
  int64_t shared_experts = 0;  // one fused MLP, shared_experts * moe_ffn wide
  int64_t first_dense = 0;     // in a model with experts: the number of first layers that are dense
  bool router_bias = false;    // mlp.gate.e_score_correction_bias, always float32
  int64_t vocabulary = 0;
  bool tied = false;  // lm_head.weight is the embedding and not listed
  DType dtype = DType::kBFloat16;
  // The linear layers' weights (not embedding, lm_head, norms and router) are float8_e4m3fn, and
  // have a float32 scale per block: `<weight's name>_scale_inv` of shape ceil(d / scale_block).
  bool fp8 = false;
  int64_t scale_block = 128;
  bool operator==(const ModelConfig&) const = default;

  bool latent() const { return mla.kv_lora > 0; }
  bool dense(int64_t layer) const { return experts == 0 || layer < first_dense; }
  int64_t q_head_rows() const { return latent() ? mla.nope + mla.rope : head_dim; }
  int64_t v_head_rows() const { return latent() ? mla.v : head_dim; }
};

// Published models: qwen3-0.6b, qwen3-4b, qwen3-30b-a3b, qwen3-235b-a22b, moonlight-16b-a3b,
// deepseek-v3 (without its multi-token-prediction layer). All bfloat16.
std::span<const ModelConfig> KnownModels();
// Finds one of these by its name. INVALID_ARGUMENT lists the known names.
absl::StatusOr<ModelConfig> FindModelConfig(std::string_view name);

// INVALID_ARGUMENT, naming the field, if a size is not positive that must be, kv_heads does not
// divide heads, or there are more tensors than a layout may have.
absl::Status ValidateModel(const ModelConfig& config);

// The sizes to which ScaledDown reduces a model.
struct TinySize {
  int64_t layers = 4;
  int64_t heads = 8;
  int64_t experts = 8;
};
// Makes a small model of the same structure (attention, experts, first dense layers, tying, biases,
// fp8) for tests. Its numbers are at most those of `size`. kv_heads keeps the model's proportion to
// heads (but is at least 1), the width of every projection is a multiple of heads, and the hidden
// and vocabulary sizes are not powers of two. Scale blocks are 8x8, and divide the widths of a head
// and of its share of each MLP.
ModelConfig ScaledDown(const ModelConfig& config, const TinySize& size = {});

// The role of a tensor in its model.
enum class Role : uint8_t {
  kEmbedding,
  kFinalNorm,
  kLmHead,
  // Each layer has the roles that follow.
  kInputNorm,
  kPostAttentionNorm,
  kQ,
  kK,
  kV,
  kQNorm,
  kKNorm,
  kQA,
  kQANorm,
  kQB,
  kKvA,
  kKvANorm,
  kKvB,
  kO,
  kGate,
  kUp,
  kDown,
  kRouter,
  kRouterBias,
  kSharedGate,
  kSharedUp,
  kSharedDown,
  // Each expert of a layer has the roles that follow.
  kExpertGate,
  kExpertUp,
  kExpertDown,
};

// The tensor in that role; layer and expert are used if the role has them. It is not checked that
// the model has such a tensor.
TensorSpec TensorOf(const ModelConfig& config, Role role, int64_t layer = 0, int64_t expert = 0);

// The roles of one layer in order, without the three roles of experts, whose tensors follow the
// router's, expert by expert.
std::vector<Role> LayerRoles(const ModelConfig& config, int64_t layer);

// The scales of a weight, or nullopt for a tensor that has none (see ModelConfig::fp8).
std::optional<TensorSpec> ScaleOf(const ModelConfig& config, const TensorSpec& weight);

// The blocks that the box of a weight touches, as a box of its scale tensor, rounded outwards if
// the box cuts a block. An empty box touches none.
Box ScaleBox(const Box& weight_box, int64_t scale_block);

// All tensors in the order of the model: embedding, layers, final norm, lm_head; a scale follows
// its weight. The config must be valid.
std::vector<TensorSpec> HfTensors(const ModelConfig& config);
int64_t TensorBytes(const TensorSpec& tensor);
// Sum of TensorBytes.
int64_t TotalBytes(std::span<const TensorSpec> tensors);

}  // namespace refitd::sharding

#endif  // REFITD_TESTS_WORKLOADS_SHARDING_MODEL_H_
