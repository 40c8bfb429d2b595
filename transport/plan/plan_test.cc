#include "transport/plan/plan.h"

#include <algorithm>
#include <catch2/catch.hpp>
#include <chrono>
#include <cstring>
#include <iostream>
#include <map>
#include <numeric>
#include <random>
#include <set>

#include "transport/base/status.h"
#include "transport/plan/plan_testing.h"

namespace refitd {
namespace {

std::shared_ptr<const DestinationIndex> Index(std::vector<LayoutPtr> layouts) {
  std::vector<std::string> labels;
  for (size_t i = 0; i < layouts.size(); ++i) labels.push_back(fmt::format("engine {}", i));
  auto index = DestinationIndex::Make(std::move(layouts), std::move(labels));
  INFO(index.status());
  REQUIRE(index.ok());
  return *index;
}

MovePlan MustCompile(const std::vector<LayoutPtr>& sources, const DestinationIndex& index,
                     const PlanOptions& options = {}) {
  auto plan = Compile(sources, index, options);
  INFO(plan.status());
  REQUIRE(plan.ok());
  return *std::move(plan);
}

bool Ordered(const MovePlan& plan) {
  const auto key = [](const CopyMove& m) {
    return std::tie(m.source, m.source_piece, m.box.offset, m.destination, m.destination_piece);
  };
  return std::is_sorted(plan.moves.begin(), plan.moves.end(),
                        [&](const auto& a, const auto& b) { return key(a) < key(b); });
}

struct World {
  std::vector<TensorSpec> tensors;
  std::vector<Side> sources;
  std::vector<Side> destinations;
};

std::vector<LayoutPtr> Layouts(const std::vector<Side>& sides) {
  std::vector<LayoutPtr> layouts;
  for (const Side& side : sides) layouts.push_back(std::make_shared<Layout>(side.layout));
  return layouts;
}

World RandomWorld(Rng* rng) {
  constexpr DType kTypes[] = {DType::kUint8, DType::kBFloat16, DType::kFloat32, DType::kFloat64};
  World world;
  const int64_t tensors = 1 + Below(rng, 3);
  for (int64_t t = 0; t < tensors; ++t) {
    Dims shape(static_cast<size_t>(Below(rng, 4)), 0);
    for (int64_t& n : shape) n = Below(rng, 12) == 0 ? 0 : 1 + Below(rng, 6);
    world.tensors.push_back({fmt::format("t{}", t), kTypes[Below(rng, 4)], shape});
  }
  world.sources.resize(static_cast<size_t>(1 + Below(rng, 4)));
  world.destinations.resize(static_cast<size_t>(1 + Below(rng, 4)));
  for (auto* sides : {&world.sources, &world.destinations}) {
    for (Side& side : *sides) side.layout.tensors = world.tensors;
  }
  for (uint32_t t = 0; t < world.tensors.size(); ++t) {
    const Dims& shape = world.tensors[t].shape;
    // Boxes are sharded over the sources, some shards are replicated, and some boxes overlap at
    // random.
    for (const Box& box : Partition(rng, shape)) {
      const int64_t copies = 1 + Below(rng, 3);
      for (int64_t c = 0; c < copies; ++c) {
        AddPiece(rng, &world.sources[Below(rng, world.sources.size())], t, box);
      }
    }
    for (int64_t extra = Below(rng, 4); extra > 0; --extra) {
      AddPiece(rng, &world.sources[Below(rng, world.sources.size())], t, RandomBox(rng, shape));
    }
    for (Side& side : world.destinations) {
      for (const Box& box : Partition(rng, shape)) {
        if (Below(rng, 4) != 0) AddPiece(rng, &side, t, box);
      }
    }
  }
  for (Side& side : world.sources) Fill(&side);
  return world;
}

// Executes the moves byte by byte; counts writes of each destination address.
void Execute(World* world, const MovePlan& plan, std::vector<std::map<int64_t, int>>* writes) {
  writes->assign(world->destinations.size(), {});
  int64_t total = 0;
  for (const CopyMove& move : plan.moves) {
    const Side& from = world->sources[move.source];
    Side& to = world->destinations[move.destination];
    const Piece& source = from.layout.pieces[move.source_piece];
    const Piece& target = to.layout.pieces[move.destination_piece];
    const int64_t bytes = ElementBytes(world->tensors[source.tensor].dtype);
    REQUIRE(source.tensor == target.tensor);
    REQUIRE(ElementCount(move.box) > 0);
    ForEach(move.box, [&](const Dims& at) {
      int64_t source_at = move.source_byte_offset;
      int64_t target_at = move.destination_byte_offset;
      for (size_t d = 0; d < at.size(); ++d) {
        source_at += (at[d] - move.box.offset[d]) * source.strides[d] * bytes;
        target_at += (at[d] - move.box.offset[d]) * target.strides[d] * bytes;
      }
      REQUIRE(source_at >= 0);
      REQUIRE(source_at + bytes <= static_cast<int64_t>(from.memory.size()));
      REQUIRE(target_at >= 0);
      REQUIRE(target_at + bytes <= static_cast<int64_t>(to.memory.size()));
      std::memcpy(to.memory.data() + target_at, from.memory.data() + source_at,
                  static_cast<size_t>(bytes));
      ++(*writes)[move.destination][target_at];
      total += bytes;
    });
  }
  REQUIRE(total == plan.bytes);
}

TEST_CASE("Every destination element gets its own bytes exactly once and nothing else is written") {
  for (uint64_t seed = 1; seed <= 3000; ++seed) {
    INFO("seed " << seed);
    Rng rng(seed);
    World world = RandomWorld(&rng);
    const auto sources = Layouts(world.sources);
    const auto index = Index(Layouts(world.destinations));
    for (const LayoutPtr& layout : index->destinations()) {
      const auto& memory = world.destinations[&layout - index->destinations().data()].memory;
      const auto status = ValidateLayout(
          *layout, [&](RegionId) { return static_cast<int64_t>(memory.size()); }, true);
      INFO(status);
      REQUIRE(status.ok());
    }
    PlanOptions options;
    options.skip_destination.resize(world.destinations.size());
    const bool skip = Below(&rng, 4) == 0;
    if (skip) options.skip_destination[0] = true;
    const MovePlan plan = MustCompile(sources, *index, options);
    REQUIRE(Ordered(plan));
    REQUIRE(plan.Digest() == MustCompile(sources, *index, options).Digest());
    std::vector<std::map<int64_t, int>> writes;
    Execute(&world, plan, &writes);
    for (size_t d = 0; d < world.destinations.size(); ++d) {
      const Side& side = world.destinations[d];
      size_t expected_writes = 0;
      for (const Piece& piece : side.layout.pieces) {
        if (options.skip_destination[d]) break;
        const TensorSpec& spec = world.tensors[piece.tensor];
        const int64_t bytes = ElementBytes(spec.dtype);
        ForEach(piece.box, [&](const Dims& at) {
          const int64_t address = Address(piece, at, bytes);
          const std::string bits = Bits(piece.tensor, GlobalIndex(at, spec.shape), bytes);
          REQUIRE(side.memory.compare(address, bytes, bits) == 0);
          REQUIRE(writes[d][address] == 1);
          ++expected_writes;
        });
      }
      REQUIRE(writes[d].size() == expected_writes);
    }
  }
}

TEST_CASE("Each source element is read from one source whatever the number of destinations") {
  for (uint64_t seed = 1; seed <= 300; ++seed) {
    INFO("seed " << seed);
    Rng rng(seed);
    World world = RandomWorld(&rng);
    const MovePlan plan = MustCompile(Layouts(world.sources), *Index(Layouts(world.destinations)));
    std::map<std::pair<uint32_t, int64_t>, std::pair<uint32_t, uint32_t>> reader;
    for (const CopyMove& move : plan.moves) {
      const uint32_t tensor = world.sources[move.source].layout.pieces[move.source_piece].tensor;
      ForEach(move.box, [&](const Dims& at) {
        const auto from = std::pair(move.source, move.source_piece);
        const auto key = std::pair(tensor, GlobalIndex(at, world.tensors[tensor].shape));
        REQUIRE(reader.try_emplace(key, from).first->second == from);
      });
    }
  }
}

TEST_CASE("A planted wrong offset is seen by the byte oracle") {
  Rng rng(1);
  World world;
  world.tensors = {{"t", DType::kUint8, {8}}};
  world.sources.resize(1);
  world.destinations.resize(1);
  world.sources[0].layout.tensors = world.destinations[0].layout.tensors = world.tensors;
  world.sources[0].layout.pieces = {Dense(0, {{0}, {8}})};
  world.destinations[0].layout.pieces = {Dense(0, {{0}, {7}})};
  for (int64_t i = 0; i < 8; ++i) world.sources[0].memory += Bits(0, i, 1);
  world.destinations[0].memory.assign(8, '\0');
  MovePlan plan = MustCompile(Layouts(world.sources), *Index(Layouts(world.destinations)));
  std::vector<std::map<int64_t, int>> writes;
  Execute(&world, plan, &writes);
  REQUIRE(world.destinations[0].memory.substr(0, 7) == world.sources[0].memory.substr(0, 7));
  plan.moves[0].source_byte_offset += 1;
  Execute(&world, plan, &writes);
  REQUIRE(world.destinations[0].memory.substr(0, 7) != world.sources[0].memory.substr(0, 7));
}

std::vector<int64_t> ReadFrom(const MovePlan& plan, size_t sources) {
  // Elements that several destinations take are read once.
  std::vector<int64_t> bytes(sources, 0);
  const CopyMove* previous = nullptr;
  for (const CopyMove& move : plan.moves) {
    const bool again = previous != nullptr && previous->source == move.source &&
                       previous->source_piece == move.source_piece && previous->box == move.box;
    if (!again) bytes[move.source] += ElementCount(move.box);
    previous = &move;
  }
  return bytes;
}

TEST_CASE("Replicated sources are shared out evenly") {
  const std::vector<TensorSpec> tensors = {{"big", DType::kUint8, {4096, 4096}},
                                           {"norm", DType::kUint8, {1024}},
                                           {"other", DType::kUint8, {1000, 3000}}};
  std::vector<Piece> pieces;
  for (uint32_t t = 0; t < tensors.size(); ++t)
    pieces.push_back(Dense(t, WholeBox(tensors[t].shape)));
  const LayoutPtr whole = Make(tensors, pieces);
  const auto index = Index({whole, whole});
  for (const size_t count : {2U, 3U, 4U, 7U}) {
    const MovePlan plan = MustCompile(std::vector<LayoutPtr>(count, whole), *index);
    const auto bytes = ReadFrom(plan, count);
    const auto [low, high] = std::minmax_element(bytes.begin(), bytes.end());
    INFO(count << " sources, " << *low << " to " << *high);
    // Loads differ by no more than a row of the biggest matrix and the tensor that is not cut.
    CHECK(*high - *low <= 4096 + 1024);
    CHECK(plan.bytes == 2 * whole->Bytes());
  }
}

TEST_CASE("Small replicated tensors go to the least loaded source as a whole") {
  std::vector<TensorSpec> tensors;
  std::vector<Piece> pieces;
  for (uint32_t t = 0; t < 60; ++t) {
    tensors.push_back({fmt::format("t{}", t), DType::kBFloat16, {1024}});
    pieces.push_back(Dense(t, {{0}, {1024}}));
  }
  const LayoutPtr whole = Make(tensors, pieces);
  const MovePlan plan = MustCompile({whole, whole, whole}, *Index({whole}));
  CHECK(plan.moves.size() == 60);
  CHECK(ReadFrom(plan, 3) == std::vector<int64_t>(3, 20 * 1024));
}

TEST_CASE("A source that holds what nobody else does is relieved of what others hold too") {
  const std::vector<TensorSpec> tensors = {{"own", DType::kUint8, {4, 1 << 20}},
                                           {"shared", DType::kUint8, {8, 1 << 20}}};
  const LayoutPtr both =
      Make(tensors, {Dense(0, WholeBox(tensors[0].shape)), Dense(1, WholeBox(tensors[1].shape))});
  const LayoutPtr one = Make({tensors[1]}, {Dense(0, WholeBox(tensors[1].shape))});
  const auto bytes = ReadFrom(MustCompile({both, one}, *Index({both})), 2);
  CHECK(bytes == std::vector<int64_t>{6 << 20, 6 << 20});
}

TEST_CASE("Only what a destination wants is balanced") {
  const std::vector<TensorSpec> tensors = {{"t", DType::kUint8, {8, 1 << 20}}};
  const LayoutPtr whole = Make(tensors, {Dense(0, WholeBox(tensors[0].shape))});
  const LayoutPtr half = Make(tensors, {Dense(0, {{0, 0}, {4, 1 << 20}})});
  const auto bytes = ReadFrom(MustCompile({whole, whole}, *Index({half})), 2);
  CHECK(bytes == std::vector<int64_t>{2 << 20, 2 << 20});
}

TEST_CASE("A source is read once for all its destinations, in order") {
  const std::vector<TensorSpec> tensors = {{"a", DType::kUint8, {4}}, {"b", DType::kUint8, {2}}};
  const LayoutPtr layout = Make(tensors, {Dense(0, {{0}, {4}}), Dense(1, {{0}, {2}}, 8)});
  const MovePlan plan = MustCompile({layout}, *Index({layout, nullptr, layout}));
  REQUIRE(plan.moves.size() == 4);
  CHECK(plan.moves[0] == CopyMove{0, 0, 0, 0, {{0}, {4}}, 0, 0});
  CHECK(plan.moves[1] == CopyMove{0, 0, 2, 0, {{0}, {4}}, 0, 0});
  CHECK(plan.moves[2] == CopyMove{0, 1, 0, 1, {{0}, {2}}, 8, 8});
  CHECK(plan.moves[3] == CopyMove{0, 1, 2, 1, {{0}, {2}}, 8, 8});
  CHECK(plan.bytes == 12);
}

TEST_CASE("A digest of a plan tells any changed field") {
  const LayoutPtr layout = Make({{"a", DType::kUint8, {4}}}, {Dense(0, {{0}, {4}})});
  const MovePlan plan = MustCompile({layout}, *Index({layout}));
  std::set<uint64_t> digests = {plan.Digest(), MovePlan().Digest()};
  const auto changed = [&](const auto& change) {
    MovePlan copy = plan;
    change(&copy.moves[0]);
    digests.insert(copy.Digest());
  };
  changed([](CopyMove* m) { ++m->source; });
  changed([](CopyMove* m) { ++m->source_piece; });
  changed([](CopyMove* m) { ++m->destination; });
  changed([](CopyMove* m) { ++m->destination_piece; });
  changed([](CopyMove* m) { ++m->box.offset[0]; });
  changed([](CopyMove* m) { ++m->box.extent[0]; });
  changed([](CopyMove* m) { ++m->source_byte_offset; });
  changed([](CopyMove* m) { ++m->destination_byte_offset; });
  CHECK(digests.size() == 10);
}

std::string CompileError(const std::vector<LayoutPtr>& sources, const DestinationIndex& index,
                         const PlanOptions& options = {}) {
  const auto plan = Compile(sources, index, options);
  REQUIRE(!plan.ok());
  CHECK(plan.status().code() == absl::StatusCode::kFailedPrecondition);
  return Message(plan.status());
}

using Catch::Matchers::Contains;

TEST_CASE("A tensor that is not covered is an error that names it and its first missing element") {
  const std::vector<TensorSpec> tensors = {{"w", DType::kUint8, {4, 4}}};
  const LayoutPtr whole = Make(tensors, {Dense(0, {{0, 0}, {4, 4}})});
  const LayoutPtr hole = Make(tensors, {Dense(0, {{0, 0}, {2, 4}}), Dense(0, {{2, 0}, {2, 3}}, 8)});
  const auto index = Index({whole});
  const std::string message = CompileError({hole}, *index);
  CHECK_THAT(message, Contains("tensor w") && Contains("[2, 3]") && Contains("engine 0"));

  PlanOptions push;
  push.require_cover = false;
  CHECK(MustCompile({hole}, *index, push).bytes == 14);
  PlanOptions allowed;
  allowed.uncovered_allowed = {"w"};
  CHECK(MustCompile({hole}, *index, allowed).bytes == 14);
}

TEST_CASE("A tensor that no source knows is an error unless it may stay uncovered") {
  const LayoutPtr some = Make({{"a", DType::kUint8, {1}}}, {Dense(0, {{0}, {1}})});
  const LayoutPtr more = Make({{"a", DType::kUint8, {1}}, {"cache", DType::kUint8, {2}}},
                              {Dense(0, {{0}, {1}}), Dense(1, {{0}, {2}}, 1)});
  const auto index = Index({some, more});
  CHECK_THAT(CompileError({some}, *index),
             Contains("tensor cache") && Contains("[0]") && Contains("engine 1"));
  CHECK_THAT(CompileError({}, *Index({some})), Contains("tensor a"));
  PlanOptions options;
  options.uncovered_allowed = {"cache"};
  CHECK(MustCompile({some}, *index, options).bytes == 2);
  options = {};
  options.skip_destination = {false, true};
  CHECK(MustCompile({some}, *index, options).bytes == 1);
}

TEST_CASE("A source's tensor that no destination has is left alone") {
  const LayoutPtr some = Make({{"a", DType::kUint8, {1}}}, {Dense(0, {{0}, {1}})});
  const LayoutPtr other = Make({{"b", DType::kUint8, {1}}}, {Dense(0, {{0}, {1}})});
  CHECK(MustCompile({some, nullptr, other}, *Index({some})).moves.size() == 1);
}

TEST_CASE("Disagreement about dtype or shape names the tensor and both sides") {
  const auto of = [](DType dtype, Dims shape) {
    Box box = WholeBox(shape);
    return Make({{"w", dtype, std::move(shape)}}, {Dense(0, std::move(box))});
  };
  const LayoutPtr a = of(DType::kBFloat16, {4});
  const LayoutPtr b = of(DType::kFloat16, {4});
  const LayoutPtr c = of(DType::kBFloat16, {5});
  const auto index = Index({a});
  CHECK_THAT(CompileError({b}, *index), Contains("tensor w") &&
                                            Contains("float16 [4] in source 0") &&
                                            Contains("bfloat16 [4] in engine 0"));
  CHECK_THAT(CompileError({c}, *index), Contains("bfloat16 [5] in source 0"));
  CHECK_THAT(CompileError({a, c}, *index),
             Contains("bfloat16 [4] in source 0") && Contains("bfloat16 [5] in source 1"));
  const auto made = DestinationIndex::Make({a, nullptr, c}, {"one", "two", "three"});
  REQUIRE(made.status().code() == absl::StatusCode::kFailedPrecondition);
  CHECK_THAT(Message(made.status()), Contains("tensor w") && Contains("bfloat16 [4] in one") &&
                                         Contains("bfloat16 [5] in three"));
}

TEST_CASE("A plan of too many moves is refused") {
  constexpr int64_t kSlices = 100;
  std::vector<Piece> rows;
  std::vector<Piece> columns;
  for (int64_t i = 0; i < kSlices; ++i) {
    rows.push_back(Dense(0, {{i, 0}, {1, kSlices}}, i * kSlices));
    columns.push_back(Dense(0, {{0, i}, {kSlices, 1}}, i * kSlices));
  }
  const std::vector<TensorSpec> tensors = {{"w", DType::kUint8, {kSlices, kSlices}}};
  PlanOptions options;
  options.max_moves = kSlices * kSlices;
  CHECK(MustCompile({Make(tensors, rows)}, *Index({Make(tensors, columns)}), options).bytes ==
        kSlices * kSlices);
  options.max_moves -= 1;
  const auto plan = Compile({Make(tensors, rows)}, *Index({Make(tensors, columns)}), options);
  REQUIRE(plan.status().code() == absl::StatusCode::kResourceExhausted);
  CHECK_THAT(Message(plan.status()), Contains("tensor w"));
}

TEST_CASE("Finely sharded tensors are planned without comparing all pairs") {
  constexpr int64_t kShards = 100'000;
  const std::vector<TensorSpec> tensors = {{"w", DType::kUint8, {kShards, 2}}};
  std::vector<Piece> pieces;
  for (int64_t i = 0; i < kShards; ++i) pieces.push_back(Dense(0, {{i, 0}, {1, 2}}, i * 2));
  const LayoutPtr layout = Make(tensors, pieces);
  const MovePlan plan = MustCompile({layout, layout}, *Index({layout}));
  CHECK(plan.moves.size() == kShards);
  const auto bytes = ReadFrom(plan, 2);
  CHECK(bytes[0] == bytes[1]);
}

// Prints a figure; asserts nothing about time.
TEST_CASE("A bucket of 310 tensors for 4 destinations is planned", "[.benchmark]") {
  std::vector<TensorSpec> tensors;
  std::vector<Piece> whole;
  std::vector<Piece> half;
  for (uint32_t t = 0; t < 310; ++t) {
    tensors.push_back(
        {fmt::format("model.layers.{}.self_attn.q_proj.weight", t), DType::kBFloat16, {64, 64}});
    whole.push_back(Dense(t, {{0, 0}, {64, 64}}, t * 8192));
    half.push_back(Dense(t, {{32, 0}, {32, 64}}, t * 4096));
  }
  const LayoutPtr source = Make(tensors, whole);
  const auto index = Index({source, source, Make(tensors, half), Make(tensors, half)});
  PlanOptions options;
  options.require_cover = false;
  constexpr int kRounds = 200;
  size_t moves = 0;
  const auto start = std::chrono::steady_clock::now();
  for (int i = 0; i < kRounds; ++i) moves += MustCompile({source}, *index, options).moves.size();
  const std::chrono::duration<double, std::micro> took = std::chrono::steady_clock::now() - start;
  CHECK(moves == kRounds * 1240);
  std::cout << fmt::format("310 tensors, 4 destinations: {:.0f} us\n", took.count() / kRounds);
}

}  // namespace
}  // namespace refitd
