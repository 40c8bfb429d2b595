// Tests of the limit on work for irregularly overlapping boxes, and of cancelling a plan.
#include "transport/plan/boxes.h"

#include <atomic>
#include <catch2/catch.hpp>
#include <cstdint>
#include <memory>
#include <random>
#include <vector>

#include "transport/plan/route.h"

namespace refitd {
namespace {

// Squares of any size anywhere: nearly all overlap many others.
std::vector<Box> Overlapping(int count) {
  std::mt19937_64 rng(50'000);
  std::vector<Box> boxes;
  for (int i = 0; i < count; ++i) {
    const auto pick = [&rng](int64_t most) {
      return std::uniform_int_distribution<int64_t>(0, most)(rng);
    };
    boxes.push_back({{pick(3000), pick(3000)}, {1 + pick(1000), 1 + pick(1000)}});
  }
  return boxes;
}

TEST_CASE("A box that is cut counts as many steps as it takes longer than a comparison") {
  std::vector<OwnedBox> held;
  for (const Box& box : Overlapping(100)) {
    held.push_back({box, {static_cast<uint32_t>(held.size())}});
  }
  PlanWork work;
  CutByHolders(&held, &work);
  REQUIRE_FALSE(work.Over());
  // Comparing takes 100 steps for each of 100 boxes. The other steps are cuts, of which there are
  // more than boxes in the result.
  CHECK(work.steps() > 100 * 100 + kCutSteps * static_cast<int64_t>(held.size()));
}

TEST_CASE("What is cancelled ends where it is, however many boxes overlap") {
  const auto cancelled = std::make_shared<std::atomic<bool>>(true);
  const std::vector<Box> boxes = Overlapping(50'000);
  PlanWork disjoint(cancelled);
  CHECK(MakeDisjoint(boxes, &disjoint).empty());
  CHECK(disjoint.steps() == 0);
  std::vector<OwnedBox> held;
  for (const Box& box : boxes) held.push_back({box, {0}});
  PlanWork cut(cancelled);
  CutByHolders(&held, &cut);
  CHECK(cut.steps() == 0);
}

TEST_CASE(
    "A plan of 50,000 overlapping boxes that nobody wants any more says so and is no program") {
  auto layout = std::make_shared<Layout>();
  layout->tensors = {{"w", DType::kUint8, {4096, 4096}}};
  for (const Box& box : Overlapping(50'000)) {
    layout->pieces.push_back({0, box, RegionId(1), 0, RowMajorStrides(box.extent)});
  }
  RouteOptions options;
  const auto cancelled = std::make_shared<std::atomic<bool>>(true);
  options.cancelled = cancelled;
  const auto plan = CompileRoutes({{layout, 0, 0, "trainer"}}, {{layout, 0, 0, "engine"}}, options);
  CHECK(plan.status().code() == absl::StatusCode::kCancelled);
}

TEST_CASE("Boxes meet where their intersection has an element") {
  const Box a = {{0, 0}, {2, 2}};
  CHECK(Meet(a, {{1, 1}, {2, 2}}));
  CHECK_FALSE(Meet(a, {{2, 0}, {2, 2}}));
  CHECK_FALSE(Meet(a, {{1, 1}, {0, 2}}));
  CHECK(Meet({{}, {}}, {{}, {}}));
}

}  // namespace
}  // namespace refitd
