// Prints the layouts of trainer and engine ranks as JSON, for tests in other languages to compare
// with: one line for the tiny model of each mapping of mappings.h.
//
// A line: {"name", "model": {fields of ModelConfig}, "fsdp", "parallel": {fields of
// TrainerParallel}, "ranks": [{"tensors": [[name, dtype, shape]], "pieces": [[tensor, offset,
// extent, byte_offset, strides]]}], "instances", "engine_ranks": as "ranks", of one instance, as
// all instances have the same}. Sizes and offsets are in elements, but for byte_offset.
#include <cstdio>
#include <string>

#include "fmt/format.h"
#include "nlohmann/json.hpp"
#include "tests/workloads/sharding/mappings.h"
#include "transport/base/status.h"

namespace refitd::sharding {
namespace {

using nlohmann::json;

json List(const Dims& dims) { return std::vector<int64_t>(dims.begin(), dims.end()); }

json ModelJson(const ModelConfig& c) {
  return {{"name", c.name},
          {"hidden", c.hidden},
          {"layers", c.layers},
          {"heads", c.heads},
          {"kv_heads", c.kv_heads},
          {"head_dim", c.head_dim},
          {"qk_norms", c.qk_norms},
          {"q_lora", c.mla.q_lora},
          {"kv_lora", c.mla.kv_lora},
          {"nope", c.mla.nope},
          {"rope", c.mla.rope},
          {"v", c.mla.v},
          {"ffn", c.ffn},
          {"experts", c.experts},
          {"moe_ffn", c.moe_ffn},
          {"shared_experts", c.shared_experts},
          {"first_dense", c.first_dense},
          {"router_bias", c.router_bias},
          {"vocabulary", c.vocabulary},
          {"tied", c.tied},
          {"fp8", c.fp8}};
}

json ParallelJson(const TrainerParallel& p) {
  return {{"world", p.world}, {"pp", p.pp},   {"tp", p.tp},
          {"ep", p.ep},       {"etp", p.etp}, {"cp", p.cp}};
}

json LayoutJson(const Layout& layout) {
  json tensors = json::array();
  for (const TensorSpec& t : layout.tensors) {
    tensors.push_back({t.name, DTypeName(t.dtype), List(t.shape)});
  }
  json pieces = json::array();
  for (const Piece& p : layout.pieces) {
    pieces.push_back(
        {p.tensor, List(p.box.offset), List(p.box.extent), p.byte_offset, List(p.strides)});
  }
  return {{"tensors", std::move(tensors)}, {"pieces", std::move(pieces)}};
}

// The layouts of ranks 0 to `count` - 1, which `layout_of` makes.
template <typename LayoutOf>
absl::StatusOr<json> Ranks(int64_t count, const LayoutOf& layout_of) {
  json ranks = json::array();
  for (int64_t rank = 0; rank < count; ++rank) {
    REFITD_ASSIGN_OR_RETURN(const Layout layout, layout_of(rank));
    ranks.push_back(LayoutJson(layout));
  }
  return ranks;
}

absl::StatusOr<json> Line(const Mapping& mapping) {
  const ModelConfig model = TinyModel(mapping);
  REFITD_ASSIGN_OR_RETURN(json trainers, Ranks(mapping.trainer.world, [&](int64_t rank) {
                            return TrainerLayout(mapping, model, rank);
                          }));
  REFITD_ASSIGN_OR_RETURN(json engines, Ranks(mapping.engine.tp, [&](int64_t rank) {
                            return EngineLayout(mapping, model, rank);
                          }));
  return json{{"name", mapping.name},
              {"model", ModelJson(model)},
              {"fsdp", mapping.fsdp},
              {"parallel", ParallelJson(mapping.trainer)},
              {"ranks", std::move(trainers)},
              {"instances", mapping.engine.instances},
              {"engine_ranks", std::move(engines)}};
}

int Main() {
  for (const Mapping& mapping : Mappings()) {
    const absl::StatusOr<json> line = Line(mapping);
    if (!line.ok()) {
      fmt::print(stderr, "{}: {}\n", mapping.name, std::string(line.status().message()));
      return 1;
    }
    fmt::print("{}\n", line->dump());
  }
  return 0;
}

}  // namespace
}  // namespace refitd::sharding

int main() { return refitd::sharding::Main(); }
