// Tensor tables of real models, by their checkpoints' (Hugging Face) names, and seeded contents.
//
// Sources of the dimensions: the models' published config.json files. Pure; thread-safe.
#ifndef REFITD_TESTS_WORKLOADS_MODELS_H_
#define REFITD_TESTS_WORKLOADS_MODELS_H_

#include <cstdint>
#include <span>
#include <string_view>
#include <vector>

#include "absl/status/statusor.h"
#include "transport/plan/layout.h"

namespace refitd::workloads {

// A dense Qwen3 model with tied embeddings (no lm_head), bfloat16.
struct Qwen3Model {
  std::string_view name;
  int64_t hidden = 0;
  int64_t layers = 0;
  int64_t heads = 0;
  int64_t kv_heads = 0;
  int64_t head_dim = 0;
  int64_t ffn = 0;
  int64_t vocabulary = 0;
};

inline constexpr Qwen3Model kQwen3_0_6B = {"qwen3-0.6b", 1024, 28, 16, 8, 128, 3072, 151'936};
inline constexpr Qwen3Model kQwen3_4B = {"qwen3-4b", 2560, 36, 32, 8, 128, 9728, 151'936};
// A model with the same names in a few MiB, for tests.
inline constexpr Qwen3Model kTiny = {"tiny", 256, 4, 4, 2, 64, 768, 8192};

// The model of that name; INVALID_ARGUMENT lists the names that are known.
absl::StatusOr<Qwen3Model> FindModel(std::string_view name);

// The tensors in the order of the model: embedding, layers, final norm.
std::vector<TensorSpec> TensorsOf(const Qwen3Model& model);
int64_t BytesOf(const std::vector<TensorSpec>& tensors);

// Fills with finite bfloat16 values below 2 in magnitude: the same for the same (seed, tensor,
// first_byte), several GB/s. `first_byte` is where `bytes` begins in the tensor, a multiple of 8.
void FillBFloat16(uint64_t seed, uint64_t tensor, int64_t first_byte, std::span<char> bytes);

}  // namespace refitd::workloads

#endif  // REFITD_TESTS_WORKLOADS_MODELS_H_
