#include "tests/workloads/sharding/model.h"

#include <algorithm>
#include <array>
#include <utility>

#include "transport/base/errors.h"
#include "transport/base/status.h"

namespace refitd::sharding {
namespace {

constexpr int64_t kQwen3Vocabulary = 151'936;
// The limit of one dimension; no model comes near it.
constexpr int64_t kMaxSize = int64_t{1} << 24;

ModelConfig Qwen3(std::string name, int64_t hidden, int64_t layers, int64_t heads,
                  int64_t kv_heads) {
  ModelConfig config;
  config.name = std::move(name);
  config.hidden = hidden;
  config.layers = layers;
  config.heads = heads;
  config.kv_heads = kv_heads;
  config.head_dim = 128;
  config.qk_norms = true;
  config.vocabulary = kQwen3Vocabulary;
  return config;
}

ModelConfig Qwen3Dense(std::string name, int64_t hidden, int64_t layers, int64_t heads,
                       int64_t ffn) {
  ModelConfig config = Qwen3(std::move(name), hidden, layers, heads, 8);
  config.ffn = ffn;
  config.tied = true;
  return config;
}

ModelConfig Qwen3Moe(std::string name, int64_t hidden, int64_t layers, int64_t heads,
                     int64_t moe_ffn) {
  ModelConfig config = Qwen3(std::move(name), hidden, layers, heads, 4);
  config.experts = 128;
  config.moe_ffn = moe_ffn;
  return config;
}

ModelConfig Moonlight() {
  ModelConfig config;
  config.name = "moonlight-16b-a3b";
  config.hidden = 2048;
  config.layers = 27;
  config.heads = 16;
  config.mla = {.q_lora = 0, .kv_lora = 512, .nope = 128, .rope = 64, .v = 128};
  config.ffn = 11'264;
  config.experts = 64;
  config.moe_ffn = 1408;
  config.shared_experts = 2;
  config.first_dense = 1;
  config.router_bias = true;
  config.vocabulary = 163'840;
  return config;
}

ModelConfig DeepSeekV3() {
  ModelConfig config;
  config.name = "deepseek-v3";
  config.hidden = 7168;
  config.layers = 61;
  config.heads = 128;
  config.mla = {.q_lora = 1536, .kv_lora = 512, .nope = 128, .rope = 64, .v = 128};
  config.ffn = 18'432;
  config.experts = 256;
  config.moe_ffn = 2048;
  config.shared_experts = 1;
  config.first_dense = 3;
  config.router_bias = true;
  config.vocabulary = 129'280;
  return config;
}

// The properties of a role: the tensor's name, after the layer's or expert's prefix and before
// ".weight", and whether FP8 models quantize the tensor.
struct RoleRow {
  Role role;
  std::string_view name;
  bool linear;
};

constexpr std::array kRoles = {
    RoleRow{Role::kEmbedding, "model.embed_tokens", false},
    RoleRow{Role::kFinalNorm, "model.norm", false},
    RoleRow{Role::kLmHead, "lm_head", false},
    RoleRow{Role::kInputNorm, "input_layernorm", false},
    RoleRow{Role::kPostAttentionNorm, "post_attention_layernorm", false},
    RoleRow{Role::kQ, "self_attn.q_proj", true},
    RoleRow{Role::kK, "self_attn.k_proj", true},
    RoleRow{Role::kV, "self_attn.v_proj", true},
    RoleRow{Role::kQNorm, "self_attn.q_norm", false},
    RoleRow{Role::kKNorm, "self_attn.k_norm", false},
    RoleRow{Role::kQA, "self_attn.q_a_proj", true},
    RoleRow{Role::kQANorm, "self_attn.q_a_layernorm", false},
    RoleRow{Role::kQB, "self_attn.q_b_proj", true},
    RoleRow{Role::kKvA, "self_attn.kv_a_proj_with_mqa", true},
    RoleRow{Role::kKvANorm, "self_attn.kv_a_layernorm", false},
    RoleRow{Role::kKvB, "self_attn.kv_b_proj", true},
    RoleRow{Role::kO, "self_attn.o_proj", true},
    RoleRow{Role::kGate, "mlp.gate_proj", true},
    RoleRow{Role::kUp, "mlp.up_proj", true},
    RoleRow{Role::kDown, "mlp.down_proj", true},
    RoleRow{Role::kRouter, "mlp.gate", false},
    RoleRow{Role::kRouterBias, "mlp.gate.e_score_correction_bias", false},
    RoleRow{Role::kSharedGate, "mlp.shared_experts.gate_proj", true},
    RoleRow{Role::kSharedUp, "mlp.shared_experts.up_proj", true},
    RoleRow{Role::kSharedDown, "mlp.shared_experts.down_proj", true},
    RoleRow{Role::kExpertGate, "gate_proj", true},
    RoleRow{Role::kExpertUp, "up_proj", true},
    RoleRow{Role::kExpertDown, "down_proj", true},
};

constexpr bool InOrder() {
  for (size_t i = 0; i < kRoles.size(); ++i) {
    if (static_cast<size_t>(kRoles[i].role) != i) return false;
  }
  return true;
}
static_assert(InOrder(), "kRoles is indexed by role");

std::string NameOf(Role role, int64_t layer, int64_t expert) {
  const std::string_view name = kRoles[static_cast<size_t>(role)].name;
  if (role <= Role::kLmHead) return fmt::format("{}.weight", name);
  if (role == Role::kRouterBias) return fmt::format("model.layers.{}.{}", layer, name);
  if (role >= Role::kExpertGate) {
    return fmt::format("model.layers.{}.mlp.experts.{}.{}.weight", layer, expert, name);
  }
  return fmt::format("model.layers.{}.{}.weight", layer, name);
}

Dims ShapeOf(const ModelConfig& c, Role role) {
  const int64_t shared_ffn = c.shared_experts * c.moe_ffn;
  switch (role) {
    case Role::kEmbedding:
    case Role::kLmHead:
      return {c.vocabulary, c.hidden};
    case Role::kFinalNorm:
    case Role::kInputNorm:
    case Role::kPostAttentionNorm:
      return {c.hidden};
    case Role::kQ:
      return {c.heads * c.q_head_rows(), c.hidden};
    case Role::kK:
    case Role::kV:
      return {c.kv_heads * c.head_dim, c.hidden};
    case Role::kQNorm:
    case Role::kKNorm:
      return {c.head_dim};
    case Role::kQA:
      return {c.mla.q_lora, c.hidden};
    case Role::kQANorm:
      return {c.mla.q_lora};
    case Role::kQB:
      return {c.heads * c.q_head_rows(), c.mla.q_lora};
    case Role::kKvA:
      return {c.mla.kv_lora + c.mla.rope, c.hidden};
    case Role::kKvANorm:
      return {c.mla.kv_lora};
    case Role::kKvB:
      return {c.heads * (c.mla.nope + c.mla.v), c.mla.kv_lora};
    case Role::kO:
      return {c.hidden, c.heads * c.v_head_rows()};
    case Role::kGate:
    case Role::kUp:
      return {c.ffn, c.hidden};
    case Role::kDown:
      return {c.hidden, c.ffn};
    case Role::kRouter:
      return {c.experts, c.hidden};
    case Role::kRouterBias:
      return {c.experts};
    case Role::kSharedGate:
    case Role::kSharedUp:
      return {shared_ffn, c.hidden};
    case Role::kSharedDown:
      return {c.hidden, shared_ffn};
    case Role::kExpertGate:
    case Role::kExpertUp:
      return {c.moe_ffn, c.hidden};
    case Role::kExpertDown:
      return {c.hidden, c.moe_ffn};
  }
  return {};
}

int64_t Blocks(int64_t n, int64_t block) { return n / block + (n % block == 0 ? 0 : 1); }

void Append(const ModelConfig& config, TensorSpec tensor, std::vector<TensorSpec>* tensors) {
  std::optional<TensorSpec> scale = ScaleOf(config, tensor);
  tensors->push_back(std::move(tensor));
  if (scale.has_value()) tensors->push_back(*std::move(scale));
}

}  // namespace

std::span<const ModelConfig> KnownModels() {
  static const auto* const models = new std::array<ModelConfig, 6>{
      Qwen3Dense("qwen3-0.6b", 1024, 28, 16, 3072),
      Qwen3Dense("qwen3-4b", 2560, 36, 32, 9728),
      Qwen3Moe("qwen3-30b-a3b", 2048, 48, 32, 768),
      Qwen3Moe("qwen3-235b-a22b", 4096, 94, 64, 1536),
      Moonlight(),
      DeepSeekV3(),
  };
  return *models;
}

absl::StatusOr<ModelConfig> FindModelConfig(std::string_view name) {
  std::string known;
  for (const ModelConfig& config : KnownModels()) {
    if (config.name == name) return config;
    known += fmt::format("{}{}", known.empty() ? "" : ", ", config.name);
  }
  return Invalid("no model '{}'; known are {}", name, known);
}

absl::Status ValidateModel(const ModelConfig& c) {
  struct Field {
    std::string_view name;
    int64_t value;
    bool needed;  // must be positive
  };
  const bool dense_layers = c.experts == 0 || c.first_dense > 0;
  const bool latent = c.latent();
  const Field fields[] = {
      {"hidden", c.hidden, true},
      {"layers", c.layers, true},
      {"heads", c.heads, true},
      {"kv_heads", c.kv_heads, !latent},
      {"head_dim", c.head_dim, !latent},
      {"mla.q_lora", c.mla.q_lora, false},
      {"mla.kv_lora", c.mla.kv_lora, false},
      {"mla.nope", c.mla.nope, latent},
      {"mla.rope", c.mla.rope, latent},
      {"mla.v", c.mla.v, latent},
      {"ffn", c.ffn, dense_layers},
      {"experts", c.experts, false},
      {"moe_ffn", c.moe_ffn, c.experts > 0},
      {"shared_experts", c.shared_experts, false},
      {"first_dense", c.first_dense, false},
      {"vocabulary", c.vocabulary, true},
      {"scale_block", c.scale_block, true},
  };
  for (const Field& field : fields) {
    if (field.value < (field.needed ? 1 : 0) || field.value > kMaxSize) {
      return Invalid("model {}: {} is {}, {} to {} are possible", c.name, field.name, field.value,
                     field.needed ? 1 : 0, kMaxSize);
    }
  }
  if (!latent && c.heads % c.kv_heads != 0) {
    return Invalid("model {}: {} heads are not divisible by {} kv_heads", c.name, c.heads,
                   c.kv_heads);
  }
  // This is an upper bound: each expert has three weights and a scale for each of them, and a layer
  // has few other tensors.
  constexpr int64_t kOthers = 64;
  if (c.layers > kMaxTensorsPerLayout / (c.experts * 6 + kOthers)) {
    return Invalid("model {}: {} layers of {} experts are too many tensors", c.name, c.layers,
                   c.experts);
  }
  for (const Role role : {Role::kQ, Role::kKvB, Role::kSharedGate, Role::kEmbedding}) {
    REFITD_RETURN_IF_ERROR(ElementCount(ShapeOf(c, role)).status());
  }
  return absl::OkStatus();
}

ModelConfig ScaledDown(const ModelConfig& config, const TinySize& size) {
  constexpr int64_t kBlock = 8;
  ModelConfig tiny = config;
  tiny.name = fmt::format("tiny-{}", config.name);
  tiny.hidden = 20;
  tiny.layers = std::min(config.layers, size.layers);
  tiny.heads = std::min(config.heads, size.heads);
  tiny.first_dense = std::min<int64_t>(config.first_dense, 1);
  tiny.scale_block = kBlock;
  // A quantized model needs whole blocks in every shard. Without scales, each part of a head gets
  // just enough elements to be told apart from the other parts.
  const int64_t width = config.fp8 ? kBlock : 2;
  if (config.latent()) {
    tiny.mla.q_lora = config.mla.q_lora == 0 ? 0 : 12;
    tiny.mla.kv_lora = 10;
    tiny.mla.nope = width;
    tiny.mla.rope = width;  // even, since rotation takes pairs
    tiny.mla.v = config.fp8 ? kBlock : 3;
  } else {
    tiny.kv_heads = std::max<int64_t>(1, tiny.heads * config.kv_heads / config.heads);
    tiny.head_dim = config.fp8 ? kBlock : 4;
  }
  if (config.ffn > 0) tiny.ffn = tiny.heads * width * 2;
  if (config.experts > 0) {
    tiny.experts = std::min(config.experts, size.experts);
    tiny.moe_ffn = tiny.heads * width;
  }
  tiny.vocabulary = 133;
  return tiny;
}

TensorSpec TensorOf(const ModelConfig& config, Role role, int64_t layer, int64_t expert) {
  DType dtype = config.dtype;
  if (role == Role::kRouterBias) dtype = DType::kFloat32;
  if (config.fp8 && kRoles[static_cast<size_t>(role)].linear) dtype = DType::kFloat8E4M3FN;
  return {NameOf(role, layer, expert), dtype, ShapeOf(config, role)};
}

std::vector<Role> LayerRoles(const ModelConfig& config, int64_t layer) {
  std::vector<Role> roles = {Role::kInputNorm};
  const auto add = [&](std::initializer_list<Role> more) {
    roles.insert(roles.end(), more.begin(), more.end());
  };
  if (!config.latent()) {
    add({Role::kQ, Role::kK, Role::kV, Role::kO});
    if (config.qk_norms) add({Role::kQNorm, Role::kKNorm});
  } else {
    if (config.mla.q_lora > 0) {
      add({Role::kQA, Role::kQANorm, Role::kQB});
    } else {
      add({Role::kQ});
    }
    add({Role::kKvA, Role::kKvANorm, Role::kKvB, Role::kO});
  }
  add({Role::kPostAttentionNorm});
  if (config.dense(layer)) {
    add({Role::kGate, Role::kUp, Role::kDown});
    return roles;
  }
  if (config.shared_experts > 0) add({Role::kSharedGate, Role::kSharedUp, Role::kSharedDown});
  add({Role::kRouter});
  if (config.router_bias) add({Role::kRouterBias});
  return roles;
}

std::optional<TensorSpec> ScaleOf(const ModelConfig& config, const TensorSpec& weight) {
  if (!config.fp8 || weight.dtype != DType::kFloat8E4M3FN) return std::nullopt;
  TensorSpec scale = {weight.name + std::string(kScaleSuffix), DType::kFloat32, weight.shape};
  for (int64_t& n : scale.shape) n = Blocks(n, config.scale_block);
  return scale;
}

Box ScaleBox(const Box& weight_box, int64_t scale_block) {
  Box box = weight_box;
  for (size_t d = 0; d < box.offset.size(); ++d) {
    const int64_t end = Blocks(weight_box.offset[d] + weight_box.extent[d], scale_block);
    box.offset[d] = weight_box.offset[d] / scale_block;
    box.extent[d] = weight_box.extent[d] == 0 ? 0 : end - box.offset[d];
  }
  return box;
}

std::vector<TensorSpec> HfTensors(const ModelConfig& config) {
  std::vector<TensorSpec> tensors;
  const auto add = [&](Role role, int64_t layer = 0, int64_t expert = 0) {
    Append(config, TensorOf(config, role, layer, expert), &tensors);
  };
  add(Role::kEmbedding);
  for (int64_t layer = 0; layer < config.layers; ++layer) {
    for (const Role role : LayerRoles(config, layer)) add(role, layer);
    if (config.dense(layer)) continue;
    for (int64_t expert = 0; expert < config.experts; ++expert) {
      for (const Role role : {Role::kExpertGate, Role::kExpertUp, Role::kExpertDown}) {
        add(role, layer, expert);
      }
    }
  }
  add(Role::kFinalNorm);
  if (!config.tied) add(Role::kLmHead);
  return tensors;
}

int64_t TensorBytes(const TensorSpec& tensor) {
  return ElementCount(WholeBox(tensor.shape)) * ElementBytes(tensor.dtype);
}

int64_t TotalBytes(std::span<const TensorSpec> tensors) {
  int64_t bytes = 0;
  for (const TensorSpec& tensor : tensors) bytes += TensorBytes(tensor);
  return bytes;
}

}  // namespace refitd::sharding
