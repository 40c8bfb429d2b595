#include "tests/workloads/models.h"

#include <array>
#include <cstring>

#include "transport/base/status.h"

namespace refitd::workloads {
namespace {

constexpr std::array<Qwen3Model, 3> kModels = {kQwen3_0_6B, kQwen3_4B, kTiny};

// One step of splitmix64's output function.
constexpr uint64_t Mix(uint64_t x) {
  x = (x ^ (x >> 30)) * 0xbf58476d1ce4e5b9;
  x = (x ^ (x >> 27)) * 0x94d049bb133111eb;
  return x ^ (x >> 31);
}

// Clears the top exponent bit of four bfloat16: below 2, never infinite and never NaN.
constexpr uint64_t kFiniteMask = 0xbfffbfffbfffbfff;

void AddLayer(const Qwen3Model& m, int64_t layer, std::vector<TensorSpec>* tensors) {
  const auto add = [&](std::string_view name, Dims shape) {
    tensors->push_back(
        {fmt::format("model.layers.{}.{}.weight", layer, name), DType::kBFloat16, shape});
  };
  add("input_layernorm", {m.hidden});
  add("self_attn.q_proj", {m.heads * m.head_dim, m.hidden});
  add("self_attn.k_proj", {m.kv_heads * m.head_dim, m.hidden});
  add("self_attn.v_proj", {m.kv_heads * m.head_dim, m.hidden});
  add("self_attn.o_proj", {m.hidden, m.heads * m.head_dim});
  add("self_attn.q_norm", {m.head_dim});
  add("self_attn.k_norm", {m.head_dim});
  add("post_attention_layernorm", {m.hidden});
  add("mlp.gate_proj", {m.ffn, m.hidden});
  add("mlp.up_proj", {m.ffn, m.hidden});
  add("mlp.down_proj", {m.hidden, m.ffn});
}

}  // namespace

absl::StatusOr<Qwen3Model> FindModel(std::string_view name) {
  std::string known;
  for (const Qwen3Model& model : kModels) {
    if (model.name == name) return model;
    known += fmt::format("{}{}", known.empty() ? "" : ", ", model.name);
  }
  return Error(absl::StatusCode::kInvalidArgument, "no model '{}'; known are {}", name, known);
}

std::vector<TensorSpec> TensorsOf(const Qwen3Model& model) {
  std::vector<TensorSpec> tensors;
  tensors.push_back(
      {"model.embed_tokens.weight", DType::kBFloat16, {model.vocabulary, model.hidden}});
  for (int64_t layer = 0; layer < model.layers; ++layer) AddLayer(model, layer, &tensors);
  tensors.push_back({"model.norm.weight", DType::kBFloat16, {model.hidden}});
  return tensors;
}

int64_t BytesOf(const std::vector<TensorSpec>& tensors) {
  int64_t bytes = 0;
  for (const TensorSpec& tensor : tensors) {
    bytes += *ElementCount(tensor.shape) * ElementBytes(tensor.dtype);
  }
  return bytes;
}

void FillBFloat16(uint64_t seed, uint64_t tensor, int64_t first_byte, std::span<char> bytes) {
  REFITD_CHECK(first_byte % 8 == 0);
  const uint64_t base = Mix(Mix(seed + 1) + tensor);
  auto word = static_cast<uint64_t>(first_byte / 8);
  size_t at = 0;
  for (; at + 8 <= bytes.size(); at += 8, ++word) {
    const uint64_t value = Mix(base + word * 0x9e3779b97f4a7c15) & kFiniteMask;
    std::memcpy(bytes.data() + at, &value, 8);
  }
  const uint64_t value = Mix(base + word * 0x9e3779b97f4a7c15) & kFiniteMask;
  std::memcpy(bytes.data() + at, &value, bytes.size() - at);
}

}  // namespace refitd::workloads
