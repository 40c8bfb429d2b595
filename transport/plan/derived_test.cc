#include "transport/plan/derived.h"

#include <algorithm>
#include <catch2/catch.hpp>
#include <iterator>
#include <random>

#include "transport/base/failure.h"
#include "transport/base/status.h"
#include "transport/plan/derived_layouts.h"
#include "transport/plan/node_program.h"
#include "transport/plan/plan_testing.h"
#include "transport/plan/refit_plan.h"

namespace refitd {
namespace {

using Catch::Contains;

TensorSpec Derived(const std::string& name, DType dtype, const Dims& shape, TensorSpec from,
                   DerivedKind kind, DerivedRole role = DerivedRole::kValues) {
  return {name, dtype, shape,
          std::make_shared<Derivation>(Derivation{std::move(from), kind, role})};
}

const TensorSpec kWeight = {"w", DType::kBFloat16, {300, 256}};
const TensorSpec kValues =
    Derived("w.q", DType::kFloat8E4M3FN, {300, 256}, kWeight, DerivedKind::kFp8Block);
const TensorSpec kScales =
    Derived("w.s", DType::kFloat32, {3, 2}, kWeight, DerivedKind::kFp8Block, DerivedRole::kScales);

Layout Holds(const TensorSpec& tensor, const std::vector<Box>& boxes) {
  Layout layout;
  layout.tensors = {tensor};
  for (const Box& box : boxes) {
    layout.pieces.push_back({0, box, RegionId(1), 0, RowMajorStrides(box.extent)});
  }
  return layout;
}

Layout Wants(const std::vector<TensorSpec>& tensors) {
  Layout layout;
  int64_t end = 0;
  for (uint32_t t = 0; t < tensors.size(); ++t) {
    layout.tensors.push_back(tensors[t]);
    const Box box = WholeBox(tensors[t].shape);
    layout.pieces.push_back({t, box, RegionId(1), end, RowMajorStrides(box.extent)});
    end += AlignUp(ElementCount(box) * ElementBytes(tensors[t].dtype));
  }
  return layout;
}

TEST_CASE("a derived tensor has the dtype and shape that its kind gives") {
  CHECK(ValidateDerived(kValues).ok());
  CHECK(ValidateDerived(kScales).ok());
  const TensorSpec floats = {"w", DType::kFloat32, {4, 8}};
  CHECK(ValidateDerived(Derived("c", DType::kFloat16, {4, 8}, floats, DerivedKind::kCast)).ok());
  CHECK(ValidateDerived(Derived("c", DType::kFloat32, {4, 1}, floats, DerivedKind::kFp8Channel,
                                DerivedRole::kScales))
            .ok());
  const auto fault = [](const TensorSpec& tensor) {
    const absl::Status status = ValidateDerived(tensor);
    CHECK(status.code() == absl::StatusCode::kInvalidArgument);
    CHECK(FailureOf(status).tensor == tensor.name);
    return Message(status);
  };
  TensorSpec other = kValues;
  other.dtype = DType::kUint8;
  CHECK_THAT(fault(other),
             Contains("it is uint8 [300, 256]") && Contains("they are float8_e4m3fn [300, 256]"));
  other = kScales;
  other.shape = {2, 2};
  CHECK_THAT(fault(other), Contains("it is float32 [2, 2], which the scales of fp8_block of "
                                    "bfloat16 [300, 256] w are not: they are float32 [3, 2]"));
  CHECK_THAT(fault(Derived("x", DType::kInt8, {4, 8}, floats, DerivedKind::kCast)),
             Contains("it is int8 [4, 8], which the values of cast"));
  CHECK_THAT(fault(Derived("x", DType::kFloat32, {4, 8}, floats, DerivedKind::kCast,
                           DerivedRole::kScales)),
             Contains("kind cast has no role 2"));
  CHECK_THAT(fault(Derived("x", DType::kFloat32, {4, 8}, floats, static_cast<DerivedKind>(77))),
             Contains("kind 77 is not known"));
  CHECK_THAT(
      fault(Derived("x", DType::kFloat8E4M3FN, {300, 256}, kWeight, DerivedKind::kFp8BlockPow2)),
      Contains("takes whole blocks of 128 x 128"));
  CHECK_THAT(fault(Derived("x", DType::kFloat8E4M3FN, {8}, {"w", DType::kFloat32, {8}},
                           DerivedKind::kFp8Channel)),
             Contains("takes two dimensions or more"));
  CHECK_THAT(fault(Derived("x", DType::kFloat8E4M3FN, {1, 1 << 23},
                           {"w", DType::kFloat32, {1, 1 << 23}}, DerivedKind::kFp8Channel)),
             Contains("takes rows of at most 4194304 elements"));
  CHECK_THAT(
      fault(Derived("x", DType::kFloat32, {8}, {"w", DType::kInt32, {8}}, DerivedKind::kCast)),
      Contains("takes float32, bfloat16 or float16, not int32"));
  CHECK_THAT(fault(Derived("x", DType::kFloat8E4M3FN, {300, 256}, kValues, DerivedKind::kFp8Block)),
             Contains("derived from a tensor that is derived"));
}

TEST_CASE("a layout has values and scales, and each is checked") {
  const auto bytes = [](RegionId) { return std::optional<int64_t>(1 << 20); };
  CHECK(ValidateLayout(Wants({kValues, kScales}), bytes, true).ok());
  for (const TensorSpec& alone : {kValues, kScales}) {
    const absl::Status status = ValidateLayout(Wants({alone}), bytes, true);
    CHECK(status.code() == absl::StatusCode::kInvalidArgument);
    CHECK_THAT(Message(status), Contains("but not the"));
    CHECK(FailureOf(status).tensor == alone.name);
  }
  TensorSpec wrong = kScales;
  wrong.shape = {3, 3};
  CHECK_FALSE(ValidateLayout(Wants({kValues, wrong}), bytes, true).ok());
}

TEST_CASE("a layout derives so many tensors from one (P10)") {
  const auto bytes = [](RegionId) { return std::optional<int64_t>(1 << 20); };
  std::vector<TensorSpec> casts;
  for (int64_t i = 0; i < kMaxDerivedFrom; ++i) {
    casts.push_back(Derived("x" + std::to_string(i), DType::kBFloat16, {8},
                            {"w", DType::kFloat32, {8}}, DerivedKind::kCast));
  }
  Layout layout;
  layout.tensors = TensorList(casts);
  CHECK(ValidateLayout(layout, bytes, true).ok());
  casts.push_back(
      Derived("more", DType::kBFloat16, {8}, {"w", DType::kFloat32, {8}}, DerivedKind::kCast));
  layout.tensors = TensorList(casts);
  const absl::Status status = ValidateLayout(layout, bytes, true);
  CHECK(status.code() == absl::StatusCode::kResourceExhausted);
  CHECK_THAT(Message(status), Contains("tensor more: over 16 tensors"));
}

TEST_CASE("a box computes the blocks that it has as a whole") {
  const Derivation& values = *kValues.derived;
  const Derivation& scales = *kScales.derived;
  CHECK(ComputableBox(values, {{0, 0}, {300, 256}}) == Box{{0, 0}, {300, 256}});
  CHECK(ComputableBox(scales, {{0, 0}, {300, 256}}) == Box{{0, 0}, {3, 2}});
  // The last block of rows ends early.
  CHECK(ComputableBox(values, {{200, 100}, {100, 156}}) == Box{{256, 128}, {44, 128}});
  CHECK(ComputableBox(scales, {{200, 100}, {100, 156}}) == Box{{2, 1}, {1, 1}});
  CHECK_FALSE(ComputableBox(values, {{200, 0}, {99, 256}}).has_value());
  CHECK_FALSE(ComputableBox(values, {{0, 0}, {0, 256}}).has_value());
  const Derivation channel{kWeight, DerivedKind::kFp8Channel, DerivedRole::kScales};
  CHECK(ComputableBox(channel, {{7, 0}, {5, 256}}) == Box{{7, 0}, {5, 1}});
  CHECK_FALSE(ComputableBox(channel, {{7, 0}, {5, 255}}).has_value());
}

// What a rank that is alone on its node can compute.
absl::StatusOr<std::shared_ptr<const Layout>> ExtendAlone(
    DerivedLayouts* derived, const std::shared_ptr<const Layout>& layout) {
  PlanWork work;
  REFITD_ASSIGN_OR_RETURN(const DerivedLayouts::Extended extended,
                          derived->Extend({layout}, &work));
  return extended.layouts.at(0);
}

TEST_CASE("a trainer's layout gets what it can compute") {
  const auto held = std::make_shared<const Layout>(Holds(kWeight, {{{100, 0}, {200, 256}}}));
  const Layout wants = Wants({kValues, kScales});
  const std::vector<const Layout*> engines = {&wants, nullptr, &wants};
  DerivedLayouts derived(engines);
  const auto more = *ExtendAlone(&derived, held);
  REQUIRE(more->tensors.size() == 3);
  REQUIRE(more->pieces.size() == 3);
  CHECK(more->pieces[1] ==
        Piece{1, {{128, 0}, {172, 256}}, RegionId(1), 0, {256, 1}, /*computed_from=*/0});
  CHECK(more->pieces[2] == Piece{2, {{1, 0}, {2, 2}}, RegionId(1), 0, {2, 1}, 0});
  // Layouts that cut no block are extended once, and those that share a list of tensors still do.
  const auto whole = std::make_shared<const Layout>(Holds(kWeight, {{{0, 0}, {300, 256}}}));
  CHECK(*ExtendAlone(&derived, whole) == *ExtendAlone(&derived, whole));
  auto other_rank = std::make_shared<Layout>(*held);
  other_rank->tensors = TensorList(std::make_shared<const TensorList::List>(held->tensors.get()));
  auto third_rank = std::make_shared<Layout>(*other_rank);
  CHECK((*ExtendAlone(&derived, other_rank))->tensors.data() ==
        (*ExtendAlone(&derived, third_rank))->tensors.data());
  DerivedLayouts nothing(std::vector<TensorSpec>{});
  CHECK(*ExtendAlone(&nothing, held) == held);
  const auto own = std::make_shared<const Layout>(wants);
  CHECK(*ExtendAlone(&derived, own) == own);
  TensorSpec floats = kWeight;
  floats.dtype = DType::kFloat32;
  const auto other = std::make_shared<const Layout>(Holds(floats, {{{0, 0}, {300, 256}}}));
  CHECK_THAT(Message(ExtendAlone(&derived, other).status()),
             Contains("engines derive it from w as bfloat16 [300, 256], and trainers have "
                      "float32 [300, 256]"));
}

TEST_CASE("what another rank holds under the same name in another form is not read") {
  const Layout wants = Wants({kValues, kScales});
  const std::vector<const Layout*> engines = {&wants};
  const auto cut = std::make_shared<const Layout>(Holds(kWeight, {{{0, 0}, {200, 256}}}));
  // It has the derived tensors too, so that it need not hold what they are derived from.
  Layout other = Holds({"w", DType::kBFloat16, {76'800}}, {{{0}, {76'800}}});
  other.tensors.push_back(kValues);
  other.tensors.push_back(kScales);
  DerivedLayouts derived(engines);
  PlanWork work;
  const auto extended =
      *derived.Extend({cut, std::make_shared<const Layout>(std::move(other))}, &work);
  REQUIRE(extended.layouts[0]->pieces.size() == 3);
  CHECK(extended.layouts[0]->pieces[1].box == Box{{0, 0}, {128, 256}});
  CHECK(extended.other_shards.empty());
  CHECK(extended.layouts[1]->pieces.size() == 1);
}

TEST_CASE("blocks of mxfp8 lie in one shard") {
  const TensorSpec from = {"w", DType::kBFloat16, {4, 64}};
  const Layout wants = Wants(
      {Derived("w.q", DType::kFloat8E4M3FN, from.shape, from, DerivedKind::kMxFp8),
       Derived("w.s", DType::kUint8, {4, 2}, from, DerivedKind::kMxFp8, DerivedRole::kScales)});
  const std::vector<const Layout*> engines = {&wants};
  DerivedLayouts derived(engines);
  PlanWork work;
  const auto extended =
      *derived.Extend({std::make_shared<const Layout>(Holds(from, {{{0, 0}, {4, 40}}})),
                       std::make_shared<const Layout>(Holds(from, {{{0, 40}, {4, 24}}}))},
                      &work);
  REQUIRE(extended.layouts[0]->pieces.size() == 3);
  CHECK(extended.layouts[0]->pieces[1].box == Box{{0, 0}, {4, 32}});
  CHECK(extended.layouts[1]->pieces.size() == 1);
}

TEST_CASE("pieces of one rank give the blocks that they have together, once") {
  const Layout wants = Wants({kValues, kScales});
  const std::vector<const Layout*> engines = {&wants};
  DerivedLayouts derived(engines);
  std::vector<Box> rows;
  for (int64_t row = 0; row < 300; ++row) rows.push_back({{row, 0}, {1, 256}});
  const auto held = std::make_shared<const Layout>(Holds(kWeight, rows));
  PlanWork work;
  const auto extended = *derived.Extend({held}, &work);
  const std::vector<Piece>& pieces = extended.layouts[0]->pieces;
  REQUIRE(pieces.size() == 300 + 3 * 2);
  CHECK(pieces[302] == Piece{1, {{128, 0}, {128, 256}}, RegionId(1), 0, {256, 1}, 128});
  CHECK(pieces[303] == Piece{2, {{1, 0}, {1, 2}}, RegionId(1), 0, {2, 1}, 128});
  CHECK(extended.other_shards.at({0, 302})->size() == 127);
  CHECK(extended.other_shards.at({0, 304})->size() == 43);
  // Values and scales of the same blocks are computed from the same boxes, which are listed once.
  CHECK(extended.other_shards.at({0, 302}) == extended.other_shards.at({0, 303}));
}

TEST_CASE("derivations without end are refused (P10)") {
  std::vector<TensorSpec> many;
  for (int i = 0; i < 100'000; ++i) {
    many.push_back(
        Derived("d" + std::to_string(i), DType::kFloat32, {300, 256}, kWeight, DerivedKind::kCast));
  }
  std::vector<Box> boxes;
  for (int64_t row = 0; row < 300; ++row) boxes.push_back({{row, 0}, {1, 256}});
  const auto held = std::make_shared<const Layout>(Holds(kWeight, boxes));
  DerivedLayouts derived(many);
  CHECK(ExtendAlone(&derived, held).status().code() == absl::StatusCode::kResourceExhausted);
}

TEST_CASE("blocks that shards cut without end are refused (P10)") {
  // One rank has the left half of all rows, another the right half of each row as a piece.
  constexpr int64_t kRows = 8192;
  const TensorSpec tall = {"w", DType::kBFloat16, {kRows, 128}};
  const Layout wants =
      Wants({Derived("w.q", DType::kFloat8E4M3FN, tall.shape, tall, DerivedKind::kFp8Block),
             Derived("w.s", DType::kFloat32, {kRows / 128, 1}, tall, DerivedKind::kFp8Block,
                     DerivedRole::kScales)});
  std::vector<Box> rows;
  for (int64_t row = 0; row < kRows; ++row) rows.push_back({{row, 64}, {1, 64}});
  const std::vector<std::shared_ptr<const Layout>> node = {
      std::make_shared<const Layout>(Holds(tall, {{{0, 0}, {kRows, 64}}})),
      std::make_shared<const Layout>(Holds(tall, rows))};
  const std::vector<const Layout*> engines = {&wants};
  PlanWork work;
  if (GENERATE(false, true)) work += kMaxPlanSteps;
  const absl::Status status = DerivedLayouts(engines).Extend(node, &work).status();
  CHECK(status.code() == absl::StatusCode::kResourceExhausted);
  CHECK_THAT(Message(status), Contains("tensor w.q: blocks of w that shards cut need over"));
  CHECK(FailureOf(status).tensor == "w.q");
}

TEST_CASE("derived tensors are one memory only in one form of one source (P11)") {
  const auto bytes = [](RegionId) { return std::optional<int64_t>(1 << 20); };
  const auto tied = [&](const TensorSpec& a, const TensorSpec& b) {
    Layout layout = Wants({a, b});
    layout.pieces[1] = layout.pieces[0];
    layout.pieces[1].tensor = 1;
    TieSharedTensors(&layout);
    return ValidateLayout(layout, bytes, true).ok();
  };
  TensorSpec other = kWeight;
  other.name = "v";
  const auto cast = [](const std::string& name, const TensorSpec& from) {
    return Derived(name, DType::kFloat32, {300, 256}, from, DerivedKind::kCast);
  };
  CHECK(tied(cast("a", kWeight), cast("b", kWeight)));
  CHECK_FALSE(tied(cast("a", kWeight), cast("b", other)));
  CHECK_FALSE(tied(cast("a", kWeight), {"b", DType::kFloat32, {300, 256}}));
}

// Two trainers hold rows; one engine is quantised, another is not.
struct World {
  std::vector<RouteMember> trainers;
  std::vector<RouteMember> engines;
  explicit World(int64_t first_rows = 256, const Layout& quantised = Wants({kValues, kScales})) {
    const auto add = [](std::vector<RouteMember>* to, Layout layout, uint32_t node) {
      const auto number = static_cast<uint32_t>(to->size());
      to->push_back({std::make_shared<const Layout>(std::move(layout)), node, number,
                     "rank " + std::to_string(number)});
    };
    add(&trainers, Holds(kWeight, {{{0, 0}, {first_rows, 256}}}), 0);
    add(&trainers, Holds(kWeight, {{{first_rows, 0}, {300 - first_rows, 256}}}), 1);
    add(&engines, quantised, 1);
    add(&engines, Wants({kWeight}), 0);
  }
  absl::StatusOr<std::shared_ptr<const RefitPlan>> Compile() const {
    return CompileRefit(trainers, engines, {});
  }
};

TEST_CASE("routes bring derived tensors, from the ranks that have whole blocks") {
  const World world;
  const auto plan = world.Compile();
  REQUIRE(plan.ok());
  const RoutePlan& routes = (*plan)->routes;
  REQUIRE(routes.tensors == std::vector<TensorSpec>{kWeight, kValues, kScales});
  CHECK((*plan)->content.unwanted.empty());
  CHECK((*plan)->content.tensors == 1);
  int64_t bytes = 0;
  for (const Route& route : routes.routes) {
    if (route.tensor == 0) continue;
    bytes += ElementCount(routes.BoxOf(route)) * ElementBytes(routes.tensors[route.tensor].dtype);
  }
  CHECK(bytes == 300 * 256 + 4 * 6);
  // Layouts are digested as their ranks registered them.
  CHECK(routes.source_digests[0] == world.trainers[0].layout->Digest());
  for (uint32_t node : {0U, 1U}) {
    const auto program = CompileNode(routes, node, {{node, world.trainers[node].layout}},
                                     {{1 - node, world.engines[1 - node].layout}}, {});
    INFO(program.status());
    REQUIRE(program.ok());
    CHECK(program->sources[0].layout == world.trainers[node].layout);
    CHECK(program->source_layouts[0]->tensors.size() == 3);
  }
}

TEST_CASE("what trainers can't compute is named") {
  // Rows 128 to 256 are on two nodes.
  const auto cut = World(200).Compile();
  CHECK(cut.status().code() == absl::StatusCode::kFailedPrecondition);
  CHECK_THAT(Message(cut.status()),
             Contains("tensor w.q: element [128, 0] of rank 0 needs a whole block of [128, 128] "
                      "elements of w, which the trainers of one node must hold"));
  World lacking;
  lacking.trainers.clear();
  lacking.trainers.push_back(
      {std::make_shared<const Layout>(Holds({"v", DType::kFloat32, {4}}, {{{0}, {4}}})), 0, 0,
       "rank 0"});
  CHECK_THAT(Message(lacking.Compile().status()), Contains("tensor v"));
  // Two engines derive one name in two ways.
  World differs;
  Layout other = Wants({kValues, kScales});
  auto channel = [](const TensorSpec& tensor, const Dims& shape) {
    TensorSpec made = tensor;
    made.shape = shape;
    made.derived = std::make_shared<Derivation>(
        Derivation{kWeight, DerivedKind::kFp8Channel, tensor.derived->role});
    return made;
  };
  other = Wants({channel(kValues, {300, 256}), channel(kScales, {300, 1})});
  differs.engines[1].layout = std::make_shared<const Layout>(other);
  CHECK_THAT(Message(differs.Compile().status()),
             Contains("tensor w.q: ") && Contains("fp8_block") && Contains("fp8_channel"));
  // An instance that takes nothing of w.
  World unwanted;
  unwanted.engines[1].layout = std::make_shared<const Layout>(Wants({{"v", DType::kFloat32, {4}}}));
  CHECK_THAT(Message(unwanted.Compile().status()), Contains("tensor"));
  CHECK_FALSE(unwanted.Compile().ok());
}

// A tensor in random shards on random nodes, some of them twice, and one engine on each node.
struct CutWorld {
  explicit CutWorld(uint64_t seed) : rng(seed) {
    const Dims shape = {Pick(1, 2), Pick(1, 700), Pick(1, 500)};
    weight = {"w", DType::kFloat32, shape};
    const auto kind = Pick(0, 2) == 0 ? DerivedKind::kFp8Channel : DerivedKind::kFp8Block;
    values = Derived("w.q", DType::kFloat8E4M3FN, shape, weight, kind);
    const Dims block = BlockOf(*values.derived);
    Dims scaled = shape;
    for (size_t d = 0; d < shape.size(); ++d) scaled[d] = (shape[d] + block[d] - 1) / block[d];
    scales = Derived("w.s", DType::kFloat32, scaled, weight, kind, DerivedRole::kScales);
    const std::vector<Box> shards = CutAnywhere(WholeBox(shape), Pick(0, 12), &rng);
    nodes = static_cast<uint32_t>(Pick(1, 3));
    std::vector<std::vector<Box>> boxes(static_cast<size_t>(Pick(nodes, 8)));
    for (const Box& shard : shards) {
      for (int64_t copies = Pick(1, 2); copies > 0; --copies) {
        std::vector<Box>& to = boxes[static_cast<size_t>(Pick(0, std::ssize(boxes) - 1))];
        if (std::find(to.begin(), to.end(), shard) == to.end()) to.push_back(shard);
      }
    }
    for (const std::vector<Box>& held : boxes) {
      const auto number = static_cast<uint32_t>(trainers.size());
      trainers.push_back({std::make_shared<const Layout>(Holds(weight, held)), number % nodes,
                          number, "trainer " + std::to_string(number)});
    }
    const auto engine = std::make_shared<const Layout>(Wants({values, scales, weight}));
    for (uint32_t n = 0; n < nodes; ++n) engines.push_back({engine, n, n, "engine"});
  }

