#include <algorithm>
#include <catch2/catch.hpp>
#include <string>
#include <vector>

#include "tests/workloads/sharding/mappings.h"
#include "transport/base/status.h"

namespace refitd::sharding {
namespace {

ModelConfig Find(std::string_view name) {
  auto config = FindModelConfig(name);
  INFO(config.status());
  REQUIRE(config.ok());
  return *std::move(config);
}

Layout Must(absl::StatusOr<Layout> layout) {
  INFO(layout.status());
  REQUIRE(layout.ok());
  return *std::move(layout);
}

absl::Status Validate(const Layout& layout, bool destination) {
  const int64_t bytes = ArenaBytes(layout);
  return ValidateLayout(
      layout, [&](RegionId) { return std::optional(bytes); }, destination);
}

std::vector<Piece> PiecesOf(const Layout& layout, std::string_view name) {
  std::vector<Piece> pieces;
  for (const Piece& piece : layout.pieces) {
    if (layout.tensors[piece.tensor].name == name) pieces.push_back(piece);
  }
  return pieces;
}

Piece PieceOf(const Layout& layout, std::string_view name) {
  const auto pieces = PiecesOf(layout, name);
  INFO(name);
  REQUIRE(pieces.size() == 1);
  return pieces[0];
}

std::string Refusal(const absl::StatusOr<Layout>& layout) {
  CHECK(layout.status().code() == absl::StatusCode::kInvalidArgument);
  return std::string(layout.status().message());
}

// ---- published models in full size ----

TEST_CASE("Layouts of every mapping in full size are valid, first and last rank") {
  for (const Mapping& mapping : Mappings()) {
    const ModelConfig config = FullModel(mapping);
    INFO(config.name << " " << mapping.name);
    for (const int64_t rank : {int64_t{0}, mapping.trainer.world - 1}) {
      const auto status = Validate(Must(TrainerLayout(mapping, config, rank)), false);
      INFO(status);
      REQUIRE(status.ok());
    }
    for (const int64_t rank : {int64_t{0}, mapping.engine.world() - 1}) {
      const Layout layout = Must(EngineLayout(mapping, config, rank));
      for (const auto& status : {Validate(layout, true), CheckFloat8Scales(layout)}) {
        INFO(status);
        REQUIRE(status.ok());
      }
    }
  }
}

TEST_CASE("The ranks of one replica hold each byte of the model once but for what is replicated") {
  const ModelConfig config = Find("moonlight-16b-a3b");
  const int64_t model = TotalBytes(HfTensors(config));
  int64_t engine = 0;
  for (int64_t rank = 0; rank < 8; ++rank) {
    engine += Must(VllmLayout(config, {.tp = 8}, rank)).Bytes();
  }
  int64_t replicated = 0;
  for (const TensorSpec& tensor : HfTensors(config)) {
    const bool whole = tensor.shape.size() == 1 || tensor.name.ends_with("mlp.gate.weight") ||
                       tensor.name.find("_a_proj") != std::string::npos;
    if (whole) replicated += TensorBytes(tensor);
  }
  CHECK(engine == model + 7 * replicated);
  int64_t fsdp = 0;
  for (int64_t rank = 0; rank < 8; ++rank) fsdp += Must(FsdpLayout(config, 8, rank)).Bytes();
  CHECK(fsdp == model);
}

// ---- Megatron ----

TEST_CASE("Both meshes of a trainer are made from one world") {
  const TrainerParallel parallel = {.world = 32, .pp = 2, .tp = 8, .ep = 8};
  const auto dense = DenseMesh(parallel);
  const auto expert = ExpertMesh(parallel);
  REQUIRE(dense.ok());
  REQUIRE(expert.ok());
  CHECK(dense->dims() == std::vector<MeshDim>{{"pp", 2}, {"dp", 2}, {"cp", 1}, {"tp", 8}});
  CHECK(expert->dims() == std::vector<MeshDim>{{"pp", 2}, {"edp", 2}, {"ep", 8}, {"etp", 1}});
  const auto message = [](const TrainerParallel& p) { return Message(DenseMesh(p).status()); };
  CHECK(message({.world = 12, .pp = 2, .tp = 4}) ==
        "world 12 is not divisible by pp 2 * cp 1 * tp 4");
  CHECK(ExpertMesh({.world = 8, .pp = 2, .ep = 8}).status().message() ==
        "world 8 is not divisible by pp 2 * ep 8 * etp 1");
  CHECK(message({.world = 8, .tp = 0}) == "tp is 0, 1 to 1048576 are possible");
  CHECK_FALSE(DenseMesh({.world = 0}).ok());
  CHECK_FALSE(DenseMesh({.world = 8, .pp = 1 << 20, .tp = 1 << 20, .cp = 1 << 20}).ok());
}

TEST_CASE("Pipeline stages have the same number of layers, the first ones one more if need be") {
  const ModelConfig config = Find("deepseek-v3");
  std::vector<int64_t> sizes;
  for (int64_t stage = 0; stage < 16; ++stage) {
    sizes.push_back(LayersOfStage(config.layers, 16, stage).extent);
  }
  CHECK(std::count(sizes.begin(), sizes.end(), 4) == 13);
  CHECK(std::is_sorted(sizes.rbegin(), sizes.rend()));
  CHECK(LayersOfStage(config.layers, 16, 15).end() == 61);
}

TEST_CASE("Embedding and head are on the first and last stage, and a tied head on none") {
  const auto holds = [](const ModelConfig& config, int64_t rank, std::string_view name) {
    const Layout layout = Must(MegatronLayout(config, {.world = 4, .pp = 4}, rank));
    return !PiecesOf(layout, name).empty();
  };
  const ModelConfig moe = Find("qwen3-30b-a3b");
  for (int64_t rank = 0; rank < 4; ++rank) {
    CHECK(holds(moe, rank, "model.embed_tokens.weight") == (rank == 0));
    CHECK(holds(moe, rank, "lm_head.weight") == (rank == 3));
    CHECK(holds(moe, rank, "model.norm.weight") == (rank == 3));
    CHECK_FALSE(holds(Find("qwen3-4b"), rank, "lm_head.weight"));
  }
}

TEST_CASE("Megatron's fused QKV is interleaved per KV group") {
  const ModelConfig config = Find("qwen3-4b");  // 32 heads of 128, 8 groups
  const Layout layout = Must(MegatronLayout(config, {.world = 4, .tp = 4}, 1));
  const auto q = PiecesOf(layout, "model.layers.0.self_attn.q_proj.weight");
  const auto k = PiecesOf(layout, "model.layers.0.self_attn.k_proj.weight");
  const auto v = PiecesOf(layout, "model.layers.0.self_attn.v_proj.weight");
  REQUIRE((q.size() == 2 && k.size() == 2 && v.size() == 2));
  const int64_t row_bytes = 2560 * 2;
  for (int64_t g = 0; g < 2; ++g) {
    const int64_t begin = q[0].byte_offset + g * 6 * 128 * row_bytes;
    CHECK(q[g].box == Box{{(2 + g) * 512, 0}, {512, 2560}});
    CHECK(k[g].box == Box{{(2 + g) * 128, 0}, {128, 2560}});
    CHECK(q[g].byte_offset == begin);
    CHECK(k[g].byte_offset == begin + 4 * 128 * row_bytes);
    CHECK(v[g].byte_offset == begin + 5 * 128 * row_bytes);
  }
}

TEST_CASE("A KV group is shared by trainer ranks where there are more of them") {
  const ModelConfig config = Find("qwen3-30b-a3b");  // 32 heads of 128, 4 groups
  const Layout layout = Must(MegatronLayout(config, {.world = 8, .tp = 8}, 5));
  CHECK(PieceOf(layout, "model.layers.0.self_attn.q_proj.weight").box ==
        Box{{5 * 512, 0}, {512, 2048}});
  CHECK(PieceOf(layout, "model.layers.0.self_attn.k_proj.weight").box ==
        Box{{2 * 128, 0}, {128, 2048}});
}

TEST_CASE("A model that the trainer's parallelism does not divide is refused with both numbers") {
  const auto message = [](std::string_view model, const TrainerParallel& parallel) {
    return Refusal(MegatronLayout(Find(model), parallel, 0));
  };
  CHECK(message("qwen3-4b", {.world = 3, .tp = 3}) ==
        "qwen3-4b: heads 32 is not divisible by tp 3");
  CHECK(message("deepseek-v3", {.world = 3, .ep = 3}) ==
        "deepseek-v3: experts 256 is not divisible by ep 3");
  CHECK(message("qwen3-4b", {.world = 37, .pp = 37}) == "qwen3-4b: 36 layers for pp 37");
  CHECK(message("moonlight-16b-a3b", {.world = 3, .etp = 3}) ==
        "moonlight-16b-a3b: moe_ffn 1408 is not divisible by etp 3");
  ModelConfig odd = Find("qwen3-4b");
  odd.heads = 36;
  odd.kv_heads = 6;
  CHECK(Refusal(MegatronLayout(odd, {.world = 4, .tp = 4}, 0)) ==
        "qwen3-4b: kv_heads 6 is not divisible by tp 4");
  odd.kv_heads = 3;
  CHECK(Refusal(MegatronLayout(odd, {.world = 4, .tp = 4}, 0)) ==
        "qwen3-4b: tp 4 is not divisible by kv_heads 3");
  CHECK(Refusal(MegatronLayout(Find("qwen3-4b"), {.world = 2}, 2)) ==
        "rank 2 is not in a mesh of 2 ranks");
  CHECK_FALSE(FsdpLayout(Find("qwen3-4b"), 2, -1).ok());
  CHECK_FALSE(FsdpLayout(Find("qwen3-4b"), 0, 0).ok());
}

// ---- vLLM ----

TEST_CASE("A shard of w2 is a strided view of one stack of experts") {
  const ModelConfig config = Find("qwen3-30b-a3b");  // 128 experts of 768
  const Layout layout = Must(VllmLayout(config, {.tp = 4}, 2));
  const int64_t p = 192;
  const auto expert = [&](int64_t e, std::string_view part) {
    return PieceOf(layout, fmt::format("model.layers.7.mlp.experts.{}.{}_proj.weight", e, part));
  };
  const int64_t w2 = expert(0, "down").byte_offset;
  const int64_t w13 = expert(0, "gate").byte_offset;
  for (const int64_t e : {0, 1, 127}) {
    CHECK(expert(e, "down").box == Box{{0, 2 * p}, {2048, p}});
    CHECK(expert(e, "down").strides == Dims{p, 1});
    CHECK(expert(e, "down").byte_offset == w2 + e * 2048 * p * 2);
    CHECK(expert(e, "gate").byte_offset == w13 + e * 2 * p * 2048 * 2);
    CHECK(expert(e, "up").byte_offset == w13 + (e * 2 + 1) * p * 2048 * 2);
  }
}

TEST_CASE("With expert parallelism an engine rank holds whole experts and no others") {
  const ModelConfig config = Find("qwen3-30b-a3b");
  const Layout layout = Must(VllmLayout(config, {.tp = 4, .ep = true, .instances = 2}, 6));
  const auto down = [&](int64_t e) {
    return PiecesOf(layout, fmt::format("model.layers.0.mlp.experts.{}.down_proj.weight", e));
  };
  CHECK(down(63).empty());
  CHECK(down(96).empty());
  REQUIRE(down(64).size() == 1);
  CHECK(down(64)[0].box == WholeBox({2048, 768}));
  CHECK(layout.Digest() ==
        Must(VllmLayout(config, {.tp = 4, .ep = true, .instances = 2}, 2)).Digest());
}

TEST_CASE("Padding of the vocabulary is storage that no piece has") {
  ModelConfig config = ScaledDown(Find("qwen3-30b-a3b"));  // 133 words: 192 rows, 48 a rank of 4
  const auto rows = [&](int64_t rank) {
    const auto pieces = PiecesOf(Must(VllmLayout(config, {.tp = 4}, rank)), "lm_head.weight");
    return pieces.empty() ? 0 : pieces[0].box.extent[0];
  };
  CHECK(rows(0) == 48);
  CHECK(rows(2) == 133 - 96);
  CHECK(rows(3) == 0);
  // The region of a rank with fewer rows has room for the padding all the same.
  CHECK(ArenaBytes(Must(VllmLayout(config, {.tp = 4}, 3))) ==
        ArenaBytes(Must(VllmLayout(config, {.tp = 4}, 0))));
  const LayoutOptions exact = {.vocabulary_multiple = 7};
  CHECK(PieceOf(Must(VllmLayout(config, {.tp = 1}, 0, exact)), "lm_head.weight").box ==
        WholeBox({133, 20}));
  CHECK(Refusal(VllmLayout(config, {.tp = 4}, 0, exact)) ==
        "tiny-qwen3-30b-a3b: padded vocabulary 133 is not divisible by tp 4");
}

TEST_CASE("A model that the engine's tensor parallelism does not divide is refused") {
  CHECK(Refusal(VllmLayout(Find("qwen3-4b"), {.tp = 3}, 0)) ==
        "qwen3-4b: heads 32 is not divisible by tp 3");
  CHECK(Refusal(
            VllmLayout(ScaledDown(Find("qwen3-30b-a3b"), {.experts = 4}), {.tp = 8, .ep = true}, 0))
            .find("4 experts for expert parallelism over tp 8") != std::string::npos);
  CHECK_FALSE(VllmLayout(Find("qwen3-4b"), {.tp = 0}, 0).ok());
  CHECK_FALSE(VllmLayout(Find("qwen3-4b"), {.tp = 2}, 2).ok());
  CHECK_FALSE(VllmLayout({}, {}, 0).ok());
}

// ---- options ----

TEST_CASE("Options choose region, generation and alignment, and nothing else") {
  const ModelConfig config = Find("qwen3-0.6b");
  const LayoutOptions options = {
      .region = RegionId(9), .alignment_bytes = 4096, .binding_generation = 5};
  const Layout layout = Must(VllmLayout(config, {.tp = 2}, 1, options));
  const Layout standard = Must(VllmLayout(config, {.tp = 2}, 1));
  CHECK(layout.binding_generation == 5);
  CHECK(standard.binding_generation == 1);
  CHECK(layout.Digest() == standard.Digest());
  for (const Piece& piece : layout.pieces) CHECK(piece.region == RegionId(9));
  CHECK(PieceOf(layout, "model.norm.weight").byte_offset % 4096 == 0);
  CHECK(ArenaBytes(layout) > ArenaBytes(standard));
  CHECK_FALSE(VllmLayout(config, {}, 0, {.alignment_bytes = 12}).ok());
  CHECK_FALSE(VllmLayout(config, {}, 0, {.alignment_bytes = 0}).ok());
  CHECK_FALSE(FsdpLayout(config, 1, 0, {.vocabulary_multiple = -1}).ok());
}

// ---- FP8 ----

TEST_CASE("Tensor parallelism that cuts FP8 blocks is found on some rank and named") {
  struct Row {
    std::string_view model;
    int64_t tp;
    bool ep;
    std::string_view culprit;  // empty: no block is cut
  };
  const Row rows[] = {
      {"qwen3-4b", 4, false, ""},
      {"qwen3-30b-a3b", 2, false, ""},
      {"qwen3-30b-a3b", 4, false,
       "model.layers.0.mlp.experts.0.gate_proj.weight: the shard [0, 192)"},
      {"qwen3-30b-a3b", 8, false,
       "model.layers.0.mlp.experts.0.gate_proj.weight: the shard [0, 96)"},
      {"qwen3-30b-a3b", 8, true, ""},
      {"moonlight-16b-a3b", 2, false,
       "model.layers.1.mlp.experts.0.gate_proj.weight: the shard [0, 704)"},
      {"deepseek-v3", 16, false, ""},
      {"deepseek-v3", 32, false, "model.layers.0.mlp.gate_proj.weight: the shard [0, 576)"},
  };
  for (const Row& row : rows) {
    INFO(row.model << " TP" << row.tp);
    ModelConfig config = Find(row.model);
    config.fp8 = true;
    const Layout layout = Must(VllmLayout(config, {.tp = row.tp, .ep = row.ep}, 0));
    REQUIRE(Validate(layout, true).ok());
    const auto status = CheckFloat8Scales(layout);
    INFO(status);
    CHECK(status.ok() == row.culprit.empty());
    if (row.culprit.empty()) continue;
    CHECK(status.code() == absl::StatusCode::kFailedPrecondition);
    CHECK(Message(status).find(row.culprit) != std::string::npos);
  }
}

}  // namespace
}  // namespace refitd::sharding
