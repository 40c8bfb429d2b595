#include "tests/workloads/models.h"

#include <array>
#include <cstring>

#include "tests/workloads/sharding/model.h"
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

sharding::ModelConfig ConfigOf(const Qwen3Model& model) {
  sharding::ModelConfig config;
  config.name = model.name;
  config.hidden = model.hidden;
  config.layers = model.layers;
  config.heads = model.heads;
  config.kv_heads = model.kv_heads;
  config.head_dim = model.head_dim;
  config.qk_norms = true;
  config.ffn = model.ffn;
  config.vocabulary = model.vocabulary;
  config.tied = true;
  return config;
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
  return sharding::HfTensors(ConfigOf(model));
}

int64_t BytesOf(const std::vector<TensorSpec>& tensors) { return sharding::TotalBytes(tensors); }

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