  int64_t Pick(int64_t low, int64_t high) {
    return std::uniform_int_distribution<int64_t>(low, high)(rng);
  }

  // Whether the ranks of a node hold all elements of a box.
  bool NodeHolds(uint32_t node, const Box& box) const {
    std::vector<Box> rest = {box};
    for (const RouteMember& trainer : trainers) {
      if (trainer.node != node) continue;
      for (const Piece& piece : trainer.layout->pieces) {
        std::vector<Box> outside;
        for (const Box& part : rest) Subtract(part, piece.box, &outside);
        rest = std::move(outside);
      }
    }
    return rest.empty();
  }

  // Calls visit(block) for each element of the scales.
  template <typename Visit>
  void ForEachBlock(const Visit& visit) const {
    const Dims& blocks = scales.shape;
    for (int64_t i = 0; i < ElementCount(WholeBox(blocks)); ++i) {
      Box at{{i / (blocks[1] * blocks[2]), i / blocks[2] % blocks[1], i % blocks[2]}, {1, 1, 1}};
      visit(at);
    }
  }

  std::mt19937_64 rng;
  uint32_t nodes = 1;
  TensorSpec weight;
  TensorSpec values;
  TensorSpec scales;
  std::vector<RouteMember> trainers;
  std::vector<RouteMember> engines;
};

TEST_CASE("a rank computes the blocks that its node holds and it has a part of, and no others") {
  for (uint64_t seed = 1; seed <= 300; ++seed) {
    CutWorld world(seed);
    INFO("seed " << seed << ": " << Describe(*world.values.derived));
    const std::vector<TensorSpec> served = {world.values, world.scales};
    DerivedLayouts derived(served);
    for (uint32_t node = 0; node < world.nodes; ++node) {
      std::vector<std::shared_ptr<const Layout>> layouts;
      for (const RouteMember& trainer : world.trainers) {
        if (trainer.node == node) layouts.push_back(trainer.layout);
      }
      PlanWork work;
      const auto extended = *derived.Extend(layouts, &work);
      for (uint32_t l = 0; l < layouts.size(); ++l) {
        const Layout& layout = *extended.layouts[l];
        world.ForEachBlock([&](const Box& block) {
          const Box elements = ComputedFrom(*world.scales.derived, block);
          bool has_part = false;
          bool scale = false;
          int64_t computed = 0;
          for (const Piece& piece : layout.pieces) {
            if (piece.tensor == 0) has_part = has_part || Meet(piece.box, elements);
            if (piece.tensor == 1 && Contains(piece.box, elements)) ++computed;
            if (piece.tensor == 2) scale = scale || Contains(piece.box, block);
          }
          const bool wanted = has_part && world.NodeHolds(node, elements);
          REQUIRE(scale == wanted);
          REQUIRE((computed > 0) == wanted);
        });
        // What a piece is computed from is held, without gaps, and each element once.
        for (uint32_t p = 0; p < layout.pieces.size(); ++p) {
          const Piece& piece = layout.pieces[p];
          if (piece.computed_from == kNotComputed) continue;
          const Box from = ComputedFrom(*layout.tensors[piece.tensor].derived, piece.box);
          std::vector<Box> held = {layout.pieces[piece.computed_from].box};
          const auto more = extended.other_shards.find({l, p});
          if (more != extended.other_shards.end()) {
            for (const ShardBox& shard : *more->second) {
              REQUIRE(Contains(layouts[shard.layout]->pieces[shard.piece].box, shard.box));
              for (const Box& other : held) REQUIRE_FALSE(Meet(other, shard.box));
              held.push_back(shard.box);
            }
          }
          int64_t elements = 0;
          for (const Box& box : held) {
            if (const auto common = Intersect(box, from)) elements += ElementCount(*common);
          }
          REQUIRE(elements == ElementCount(from));
        }
      }
    }
  }
}

TEST_CASE("plans and programs bring every block that some node holds") {
  int planned = 0;
  for (uint64_t seed = 1; seed <= 300; ++seed) {
    CutWorld world(seed);
    INFO("seed " << seed << ": " << Describe(*world.values.derived));
    bool all = true;
    world.ForEachBlock([&](const Box& block) {
      const Box elements = ComputedFrom(*world.scales.derived, block);
      bool held = false;
      for (uint32_t n = 0; n < world.nodes; ++n) held = held || world.NodeHolds(n, elements);
      all = all && held;
    });
    RouteOptions options;
    options.relay_lag = seed % 2 == 0 ? 2 : 0;
    const auto plan = CompileRefit(world.trainers, world.engines, options);
    INFO(plan.status());
    REQUIRE(plan.ok() == all);
    if (!all) {
      CHECK_THAT(Message(plan.status()), Contains("which the trainers of one node must hold"));
      continue;
    }
    ++planned;
    for (uint32_t node = 0; node < world.nodes; ++node) {
      std::vector<LocalMember> sources;
      for (uint32_t i = 0; i < world.trainers.size(); ++i) {
        if (world.trainers[i].node == node) sources.push_back({i, world.trainers[i].layout});
      }
      // Programs depend neither on the order of ranks nor on what other nodes' tensors are.
      std::shuffle(sources.begin(), sources.end(), world.rng);
      const RoutePlan part = ShareOfNode((*plan)->routes, node, {world.engines[node].layout});
      const auto program =
          CompileNode(part, node, sources, {{node, world.engines[node].layout}}, {});
      INFO(program.status());
      REQUIRE(program.ok());
      int64_t bytes = 0;
      for (const TensorSpec& tensor : {world.weight, world.values, world.scales}) {
        bytes += ElementCount(WholeBox(tensor.shape)) * ElementBytes(tensor.dtype);
      }
      CHECK(program->destination_bytes == std::vector<int64_t>{bytes});
    }
  }
  CHECK(planned > 100);
}

TEST_CASE("derivations are part of a layout's digest") {
  const uint64_t digest = Wants({kValues, kScales}).Digest();
  TensorSpec plain = kValues;
  plain.derived = nullptr;
  CHECK(Wants({plain, kScales}).Digest() != digest);
  TensorSpec from = kWeight;
  from.name = "v";
  TensorSpec other = kValues;
  other.derived =
      std::make_shared<Derivation>(Derivation{from, DerivedKind::kFp8Block, DerivedRole::kValues});
  CHECK(Wants({other, kScales}).Digest() != digest);
  CHECK(Wants({kValues, kScales}).Digest() == digest);
  CHECK(kValues != plain);
}

}  // namespace
}  // namespace refitd
