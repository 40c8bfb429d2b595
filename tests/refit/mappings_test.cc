// Every mapping through whole daemons, one and two: after a compiled refit each engine holds, byte
// for byte, what its own loader would have put there, and nothing else is touched.
//
// REFITD_MAPPINGS=NAME in the environment runs only mappings whose label contains NAME.
#include "tests/workloads/sharding/mappings.h"

#include <algorithm>
#include <catch2/catch.hpp>
#include <cstdlib>
#include <cstring>
#include <span>
#include <string>
#include <vector>

#include "tests/refit/cluster.h"
#include "tests/workloads/sharding/oracle.h"

namespace refitd::refit {
namespace {

using sharding::Arena;
using sharding::ElementId;
using sharding::Mapping;

std::string Label(const Mapping& mapping) {
  return fmt::format("{}{} {}", mapping.model, mapping.fp8 ? " fp8" : "", mapping.name);
}

// Byte k of an element in one version. Elements, versions and bytes are alike only by chance.
char ByteOf(uint64_t seed, ElementId id, int64_t k) {
  HashChain chain(seed);
  chain.Add(id);
  chain.Add(static_cast<uint64_t>(k));
  return static_cast<char>(chain.hash() >> 56);
}

// Fills memory with the arena's ids as bytes, and with poison outside of it. False: the layout has
// an element where the arena has none, or the other way round.
bool Fill(const Layout& layout, const Arena& ids, uint64_t seed, std::span<char> memory) {
  std::fill(memory.begin(), memory.end(), Cluster::kPoison);
  int64_t elements = 0;
  for (const Piece& piece : layout.pieces) {
    const int64_t bytes = ElementBytes(layout.tensors[piece.tensor].dtype);
    const bool matrix = piece.box.extent.size() == 2;
    const int64_t columns = matrix ? piece.box.extent[1] : 1;
    for (int64_t i = 0; i < piece.box.extent[0]; ++i) {
      for (int64_t j = 0; j < columns; ++j) {
        const int64_t at = piece.byte_offset +
                           (i * piece.strides[0] + (matrix ? j * piece.strides[1] : 0)) * bytes;
        const ElementId id = ids[static_cast<size_t>(at)];
        if (id == sharding::kUntouched) return false;
        for (int64_t k = 0; k < bytes; ++k) {
          memory[static_cast<size_t>(at + k)] = ByteOf(seed, id, k);
        }
        ++elements;
      }
    }
  }
  return elements == std::count_if(ids.begin(), ids.end(),
                                   [](ElementId id) { return id != sharding::kUntouched; });
}

// Trainers are on the first daemons and engines on the last, or all on one.
void RefitsOver(int daemons, const Mapping& mapping) {
  const sharding::ModelConfig config = sharding::TinyModel(mapping);
  const sharding::GlobalIds ids(config);
  GroupSpec spec;
  spec.trainer_ranks = static_cast<int>(mapping.trainer.world);
  spec.min_instances = static_cast<int>(mapping.engine.instances);
  spec.slot_bytes = 256 << 10;  // small, for many rounds
  spec.slots = 4;
  Cluster cluster(daemons, spec);
  std::vector<int> trainers;
  std::vector<int> engines;
  const auto world = static_cast<int>(mapping.trainer.world);
  for (int rank = 0; rank < world; ++rank) {
    auto layout = sharding::TrainerLayout(mapping, config, rank);
    REQUIRE(layout.ok());
    trainers.push_back(cluster.AddTrainer(rank * daemons / world, rank, world, *std::move(layout)));
  }
  const auto engine_world = static_cast<int>(mapping.engine.world());
  for (int rank = 0; rank < engine_world; ++rank) {
    auto layout = sharding::EngineLayout(mapping, config, rank);
    REQUIRE(layout.ok());
    const int tp = static_cast<int>(mapping.engine.tp);
    // The first instance's ranks are on different daemons too.
    const int daemon =
        rank < tp ? rank % daemons : (engine_world - 1 - rank) * daemons / engine_world;
    engines.push_back(cluster.AddEngine(daemon, fmt::format("i{}", rank / tp), rank % tp, tp,
                                        *std::move(layout)));
  }
  for (const int64_t version : {1, 2}) {
    const auto seed = static_cast<uint64_t>(0x5eed + version);
    for (int rank = 0; rank < world; ++rank) {
      Rank& r = cluster.rank(trainers[static_cast<size_t>(rank)]);
      REQUIRE(
          Fill(*r.layout, sharding::ExpectedTrainer(ids, mapping, config, rank), seed, r.memory));
    }
    const absl::Status status =
        cluster.RefitAll(trainers, Version(version),
                         version == 1 ? Verification::kReadback : Verification::kTransfer);
    INFO(status.ToString());
    REQUIRE(status.ok());
    std::vector<char> expected;
    for (int rank = 0; rank < engine_world; ++rank) {
      const Rank& r = cluster.rank(engines[static_cast<size_t>(rank)]);
      expected.resize(r.memory.size());
      REQUIRE(
          Fill(*r.layout, sharding::ExpectedEngine(ids, mapping, config, rank), seed, expected));
      INFO(r.label);
      CHECK(cluster.Commits(engines[static_cast<size_t>(rank)], Version(version)));
      REQUIRE(std::memcmp(expected.data(), r.memory.data(), expected.size()) == 0);
    }
  }
  CHECK(cluster.asked().plans == 1);
  CHECK(cluster.asked().programs == daemons);
  if (daemons == 1) CHECK(cluster.exchanged_bytes() == 0);
}

TEST_CASE("Every mapping over one daemon and over two gives engines what their loaders would") {
  const char* only = std::getenv("REFITD_MAPPINGS");
  int run = 0;
  for (const Mapping& mapping : sharding::Mappings()) {
    const std::string label = Label(mapping);
    if (only != nullptr && label.find(only) == std::string::npos) continue;
    for (const int daemons : {1, 2}) {
      INFO(label << " over " << daemons);
      RefitsOver(daemons, mapping);
    }
    ++run;
  }
  CHECK(run > 0);
}

TEST_CASE("A dense and a mixture-of-experts mapping over three daemons") {
  for (const Mapping& mapping : sharding::Mappings()) {
    const std::string label = Label(mapping);
    if (mapping.name != "TP2xPP2xDP2->TP4xDP2" && mapping.name != "EP4xTP2xDP2->TP4xDP4") continue;
    INFO(label);
    RefitsOver(3, mapping);
  }
}

}  // namespace
}  // namespace refitd::refit
