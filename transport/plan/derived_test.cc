#include "transport/plan/derived.h"

#include <catch2/catch.hpp>

#include "transport/base/failure.h"
#include "transport/base/status.h"
#include "transport/plan/node_program.h"
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

TEST_CASE("a trainer's layout gets what it can compute") {
  const auto held = std::make_shared<const Layout>(
      Holds(kWeight, {{{0, 0}, {100, 256}}, {{100, 0}, {200, 256}}}));
  const Layout wants = Wants({kValues, kScales});
  const std::vector<const Layout*> engines = {&wants, nullptr, &wants};
  DerivedLayouts derived(engines);
  const auto more = *derived.Extend(held);
  REQUIRE(more->tensors.size() == 3);
  // The first piece has no whole block; the second has the rows from 128 on.
  REQUIRE(more->pieces.size() == 4);
  CHECK(more->pieces[2] ==
        Piece{1, {{128, 0}, {172, 256}}, RegionId(1), 0, {256, 1}, /*computed_from=*/1});
  CHECK(more->pieces[3] == Piece{2, {{1, 0}, {2, 2}}, RegionId(1), 0, {2, 1}, 1});
  CHECK(*derived.Extend(held) == more);
  // Layouts that share a list of tensors still do.
  auto other_rank = std::make_shared<Layout>(*held);
  other_rank->tensors = TensorList(std::make_shared<const TensorList::List>(held->tensors.get()));
  auto third_rank = std::make_shared<Layout>(*other_rank);
  CHECK((*derived.Extend(other_rank))->tensors.data() ==
        (*derived.Extend(third_rank))->tensors.data());
  CHECK(*DerivedLayouts(std::vector<TensorSpec>{}).Extend(held) == held);
  const auto own = std::make_shared<const Layout>(wants);
  CHECK(*derived.Extend(own) == own);
  TensorSpec floats = kWeight;
  floats.dtype = DType::kFloat32;
  const auto other = std::make_shared<const Layout>(Holds(floats, {{{0, 0}, {300, 256}}}));
  CHECK_THAT(Message(derived.Extend(other).status()),
             Contains("engines derive it from w as bfloat16 [300, 256], and trainers have "
                      "float32 [300, 256]"));
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
  CHECK(DerivedLayouts(many).Extend(held).status().code() == absl::StatusCode::kResourceExhausted);
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
  // Rows 128 to 256 are on two ranks.
  const auto cut = World(200).Compile();
  CHECK(cut.status().code() == absl::StatusCode::kFailedPrecondition);
  CHECK_THAT(Message(cut.status()),
             Contains("tensor w.q: element [128, 0] of rank 0 needs a whole block of [128, 128] "
                      "elements of w, and no trainer has that block in one shard"));
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
