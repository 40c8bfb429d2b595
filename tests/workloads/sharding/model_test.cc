#include "tests/workloads/sharding/model.h"

#include <catch2/catch.hpp>
#include <set>
#include <string>

namespace refitd::sharding {
namespace {

ModelConfig Find(std::string_view name) {
  auto config = FindModelConfig(name);
  INFO(config.status());
  REQUIRE(config.ok());
  return *std::move(config);
}

const TensorSpec* Named(const std::vector<TensorSpec>& tensors, std::string_view name) {
  for (const TensorSpec& tensor : tensors) {
    if (tensor.name == name) return &tensor;
  }
  return nullptr;
}

TEST_CASE("The tables have as many tensors and bytes as the published models") {
  struct Row {
    std::string_view name;
    size_t tensors;
    double gib;
    double margin;
  };
  const Row rows[] = {
      {"qwen3-0.6b", 310, 1.11, 0.005},          {"qwen3-4b", 398, 7.49, 0.005},
      {"qwen3-30b-a3b", 18'867, 56.87, 0.005},   {"qwen3-235b-a22b", 36'945, 437.9, 0.05},
      {"moonlight-16b-a3b", 5317, 29.73, 0.005}, {"deepseek-v3", 45'395, 1249.9, 0.05},
  };
  REQUIRE(KnownModels().size() == std::size(rows));
  for (const Row& row : rows) {
    const ModelConfig config = Find(row.name);
    REQUIRE(ValidateModel(config).ok());
    const auto tensors = HfTensors(config);
    INFO(row.name);
    CHECK(tensors.size() == row.tensors);
    CHECK(static_cast<double>(TotalBytes(tensors)) / (1 << 30) ==
          Approx(row.gib).margin(row.margin));
    std::set<std::string_view> names;
    for (const TensorSpec& tensor : tensors) {
      REQUIRE(ValidateTensor(tensor).ok());
      REQUIRE(names.insert(tensor.name).second);
    }
  }
  CHECK(FindModelConfig("none").status().message().find("deepseek-v3") != std::string::npos);
}

TEST_CASE("Tensors have the checkpoints' names, shapes and dtypes") {
  const auto deepseek = HfTensors(Find("deepseek-v3"));
  const auto check = [](const std::vector<TensorSpec>& tensors, const TensorSpec& expected) {
    INFO(expected.name);
    const TensorSpec* tensor = Named(tensors, expected.name);
    REQUIRE(tensor != nullptr);
    CHECK(*tensor == expected);
  };
  constexpr DType kBf16 = DType::kBFloat16;
  check(deepseek, {"model.embed_tokens.weight", kBf16, {129'280, 7168}});
  check(deepseek, {"model.layers.0.self_attn.q_a_proj.weight", kBf16, {1536, 7168}});
  check(deepseek, {"model.layers.0.self_attn.q_b_proj.weight", kBf16, {24'576, 1536}});
  check(deepseek, {"model.layers.60.self_attn.kv_a_proj_with_mqa.weight", kBf16, {576, 7168}});
  check(deepseek, {"model.layers.60.self_attn.kv_b_proj.weight", kBf16, {32'768, 512}});
  check(deepseek, {"model.layers.60.self_attn.o_proj.weight", kBf16, {7168, 16'384}});
  check(deepseek, {"model.layers.2.mlp.down_proj.weight", kBf16, {7168, 18'432}});
  check(deepseek, {"model.layers.3.mlp.gate.weight", kBf16, {256, 7168}});
  check(deepseek, {"model.layers.3.mlp.gate.e_score_correction_bias", DType::kFloat32, {256}});
  check(deepseek, {"model.layers.3.mlp.experts.255.down_proj.weight", kBf16, {7168, 2048}});
  check(deepseek, {"model.layers.3.mlp.shared_experts.up_proj.weight", kBf16, {2048, 7168}});
  CHECK(deepseek.back().name == "lm_head.weight");
  const auto moonlight = HfTensors(Find("moonlight-16b-a3b"));
  check(moonlight, {"model.layers.1.mlp.shared_experts.gate_proj.weight", kBf16, {2816, 2048}});
  check(moonlight, {"model.layers.0.self_attn.q_proj.weight", kBf16, {3072, 2048}});
  const auto qwen = HfTensors(Find("qwen3-4b"));
  CHECK(qwen.back().name == "model.norm.weight");
  check(qwen, {"model.layers.35.self_attn.k_proj.weight", kBf16, {1024, 2560}});
  check(qwen, {"model.layers.35.self_attn.q_norm.weight", kBf16, {128}});
}

TEST_CASE("Of an FP8 model the linear layers are quantized and followed by a scale a block") {
  ModelConfig config = Find("deepseek-v3");
  config.fp8 = true;
  const auto tensors = HfTensors(config);
  const auto plain = HfTensors(Find("deepseek-v3"));
  size_t scales = 0;
  for (size_t i = 0; i < tensors.size(); ++i) {
    if (!tensors[i].name.ends_with(kScaleSuffix)) continue;
    ++scales;
    const TensorSpec& weight = tensors[i - 1];
    REQUIRE(tensors[i].name == weight.name + "_scale_inv");
    REQUIRE(tensors[i].dtype == DType::kFloat32);
    REQUIRE(weight.dtype == DType::kFloat8E4M3FN);
    for (size_t d = 0; d < 2; ++d) REQUIRE(tensors[i].shape[d] == (weight.shape[d] + 127) / 128);
  }
  CHECK(tensors.size() == plain.size() + scales);
  // All tensors have scales but embedding, head, norms, routers and the routers' biases.
  CHECK(plain.size() - scales == 2 + 1 + 61 * 4 + 58 * 2);
  CHECK(Named(tensors, "model.layers.9.self_attn.kv_a_proj_with_mqa.weight_scale_inv")->shape ==
        Dims{5, 56});
  CHECK(Named(tensors, "model.layers.9.mlp.gate.weight")->dtype == DType::kBFloat16);
}

TEST_CASE("A model that can't be is refused naming the field") {
  const auto message = [](const auto& change) {
    ModelConfig config = Find("moonlight-16b-a3b");
    change(config);
    return std::string(ValidateModel(config).message());
  };
  CHECK(message([](ModelConfig& c) { c.hidden = 0; }).find("hidden is 0") != std::string::npos);
  CHECK(message([](ModelConfig& c) { c.mla.v = -1; }).find("mla.v is -1") != std::string::npos);
  CHECK(message([](ModelConfig& c) { c.moe_ffn = 0; }).find("moe_ffn") != std::string::npos);
  CHECK(message([](ModelConfig& c) { c.ffn = 0; }).find(" ffn") != std::string::npos);
  CHECK(message([](ModelConfig& c) { c.experts = 1 << 20; }).find("too many") != std::string::npos);
  CHECK(message([](ModelConfig& c) { c.scale_block = 0; }).find("block") != std::string::npos);
  ModelConfig config = Find("qwen3-4b");
  config.kv_heads = 5;
  CHECK_FALSE(ValidateModel(config).ok());
}

TEST_CASE("A model scaled down keeps its structure") {
  for (const ModelConfig& config : KnownModels()) {
    for (const bool fp8 : {false, true}) {
      ModelConfig full = config;
      full.fp8 = fp8;
      const ModelConfig tiny = ScaledDown(full);
      INFO(tiny.name);
      REQUIRE(ValidateModel(tiny).ok());
      CHECK(TotalBytes(HfTensors(tiny)) < 2 << 20);
      // The tensors of a layer are those of the last layer of the real model.
      const auto of_layer = [](const ModelConfig& c) {
        std::set<std::string> names;
        const std::string prefix = "model.layers." + std::to_string(c.layers - 1) + ".";
        for (const TensorSpec& tensor : HfTensors(c)) {
          if (!tensor.name.starts_with(prefix)) continue;
          const std::string name = tensor.name.substr(prefix.size());
          if (!name.starts_with("mlp.experts.") || name.starts_with("mlp.experts.0.")) {
            names.insert(name);
          }
        }
        return names;
      };
      CHECK(of_layer(tiny) == of_layer(full));
    }
  }
}

}  // namespace
}  // namespace refitd::sharding
