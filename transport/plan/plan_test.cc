#include "transport/plan/plan.h"

#include <algorithm>
#include <catch2/catch.hpp>
#include <chrono>
#include <cstring>
#include <iostream>
#include <map>
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

MovePlan MustCompile(const Layout& source, const DestinationIndex& index,
                     const PlanOptions& options = {}) {
  auto plan = Compile({source.tensors, source.pieces}, index, options);
  INFO(plan.status());
  REQUIRE(plan.ok());
  return *std::move(plan);
}

bool Ordered(const MovePlan& plan) {
  const auto key = [](const CopyMove& m) {
    return std::tie(m.source_piece, m.box.offset, m.destination, m.destination_piece);
  };
  return std::is_sorted(plan.moves.begin(), plan.moves.end(),
                        [&](const auto& a, const auto& b) { return key(a) < key(b); });
}

struct World {
  std::vector<TensorSpec> tensors;
  Side source;
  std::vector<Side> destinations;
};

std::vector<LayoutPtr> Layouts(const std::vector<Side>& sides) {
  std::vector<LayoutPtr> layouts;
  for (const Side& side : sides) layouts.push_back(std::make_shared<Layout>(side.layout));
  return layouts;
}

std::vector<Side*> Sides(World* world) {
  std::vector<Side*> sides = {&world->source};
  for (Side& side : world->destinations) sides.push_back(&side);
  return sides;
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
  world.destinations.resize(static_cast<size_t>(1 + Below(rng, 4)));
  world.source.layout.tensors = world.tensors;
  for (Side& side : world.destinations) side.layout.tensors = world.tensors;
  for (uint32_t t = 0; t < world.tensors.size(); ++t) {
    const Dims& shape = world.tensors[t].shape;
    for (Side* side : Sides(&world)) {
      for (const Box& box : Partition(rng, shape)) {
        if (Below(rng, 4) != 0) AddPiece(rng, side, t, box);
      }
    }
  }
  // A bucket lists its tensors' pieces in any order.
  std::shuffle(world.source.layout.pieces.begin(), world.source.layout.pieces.end(), *rng);
  Fill(&world.source);
  return world;
}

// Executes the moves byte by byte; counts writes of each destination address.
void Execute(World* world, const MovePlan& plan, std::vector<std::map<int64_t, int>>* writes) {
  writes->assign(world->destinations.size(), {});
  int64_t total = 0;
  for (const CopyMove& move : plan.moves) {
    const Side& from = world->source;
    Side& to = world->destinations[move.destination];
    const Piece& source = from.layout.pieces[move.source_piece];
    const Piece& target = to.layout.pieces[move.destination_piece];
    const int64_t bytes = ElementBytes(world->tensors[source.tensor].dtype);
    REQUIRE(move.source == 0);
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

TEST_CASE("What the source holds of a destination is written once and nothing else is written") {
  int64_t lacking = 0;
  for (uint64_t seed = 1; seed <= 3000; ++seed) {
    INFO("seed " << seed);
    Rng rng(seed);
    World world = RandomWorld(&rng);
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
    const MovePlan plan = MustCompile(world.source.layout, *index, options);
    REQUIRE(Ordered(plan));
    REQUIRE(plan.moves == MustCompile(world.source.layout, *index, options).moves);
    std::set<std::pair<uint32_t, int64_t>> held;
    for (const Piece& piece : world.source.layout.pieces) {
      ForEach(piece.box, [&](const Dims& at) {
        held.emplace(piece.tensor, GlobalIndex(at, world.tensors[piece.tensor].shape));
      });
    }
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
          const int64_t element = GlobalIndex(at, spec.shape);
          if (!held.contains({piece.tensor, element})) {
            ++lacking;
            return;
          }
          const int64_t address = Address(piece, at, bytes);
          const std::string bits = Bits(piece.tensor, element, bytes);
          REQUIRE(side.memory.compare(address, bytes, bits) == 0);
          REQUIRE(writes[d][address] == 1);
          ++expected_writes;
        });
      }
      REQUIRE(writes[d].size() == expected_writes);
    }
  }
  CHECK(lacking > 1000);
}

