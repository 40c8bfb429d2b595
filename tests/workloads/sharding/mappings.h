// Trainer-to-engine mappings that tests and benchmarks share: those of published measurements, some
// with FP8, and some for other cases.
//
// Pure values: no I/O, no gRPC, no CUDA; thread-safe because nothing is shared.
#ifndef REFITD_TESTS_WORKLOADS_SHARDING_MAPPINGS_H_
#define REFITD_TESTS_WORKLOADS_SHARDING_MAPPINGS_H_

#include <cstdint>
#include <span>
#include <string_view>

#include "absl/status/statusor.h"
#include "tests/workloads/sharding/megatron.h"
#include "tests/workloads/sharding/model.h"
#include "tests/workloads/sharding/vllm.h"
#include "transport/plan/layout.h"

namespace refitd::sharding {

struct Mapping {
  std::string_view name = {};   // "EP4xTP2xDP2->TP4xDP4"; with the model and fp8, unique
  std::string_view model = {};  // a name of KnownModels
  bool fp8 = false;
  bool fsdp = false;  // the trainer is fully sharded over trainer.world, else as Megatron
  TrainerParallel trainer = {};  // also has the world size, which the name does not tell
  EngineParallel engine = {};    // its world size is tp * instances
  TinySize tiny = {};            // a size that the mapping divides
};

std::span<const Mapping> Mappings();

// The model of the mapping: as published, or ScaledDown to a size that the mapping divides.
ModelConfig FullModel(const Mapping& mapping);
ModelConfig TinyModel(const Mapping& mapping);

// The layout of trainer rank 0 to trainer.world-1, and of engine rank 0 to engine.world()-1.
absl::StatusOr<Layout> TrainerLayout(const Mapping& mapping, const ModelConfig& config,
                                     int64_t rank, const LayoutOptions& options = {});
absl::StatusOr<Layout> EngineLayout(const Mapping& mapping, const ModelConfig& config, int64_t rank,
                                    const LayoutOptions& options = {});

}  // namespace refitd::sharding

#endif  // REFITD_TESTS_WORKLOADS_SHARDING_MAPPINGS_H_
