#include <algorithm>
#include <catch2/catch.hpp>
#include <memory>
#include <numeric>
#include <random>
#include <string>
#include <vector>

#include "tests/workloads/sharding/mappings.h"
#include "tests/workloads/sharding/oracle.h"
#include "transport/base/status.h"
#include "transport/plan/node_program.h"
#include "transport/plan/plan.h"
#include "transport/plan/route.h"

namespace refitd::sharding {
namespace {

using LayoutPtr = std::shared_ptr<const Layout>;

std::string Label(const Mapping& mapping) {
  return fmt::format("{}{} {}", mapping.model, mapping.fp8 ? " fp8" : "", mapping.name);
}

LayoutPtr Share(absl::StatusOr<Layout> layout, bool destination) {
  INFO(layout.status());
  REQUIRE(layout.ok());
  const int64_t bytes = ArenaBytes(*layout);
  const auto status = ValidateLayout(
      *layout, [&](RegionId id) { return id == RegionId(1) ? std::optional(bytes) : std::nullopt; },
      destination);
  INFO(status);
  REQUIRE(status.ok());
  CHECK(layout->binding_generation == 1);
  return std::make_shared<const Layout>(*std::move(layout));
}

std::vector<LayoutPtr> TrainerLayouts(const Mapping& mapping, const ModelConfig& config) {
  std::vector<LayoutPtr> layouts;
  for (int64_t rank = 0; rank < mapping.trainer.world; ++rank) {
    layouts.push_back(Share(TrainerLayout(mapping, config, rank), false));
  }
  return layouts;
}

std::vector<LayoutPtr> EngineLayouts(const Mapping& mapping, const ModelConfig& config) {
  std::vector<LayoutPtr> layouts;
  for (int64_t rank = 0; rank < mapping.engine.world(); ++rank) {
    layouts.push_back(Share(EngineLayout(mapping, config, rank), true));
    const auto status = CheckFloat8Scales(*layouts.back());
    INFO(status);
    REQUIRE(status.ok());
  }
  return layouts;
}

// The moves of a refit inside one daemon.
MovePlan MustCompile(const std::vector<LayoutPtr>& sources,
                     const std::vector<LayoutPtr>& destinations) {
  std::vector<RouteMember> trainers;
  std::vector<RouteMember> engines;
  std::vector<LocalMember> from;
  std::vector<LocalMember> to;
  for (const LayoutPtr& source : sources) {
    from.push_back({static_cast<uint32_t>(from.size()), source});
    trainers.push_back({source, 0, 0, "trainer"});
  }
  for (const LayoutPtr& destination : destinations) {
    to.push_back({static_cast<uint32_t>(to.size()), destination});
    engines.push_back({destination, 0, 0, "engine"});
  }
  const auto routes = CompileRoutes(trainers, engines, {});
  INFO(routes.status());
  REQUIRE(routes.ok());
  auto program = CompileNode(*routes, 0, std::move(from), std::move(to), {});
  INFO(program.status());
  REQUIRE(program.ok());
  return std::move(program->local);
}

// Executes the moves element by element. Returns false if an element comes from or goes to a place
// where no element lies, or goes to a place that was written before.
bool Execute(const MovePlan& program, const std::vector<LayoutPtr>& sources,
             const std::vector<LayoutPtr>& destinations, const std::vector<Arena>& from,
             std::vector<Arena>* to) {
  for (const CopyMove& move : program.moves) {
    const Layout& source = *sources[move.source];
    const Piece& read = source.pieces[move.source_piece];
    const Piece& written = destinations[move.destination]->pieces[move.destination_piece];
    const Arena& in = from[move.source];
    Arena& out = (*to)[move.destination];
    const int64_t bytes = ElementBytes(source.tensors[read.tensor].dtype);
    const bool matrix = move.box.extent.size() == 2;
    const int64_t columns = matrix ? move.box.extent[1] : 1;
    for (int64_t i = 0; i < move.box.extent[0]; ++i) {
      for (int64_t j = 0; j < columns; ++j) {
        const int64_t at = move.source_byte_offset +
                           (i * read.strides[0] + (matrix ? j * read.strides[1] : 0)) * bytes;
        const int64_t target =
            move.destination_byte_offset +
            (i * written.strides[0] + (matrix ? j * written.strides[1] : 0)) * bytes;
        if (at < 0 || at >= static_cast<int64_t>(in.size())) return false;
        if (target < 0 || target >= static_cast<int64_t>(out.size())) return false;
        if (in[at] == kUntouched || out[target] != kUntouched) return false;
        out[target] = in[at];
      }
    }
  }
  return true;
}

// Checks that the refit of the mapping gives every engine the memory that its own loader would
// give, from trainers whose memory their own frameworks filled.
bool RefitsExactly(const Mapping& mapping, const ModelConfig& config,
                   const std::vector<LayoutPtr>& trainers, const std::vector<LayoutPtr>& engines) {
  const GlobalIds ids(config);
  std::vector<Arena> from;
  for (int64_t rank = 0; rank < mapping.trainer.world; ++rank) {
    from.push_back(ExpectedTrainer(ids, mapping, config, rank));
  }
  std::vector<Arena> to;
  for (const LayoutPtr& engine : engines) {
    to.emplace_back(static_cast<size_t>(ArenaBytes(*engine)), kUntouched);
  }
  if (!Execute(MustCompile(trainers, engines), trainers, engines, from, &to)) return false;
  for (int64_t rank = 0; rank < mapping.engine.world(); ++rank) {
    if (to[rank] != ExpectedEngine(ids, mapping, config, rank)) return false;
  }
  return true;
}

TEST_CASE("Every mapping gives each engine rank what vLLM's own loader would") {
  for (const Mapping& mapping : Mappings()) {
    INFO(Label(mapping));
    const ModelConfig config = TinyModel(mapping);
    REQUIRE(RefitsExactly(mapping, config, TrainerLayouts(mapping, config),
                          EngineLayouts(mapping, config)));
  }
}

TEST_CASE("So do random models between random parallelisms") {
  std::mt19937_64 rng(11);
  const auto one_of = [&](std::initializer_list<int64_t> choices) {
    return choices.begin()[rng() % choices.size()];
  };
  int done = 0;
  for (int round = 0; round < 160; ++round) {
    ModelConfig full = KnownModels()[rng() % KnownModels().size()];
    full.fp8 = one_of({0, 1}) == 1;
    const TinySize size = {
        .layers = one_of({2, 3, 5}), .heads = one_of({4, 8, 12}), .experts = one_of({4, 6, 12})};
    ModelConfig config = ScaledDown(full, size);
    config.hidden = one_of({7, 16, 20});
    config.vocabulary = one_of({3, 64, 100, 129});
    config.tied = one_of({0, 1}) == 1;
    if (!config.latent()) config.kv_heads = one_of({1, 2, 4});
    Mapping mapping;
    mapping.fsdp = one_of({0, 0, 0, 1}) == 1;
    TrainerParallel& trainer = mapping.trainer;
    trainer = {.pp = one_of({1, 2, 3}),
               .tp = one_of({1, 2, 3, 4}),
               .ep = one_of({1, 2, 3, 4}),
               .etp = one_of({1, 2, 3}),
               .cp = one_of({1, 2})};
    const int64_t ranks = std::lcm(trainer.tp * trainer.cp, trainer.ep * trainer.etp);
    trainer.world = trainer.pp * ranks;
    mapping.engine = {
        .tp = one_of({1, 2, 4}), .ep = one_of({0, 1}) == 1, .instances = one_of({1, 2})};
    INFO("round " << round << ": " << config.name << ", fp8 " << config.fp8);
    // A model that the parallelism does not divide is refused; other tests check that.
    if (!TrainerLayout(mapping, config, 0).ok() || !EngineLayout(mapping, config, 0).ok()) continue;
    REQUIRE(RefitsExactly(mapping, config, TrainerLayouts(mapping, config),
                          EngineLayouts(mapping, config)));
    ++done;
  }
  CHECK(done > 40);
}

// The arena that a layout describes, filled from the global tensors.
Arena Materialise(const GlobalIds& ids, const Layout& layout) {
  Arena arena(static_cast<size_t>(ArenaBytes(layout)), kUntouched);
  for (const Piece& piece : layout.pieces) {
    const IdMatrix& tensor = ids.Get(layout.tensors[piece.tensor].name);
    const bool matrix = piece.box.extent.size() == 2;
    for (int64_t i = 0; i < piece.box.extent[0]; ++i) {
      for (int64_t j = 0; j < (matrix ? piece.box.extent[1] : 1); ++j) {
        const int64_t row = piece.box.offset[0] + i;
        const int64_t column = matrix ? piece.box.offset[1] + j : 0;
        const int64_t at = i * piece.strides[0] + (matrix ? j * piece.strides[1] : 0);
        arena[piece.byte_offset + at * tensor.element_bytes] =
            tensor.ids[row * tensor.columns + column];
      }
    }
  }
  return arena;
}

TEST_CASE("A trainer rank's layout describes all that Megatron or FSDP keeps there") {
  for (const Mapping& mapping : Mappings()) {
    INFO(Label(mapping));
    const ModelConfig config = TinyModel(mapping);
    const GlobalIds ids(config);
    for (int64_t rank = 0; rank < mapping.trainer.world; ++rank) {
      const auto layout = TrainerLayout(mapping, config, rank);
      REQUIRE(layout.ok());
      INFO("rank " << rank);
      const bool equal = Materialise(ids, *layout) == ExpectedTrainer(ids, mapping, config, rank);
      REQUIRE(equal);
    }
  }
}

TEST_CASE("A block that trainers' shards cut arrives whole: each of them has its scale") {
  ModelConfig config = TinyModel({.model = "moonlight-16b-a3b", .fp8 = true});
  config.hidden = 24;   // whole blocks, from which their size is found
  config.moe_ffn = 24;  // 3 blocks: 12 rows a trainer of two
  const Mapping mapping = {.fp8 = true, .trainer = {.world = 2, .etp = 2}};
  const auto trainers = TrainerLayouts(mapping, config);
  const auto engines = EngineLayouts(mapping, config);
  CHECK(CheckFloat8Scales(*trainers[0]).code() == absl::StatusCode::kFailedPrecondition);
  const GlobalIds ids(config);
  std::vector<Arena> to = {Arena(static_cast<size_t>(ArenaBytes(*engines[0])), kUntouched)};
  REQUIRE(Execute(MustCompile(trainers, engines), trainers, engines,
                  {Materialise(ids, *trainers[0]), Materialise(ids, *trainers[1])}, &to));
  const bool equal = to[0] == ExpectedEngine(ids, mapping, config, 0);
  CHECK(equal);
}

TEST_CASE("A planted error in an engine's or a trainer's layout is seen by the oracle") {
  const auto found = std::find_if(Mappings().begin(), Mappings().end(), [](const Mapping& m) {
    return m.name == "EP8xTP2->TP4xDP4" && !m.fp8;
  });
  REQUIRE(found != Mappings().end());
  const Mapping& mapping = *found;
  const ModelConfig config = TinyModel(mapping);
  const auto trainers = TrainerLayouts(mapping, config);
  const auto engines = EngineLayouts(mapping, config);
  REQUIRE(RefitsExactly(mapping, config, trainers, engines));
  // Returns the layout with the gate and up matrices of the last expert exchanged.
  const auto exchanged = [&](const Layout& layout) {
    Layout wrong = layout;
    std::vector<Piece*> pieces;
    for (Piece& piece : wrong.pieces) {
      const std::string& name = wrong.tensors[piece.tensor].name;
      const bool up = name.ends_with(".up_proj.weight");
      if (name.find(".experts.") == std::string::npos) continue;
      if (up || name.ends_with(".gate_proj.weight")) pieces.push_back(&piece);
    }
    REQUIRE(pieces.size() >= 2);
    std::swap(pieces[pieces.size() - 1]->byte_offset, pieces[pieces.size() - 2]->byte_offset);
    return std::make_shared<const Layout>(std::move(wrong));
  };
  auto wrong = engines;
  wrong[5] = exchanged(*engines[5]);
  CHECK_FALSE(RefitsExactly(mapping, config, trainers, wrong));
  wrong = trainers;
  // Damage every holder, because the planner chooses which replica is read.
  for (LayoutPtr& trainer : wrong) trainer = exchanged(*trainer);
  CHECK_FALSE(RefitsExactly(mapping, config, wrong, engines));
}

}  // namespace
}  // namespace refitd::sharding