TEST_CASE("A planted wrong offset is seen by the byte oracle") {
  Rng rng(1);
  World world;
  world.tensors = {{"t", DType::kUint8, {8}}};
  world.destinations.resize(1);
  world.source.layout.tensors = world.destinations[0].layout.tensors = world.tensors;
  world.source.layout.pieces = {Dense(0, {{0}, {8}})};
  world.destinations[0].layout.pieces = {Dense(0, {{0}, {7}})};
  for (int64_t i = 0; i < 8; ++i) world.source.memory += Bits(0, i, 1);
  world.destinations[0].memory.assign(8, '\0');
  MovePlan plan = MustCompile(world.source.layout, *Index(Layouts(world.destinations)));
  std::vector<std::map<int64_t, int>> writes;
  Execute(&world, plan, &writes);
  REQUIRE(world.destinations[0].memory.substr(0, 7) == world.source.memory.substr(0, 7));
  plan.moves[0].source_byte_offset += 1;
  Execute(&world, plan, &writes);
  REQUIRE(world.destinations[0].memory.substr(0, 7) != world.source.memory.substr(0, 7));
}

TEST_CASE("A source is read once for all its destinations, in order") {
  const std::vector<TensorSpec> tensors = {{"a", DType::kUint8, {4}}, {"b", DType::kUint8, {2}}};
  const LayoutPtr layout = Make(tensors, {Dense(0, {{0}, {4}}), Dense(1, {{0}, {2}}, 8)});
  const MovePlan plan = MustCompile(*layout, *Index({layout, nullptr, layout}));
  REQUIRE(plan.moves.size() == 4);
  CHECK(plan.moves[0] == CopyMove{0, 0, 0, 0, {{0}, {4}}, 0, 0});
  CHECK(plan.moves[1] == CopyMove{0, 0, 2, 0, {{0}, {4}}, 0, 0});
  CHECK(plan.moves[2] == CopyMove{0, 1, 0, 1, {{0}, {2}}, 8, 8});
  CHECK(plan.moves[3] == CopyMove{0, 1, 2, 1, {{0}, {2}}, 8, 8});
  CHECK(plan.bytes == 12);
}

std::string CompileError(const Layout& source, const DestinationIndex& index) {
  const auto plan = Compile({source.tensors, source.pieces}, index, {});
  REQUIRE(!plan.ok());
  CHECK(plan.status().code() == absl::StatusCode::kFailedPrecondition);
  return Message(plan.status());
}

using Catch::Matchers::Contains;

TEST_CASE("A source's tensor that no destination has is left alone") {
  const LayoutPtr some = Make({{"a", DType::kUint8, {1}}}, {Dense(0, {{0}, {1}})});
  const LayoutPtr both = Make({{"b", DType::kUint8, {1}}, {"a", DType::kUint8, {1}}},
                              {Dense(0, {{0}, {1}}), Dense(1, {{0}, {1}}, 1)});
  const MovePlan plan = MustCompile(*both, *Index({some}));
  REQUIRE(plan.moves.size() == 1);
  CHECK(plan.moves[0] == CopyMove{0, 1, 0, 0, {{0}, {1}}, 1, 0});
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
  CHECK_THAT(CompileError(*b, *index), Contains("tensor w") &&
                                           Contains("float16 [4] in the source") &&
                                           Contains("bfloat16 [4] in engine 0"));
  CHECK_THAT(CompileError(*c, *index), Contains("bfloat16 [5] in the source"));
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
  CHECK(MustCompile(*Make(tensors, rows), *Index({Make(tensors, columns)}), options).bytes ==
        kSlices * kSlices);
  options.max_moves -= 1;
  const LayoutPtr source = Make(tensors, rows);
  const auto plan =
      Compile({source->tensors, source->pieces}, *Index({Make(tensors, columns)}), options);
  REQUIRE(plan.status().code() == absl::StatusCode::kResourceExhausted);
  CHECK_THAT(Message(plan.status()), Contains("tensor w"));
}

TEST_CASE("Finely sharded tensors are planned without comparing all pairs") {
  constexpr int64_t kShards = 100'000;
  const std::vector<TensorSpec> tensors = {{"w", DType::kUint8, {kShards, 2}}};
  std::vector<Piece> pieces;
  for (int64_t i = 0; i < kShards; ++i) pieces.push_back(Dense(0, {{i, 0}, {1, 2}}, i * 2));
  const LayoutPtr layout = Make(tensors, pieces);
  CHECK(MustCompile(*layout, *Index({layout})).moves.size() == kShards);
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
  constexpr int kRounds = 200;
  size_t moves = 0;
  const auto start = std::chrono::steady_clock::now();
  for (int i = 0; i < kRounds; ++i) moves += MustCompile(*source, *index).moves.size();
  const std::chrono::duration<double, std::micro> took = std::chrono::steady_clock::now() - start;
  CHECK(moves == kRounds * 1240);
  std::cout << fmt::format("310 tensors, 4 destinations: {:.0f} us\n", took.count() / kRounds);
}

}  // namespace
}  // namespace refitd
