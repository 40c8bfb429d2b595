#include "tests/workloads/sharding/mappings.h"

#include "transport/base/status.h"

namespace refitd::sharding {
namespace {

constexpr std::string_view kDense = "qwen3-4b";
constexpr std::string_view kMoe = "qwen3-30b-a3b";
constexpr std::string_view kLargeMoe = "qwen3-235b-a22b";
constexpr std::string_view kLatentMoe = "moonlight-16b-a3b";
constexpr std::string_view kLargeLatentMoe = "deepseek-v3";

constexpr EngineParallel Tp(int64_t tp, int64_t instances) {
  return {.tp = tp, .ep = false, .instances = instances};
}
constexpr EngineParallel Ep(int64_t tp, int64_t instances) {
  return {.tp = tp, .ep = true, .instances = instances};
}

constexpr Mapping kMappings[] = {
    // Mappings of a dense model, with 8 ranks on each side.
    {.name = "DP8->DP8", .model = kDense, .trainer = {.world = 8}, .engine = Tp(1, 8)},
    {.name = "DP8->TP8", .model = kDense, .trainer = {.world = 8}, .engine = Tp(8, 1)},
    {.name = "PP2xDP4->TP4xDP2",
     .model = kDense,
     .trainer = {.world = 8, .pp = 2},
     .engine = Tp(4, 2)},
    {.name = "PP4xDP2->TP4xDP2",
     .model = kDense,
     .trainer = {.world = 8, .pp = 4},
     .engine = Tp(4, 2),
     .tiny = {.layers = 6}},
    {.name = "TP2xPP2xDP2->TP4xDP2",
     .model = kDense,
     .trainer = {.world = 8, .pp = 2, .tp = 2},
     .engine = Tp(4, 2),
     .tiny = {.layers = 3}},
    {.name = "TP2xDP4->TP4xDP2",
     .model = kDense,
     .trainer = {.world = 8, .tp = 2},
     .engine = Tp(4, 2)},
    {.name = "TP4xDP2->TP2xDP4",
     .model = kDense,
     .trainer = {.world = 8, .tp = 4},
     .engine = Tp(2, 4)},
    {.name = "TP2xCP2xDP2->TP4xDP2",
     .model = "qwen3-0.6b",
     .trainer = {.world = 8, .tp = 2, .cp = 2},
     .engine = Tp(4, 2)},
    // Mappings of a model with experts, with 16 ranks on each side.
    {.name = "EP4xTP2xDP2->TP4xDP4",
     .model = kMoe,
     .trainer = {.world = 16, .tp = 2, .ep = 4, .etp = 2},
     .engine = Tp(4, 4)},
    {.name = "EP4xTP2xPP2->TP4xDP4",
     .model = kMoe,
     .trainer = {.world = 16, .pp = 2, .tp = 2, .ep = 4},
     .engine = Tp(4, 4)},
    {.name = "EP8xPP2->TP2xDP8",
     .model = kMoe,
     .trainer = {.world = 16, .pp = 2, .ep = 8},
     .engine = Tp(2, 8)},
    {.name = "EP8xPP2->TP8xDP2",
     .model = kMoe,
     .trainer = {.world = 16, .pp = 2, .ep = 8},
     .engine = Tp(8, 2)},
    {.name = "EP8xTP2->TP4xDP4",
     .model = kLatentMoe,
     .trainer = {.world = 16, .tp = 2, .ep = 8, .etp = 2},
     .engine = Tp(4, 4)},
    {.name = "EP8xPP2->EP4xDP4",
     .model = kMoe,
     .trainer = {.world = 16, .pp = 2, .ep = 8},
     .engine = Ep(4, 4)},
    {.name = "EP2xTP2->EP4",  // tiny: 6 experts, which the engine's ranks don't divide
     .model = kLatentMoe,
     .trainer = {.world = 4, .tp = 2, .ep = 2},
     .engine = Ep(4, 1),
     .tiny = {.experts = 6}},
    // Larger mappings. In the first, expert parallelism spans the tensor-parallel ranks of a stage,
    // and data parallelism replicates the experts (EDP 2). In the second, expert parallelism spans
    // all ranks of a stage.
    {.name = "EP8xTP8xPP2xDP2->TP8xDP2",
     .model = kLatentMoe,
     .trainer = {.world = 32, .pp = 2, .tp = 8, .ep = 8},
     .engine = Tp(8, 2)},
    {.name = "TP4xPP8xEP16->TP8xDP16",
     .model = kLargeMoe,
     .trainer = {.world = 128, .pp = 8, .tp = 4, .ep = 16},
     .engine = Tp(8, 16),
     .tiny = {.layers = 10, .heads = 16, .experts = 16}},
    {.name = "PP16xEP16->TP32xDP8",
     .model = kLargeLatentMoe,
     .trainer = {.world = 256, .pp = 16, .ep = 16},
     .engine = Tp(32, 8),
     .tiny = {.layers = 17, .heads = 32, .experts = 16}},
    // Mappings from fully sharded trainers.
    {.name = "FSDP4->TP4",
     .model = kDense,
     .fsdp = true,
     .trainer = {.world = 4},
     .engine = Tp(4, 1)},
    {.name = "FSDP4->TP4",
     .model = kMoe,
     .fsdp = true,
     .trainer = {.world = 4},
     .engine = Tp(4, 1)},
    {.name = "FSDP4->TP4",
     .model = kLatentMoe,
     .fsdp = true,
     .trainer = {.world = 4},
     .engine = Tp(4, 1)},
    {.name = "FSDP8->EP4xDP2",
     .model = kLargeLatentMoe,
     .fsdp = true,
     .trainer = {.world = 8},
     .engine = Ep(4, 2)},
    // Mappings of FP8 weights with block scales.
    {.name = "DP8->DP8", .model = kDense, .fp8 = true, .trainer = {.world = 8}, .engine = Tp(1, 8)},
    {.name = "DP8->TP4xDP2",
     .model = kDense,
     .fp8 = true,
     .trainer = {.world = 8},
     .engine = Tp(4, 2)},
    {.name = "PP2xDP4->TP4xDP2",
     .model = kDense,
     .fp8 = true,
     .trainer = {.world = 8, .pp = 2},
     .engine = Tp(4, 2)},
    {.name = "PP4xDP2->TP4xDP2",
     .model = kDense,
     .fp8 = true,
     .trainer = {.world = 8, .pp = 4},
     .engine = Tp(4, 2)},
    {.name = "TP2xDP4->TP4xDP2",
     .model = kDense,
     .fp8 = true,
     .trainer = {.world = 8, .tp = 2},
     .engine = Tp(4, 2)},
    {.name = "EP4xTP2xPP2->TP2xDP8",
     .model = kMoe,
     .fp8 = true,
     .trainer = {.world = 16, .pp = 2, .tp = 2, .ep = 4},
     .engine = Tp(2, 8)},
    {.name = "EP8xPP2->TP2xDP8",
     .model = kMoe,
     .fp8 = true,
     .trainer = {.world = 16, .pp = 2, .ep = 8},
     .engine = Tp(2, 8)},
    {.name = "EP8xDP2->TP2xDP8",
     .model = kMoe,
     .fp8 = true,
     .trainer = {.world = 16, .ep = 8},
     .engine = Tp(2, 8)},
    {.name = "EP16xPP2->TP4xDP8",
     .model = kLargeLatentMoe,
     .fp8 = true,
     .trainer = {.world = 32, .pp = 2, .ep = 16},
     .engine = Tp(4, 8),
     .tiny = {.experts = 16}},
};

}  // namespace

std::span<const Mapping> Mappings() { return kMappings; }

ModelConfig FullModel(const Mapping& mapping) {
  absl::StatusOr<ModelConfig> config = FindModelConfig(mapping.model);
  REFITD_CHECK(config.ok());
  config->fp8 = mapping.fp8;
  return *std::move(config);
}

ModelConfig TinyModel(const Mapping& mapping) {
  return ScaledDown(FullModel(mapping), mapping.tiny);
}

absl::StatusOr<Layout> TrainerLayout(const Mapping& mapping, const ModelConfig& config,
                                     int64_t rank, const LayoutOptions& options) {
  if (mapping.fsdp) return FsdpLayout(config, mapping.trainer.world, rank, options);
  return MegatronLayout(config, mapping.trainer, rank, options);
}

absl::StatusOr<Layout> EngineLayout(const Mapping& mapping, const ModelConfig& config, int64_t rank,
                                    const LayoutOptions& options) {
  return VllmLayout(config, mapping.engine, rank, options);
}

}  // namespace refitd::sharding
