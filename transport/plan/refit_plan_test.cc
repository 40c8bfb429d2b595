#include "transport/plan/refit_plan.h"

#include <fmt/format.h>

#include <catch2/catch.hpp>
#include <functional>
#include <map>
#include <set>

#include "transport/base/status.h"
#include "transport/plan/boxes.h"
#include "transport/plan/node_program.h"
#include "transport/plan/route_testing.h"

namespace refitd {
namespace {

using Catch::Matchers::Contains;
using Element = std::pair<std::string, int64_t>;  // tensor, row-major index
using RefitPlanPtr = std::shared_ptr<const RefitPlan>;

RefitPlanPtr MustCompile(const RouteWorld& world, const RouteOptions& options = {}) {
  auto plan = CompileRefit(world.source_members, world.destination_members, options);
  INFO(plan.status());
  REQUIRE(plan.ok());
  return *plan;
}

// The first fault of the replicas, element by element, or an empty string.
std::string ReplicaFault(const RouteWorld& world, const RefitPlan& plan,
                         const std::set<std::string>& skipped) {
  std::map<Element, std::set<uint32_t>> expected;
  for (uint32_t s = 0; s < world.source_members.size(); ++s) {
    const Layout& layout = *world.source_members[s].layout;
    for (const Piece& piece : layout.pieces) {
      const TensorSpec& spec = layout.tensors[piece.tensor];
      if (skipped.contains(spec.name)) continue;
      ForEach(piece.box, [&](const Dims& at) {
        expected[{spec.name, GlobalIndex(at, spec.shape)}].insert(s);
      });
    }
  }
  std::erase_if(expected, [](const auto& entry) { return entry.second.size() < 2; });
  std::set<std::vector<uint32_t>> sets;
  for (const auto& holders : plan.replicas.holder_sets) {
    if (!sets.insert(holders).second) return "two sets of holders are equal";
    if (holders.size() < 2) return "a set of one holder";
    if (!std::is_sorted(holders.begin(), holders.end())) return "holders are not sorted";
  }
  std::map<Element, std::set<uint32_t>> found;
  const Replica* before = nullptr;
  for (const Replica& replica : plan.replicas.boxes) {
    if (IsEmpty(replica.box)) return "an empty box";
    if (before != nullptr &&
        (before->tensor > replica.tensor ||
         (before->tensor == replica.tensor && !BoxLess(before->box, replica.box)))) {
      return "boxes are not in order";
    }
    before = &replica;
    const TensorSpec& spec = plan.routes.tensors[replica.tensor];
    const auto holders = plan.replicas.HoldersOf(replica);
    for (const uint32_t holder : holders) {
      const Layout& layout = *world.source_members[holder].layout;
      const bool whole =
          std::any_of(layout.pieces.begin(), layout.pieces.end(), [&](const Piece& piece) {
            return layout.tensors[piece.tensor].name == spec.name &&
                   refitd::Contains(piece.box, replica.box);
          });
      if (!whole) return spec.name + " has a box that no piece of a holder holds whole";
    }
    std::string twice;
    ForEach(replica.box, [&](const Dims& at) {
      const Element element{spec.name, GlobalIndex(at, spec.shape)};
      if (!found.emplace(element, std::set<uint32_t>(holders.begin(), holders.end())).second) {
        twice = spec.name + " has an element in two boxes";
      }
    });
    if (!twice.empty()) return twice;
  }
  return found == expected ? "" : "other elements, or other holders, than there are";
}

TEST_CASE("Every element that several ranks hold is in one box with all its holders") {
  int64_t boxes = 0;
  for (uint64_t seed = 1; seed <= 2000; ++seed) {
    INFO("seed " << seed);
    Rng rng(seed);
    const RouteWorld world = RandomRouteWorld(&rng);
    RouteOptions options;
    std::set<std::string> skipped;
    if (Below(&rng, 4) == 0) {
      skipped.insert(world.tensors[0].name);
      options.skip_tensors = {world.tensors[0].name};
    }
    const RefitPlanPtr plan = MustCompile(world, options);
    REQUIRE(ReplicaFault(world, *plan, skipped) == "");
    boxes += static_cast<int64_t>(plan->replicas.boxes.size());
  }
  CHECK(boxes > 2000);
}

TEST_CASE("Planted faults of replicas are found") {
  const auto make = [] {
    for (uint64_t seed = 1;; ++seed) {
      Rng rng(seed);
      RouteWorld world = RandomRouteWorld(&rng);
      const RefitPlanPtr plan = MustCompile(world);
      if (plan->replicas.boxes.size() > 2) return std::pair(std::move(world), RefitPlan(*plan));
    }
  };
  const auto fault = [&](const auto& change) {
    auto [world, plan] = make();
    change(&plan.replicas);
    return ReplicaFault(world, plan, {});
  };
  CHECK(fault([](Replicas*) {}).empty());
  CHECK(!fault([](Replicas* r) { r->boxes.pop_back(); }).empty());
  CHECK(!fault([](Replicas* r) { r->boxes.push_back(r->boxes.back()); }).empty());
  CHECK(!fault([](Replicas* r) { std::swap(r->boxes[0], r->boxes[1]); }).empty());
  CHECK(!fault([](Replicas* r) { r->holder_sets[0].pop_back(); }).empty());
}

TEST_CASE("A node's part of a plan makes the same node program as the whole") {
  for (uint64_t seed = 1; seed <= 1000; ++seed) {
    INFO("seed " << seed);
    Rng rng(seed);
    const RouteWorld world = RandomRouteWorld(&rng);
    RouteOptions options;
    if (Below(&rng, 4) == 0) options.skip_instance = {true};
    const RefitPlanPtr plan = MustCompile(world, options);
    NodeProgramOptions program_options;
    program_options.chunk_bytes = Below(&rng, 2) == 0 ? 64 : 1 << 20;
    size_t routes = 0;
    for (uint32_t n = 0; n < plan->routes.nodes; ++n) {
      std::vector<LocalMember> sources;
      std::vector<LocalMember> destinations;
      std::vector<LayoutPtr> local;
      for (uint32_t i = 0; i < world.source_members.size(); ++i) {
        if (world.source_members[i].node != n) continue;
        sources.push_back({i, world.source_members[i].layout});
        local.push_back(sources.back().layout);
      }
      for (uint32_t i = 0; i < world.destination_members.size(); ++i) {
        if (world.destination_members[i].node != n || plan->routes.destination_skipped[i]) continue;
        destinations.push_back({i, world.destination_members[i].layout});
        local.push_back(destinations.back().layout);
      }
      const RoutePlan part = ShareOfNode(plan->routes, n, local);
      REQUIRE(ValidatePlan(part).ok());
      CHECK(part.source_labels.empty());
      const auto whole = CompileNode(plan->routes, n, sources, destinations, program_options);
      const auto of_part = CompileNode(part, n, sources, destinations, program_options);
      INFO(of_part.status());
      REQUIRE(whole.ok());
      REQUIRE(of_part.ok());
      REQUIRE(DigestOf(*of_part) == DigestOf(*whole));
      routes += part.routes.size();
    }
    REQUIRE(routes >= plan->routes.routes.size());
  }
}

// The digests that ranks compute; those of the ranks in `wrong` differ.
std::vector<std::vector<uint64_t>> DigestsOf(const RefitPlan& plan,
                                             const std::set<uint32_t>& wrong) {
  std::vector<std::vector<uint64_t>> digests;
  for (uint32_t n = 0; n < plan.routes.nodes; ++n) {
    std::vector<bool> on_node;
    for (const uint32_t node : plan.routes.source_nodes) on_node.push_back(node == n);
    std::vector<uint64_t>& of_node = digests.emplace_back();
    for (const ReplicaShare& share : SharesOf(plan.replicas, on_node)) {
      HashChain hash(share.tensor);
      hash.Add(share.box.offset);
      of_node.push_back(hash.hash() + (wrong.contains(share.source) ? 1 : 0));
    }
  }
  return digests;
}

RefitPlanPtr FourTrainers() {
  const LayoutPtr whole = Make({{"a", DType::kUint8, {8}}, {"b", DType::kUint8, {4}}},
                               {Dense(0, {{0}, {8}}), Dense(1, {{0}, {4}}, 8)});
  const LayoutPtr half = Make({{"a", DType::kUint8, {8}}}, {Dense(0, {{4}, {4}})});
  const auto trainer = [](LayoutPtr layout, uint32_t node, int rank) {
    return RouteMember{std::move(layout), node, 0, fmt::format("trainer rank {}", rank)};
  };
  const auto plan = CompileRefit(
      {trainer(whole, 0, 0), trainer(whole, 1, 1), trainer(half, 1, 2), trainer(nullptr, 0, 3)},
      {{whole, 0, 0, "engine"}}, {});
  INFO(plan.status());
  REQUIRE(plan.ok());
  return *plan;
}

TEST_CASE("Partial overlaps are cut and ranks of one layout share it") {
  const RefitPlanPtr plan = FourTrainers();
  REQUIRE(plan->replicas.boxes.size() == 3);
  CHECK(plan->replicas.boxes[0].box == Box{{0}, {4}});
  CHECK(plan->replicas.boxes[1].box == Box{{4}, {4}});
  CHECK(plan->replicas.HoldersOf(plan->replicas.boxes[0]).size() == 2);
  CHECK(plan->replicas.HoldersOf(plan->replicas.boxes[1]).size() == 3);
  const auto shares = SharesOf(plan->replicas, {false, true, true, false});
  REQUIRE(shares.size() == 4);
  CHECK(shares[2].source == 2);
}

// The part-th of `parts` equal ranges of hashes.
ReplicaFraction PartOf(uint32_t part, uint32_t parts) {
  const uint64_t share = UINT64_MAX / parts;
  return {part * share, part + 1 == parts ? UINT64_MAX : (part + 1) * share - 1};
}

TEST_CASE("Parts of the replicas are disjoint and cover them, and each finds what differs in it") {
  const RefitPlanPtr plan = FourTrainers();
  const auto all = DigestsOf(*plan, {});
  for (const uint32_t parts : {1U, 2U, 7U}) {
    size_t boxes = 0;
    for (uint32_t part = 0; part < parts; ++part) {
      for (const Replica& replica : plan->replicas.boxes) {
        if (PartOf(part, parts).Has(replica.hash)) ++boxes;
      }
    }
    CHECK(boxes == plan->replicas.boxes.size());
    // Rank 2 differs in every box that it holds. This is found in the parts that have such a box,
    // and in no other part.
    for (uint32_t part = 0; part < parts; ++part) {
      const ReplicaFraction of = PartOf(part, parts);
      std::vector<std::vector<uint64_t>> digests(all.size());
      bool differs = false;
      std::vector<size_t> next(all.size());
      const auto wrong = DigestsOf(*plan, {2});
      for (const Replica& replica : plan->replicas.boxes) {
        for (const uint32_t source : plan->replicas.HoldersOf(replica)) {
          const uint32_t node = plan->routes.source_nodes[source];
          const uint64_t digest = wrong[node][next[node]];
          differs |= of.Has(replica.hash) && digest != all[node][next[node]];
          if (of.Has(replica.hash)) digests[node].push_back(digest);
          ++next[node];
        }
      }
      const absl::Status status = CompareReplicas(*plan, digests, of);
      INFO(status);
      CHECK(status.ok() == !differs);
      if (differs) CHECK(status.code() == absl::StatusCode::kDataLoss);
    }
  }
}

TEST_CASE("Replicas that differ are named with tensor and ranks") {
  const RefitPlanPtr plan = FourTrainers();
  CHECK(CompareReplicas(*plan, DigestsOf(*plan, {})).ok());
  const absl::Status one = CompareReplicas(*plan, DigestsOf(*plan, {2}));
  CHECK(one.code() == absl::StatusCode::kDataLoss);
  CHECK_THAT(Message(one), Contains("tensor a") && Contains("[4]") &&
                               Contains("trainer rank 2 has") && Contains("2 of 3 ranks"));
  CHECK_THAT(Message(CompareReplicas(*plan, DigestsOf(*plan, {0, 1}))),
             Contains("trainer rank 2 has"));
  CHECK_THAT(Message(CompareReplicas(*plan, DigestsOf(*plan, {1}))),
             Contains("trainer rank 1 has"));
  auto digests = DigestsOf(*plan, {});
  digests[1].pop_back();
  CHECK(CompareReplicas(*plan, digests).code() == absl::StatusCode::kInternal);
  digests.resize(1);
  CHECK(CompareReplicas(*plan, digests).code() == absl::StatusCode::kInternal);
  digests = DigestsOf(*plan, {});
  digests.push_back({7});
  CHECK(CompareReplicas(*plan, digests).code() == absl::StatusCode::kInternal);
}

TEST_CASE("Replicas have the plan's limits") {
  std::vector<TensorSpec> tensors;
  std::vector<Piece> pieces;
  for (uint32_t t = 0; t < 20; ++t) {
    tensors.push_back({fmt::format("t{:02}", t), DType::kUint8, {1}});
    pieces.push_back(Dense(t, {{0}, {1}}, t));
  }
  const LayoutPtr layout = Make(tensors, pieces);
  RouteOptions options;
  options.max_routes = 20;
  const std::vector<RouteMember> trainers = {{layout, 0, 0, "a"}, {layout, 0, 0, "b"}};
  CHECK(CompileRefit(trainers, {}, options).ok());
  options.max_routes = 19;
  const auto plan = CompileRefit(trainers, {}, options);
  REQUIRE(plan.status().code() == absl::StatusCode::kResourceExhausted);
  CHECK_THAT(Message(plan.status()), Contains("tensor t19"));
}

TEST_CASE("An engine whose shard cuts a block of sharded scales is refused by rank and tensor") {
  const std::vector<TensorSpec> tensors = {{"w", DType::kFloat8E4M3FN, {512, 256}},
                                           {"w_scale_inv", DType::kFloat32, {4, 2}}};
  const auto rows = [&](int64_t begin, int64_t end, int64_t first_block, int64_t end_block) {
    return Make(tensors, {Dense(0, {{begin, 0}, {end - begin, 256}}),
                          Dense(1, {{first_block, 0}, {end_block - first_block, 2}}, 1 << 20)});
  };
  const LayoutPtr low = rows(0, 192, 0, 2);
  const LayoutPtr high = rows(192, 512, 1, 4);
  const LayoutPtr whole = rows(0, 512, 0, 4);
  // Trainers may cut inside blocks.
  const std::vector<RouteMember> trainers = {{low, 0, 0, "a"}, {high, 0, 0, "b"}};
  RouteOptions options;
  CHECK(CompileRefit(trainers, {{whole, 0, 0, "engine e rank 0"}}, options).ok());
  const std::vector<RouteMember> engines = {{whole, 0, 0, "engine e rank 0"},
                                            {low, 0, 1, "engine tp rank 0"},
                                            {high, 0, 1, "engine tp rank 1"}};
  const auto plan = CompileRefit(trainers, engines, options);
  CHECK(plan.status().code() == absl::StatusCode::kFailedPrecondition);
  CHECK_THAT(Message(plan.status()),
             Contains("engine tp rank 0: tensor w: the shard [0, 192) of dimension 0"));
  options.skip_instance = {false, true};
  CHECK(CompileRefit(trainers, engines, options).ok());
  options.skip_instance = {};
  // Cuts are allowed on a block's boundary, and anywhere if every rank has all scales.
  CHECK(CompileRefit(trainers,
                     {{rows(0, 256, 0, 2), 0, 0, "rank 0"}, {rows(256, 512, 2, 4), 0, 0, "rank 1"}},
                     options)
            .ok());
  CHECK(CompileRefit(trainers,
                     {{rows(0, 192, 0, 4), 0, 0, "rank 0"}, {rows(192, 512, 0, 4), 0, 0, "rank 1"}},
                     options)
            .ok());
}

TEST_CASE("A model of many tensors over many ranks has one box for each that is replicated") {
  // 64 expert parallel ranks of 4 replicas; every rank has every dense tensor.
  constexpr uint32_t kExperts = 44'000;
  constexpr uint32_t kDense = 1'395;
  constexpr uint32_t kParallel = 64;
  std::vector<TensorSpec> tensors;
  for (uint32_t t = 0; t < kExperts + kDense; ++t) {
    tensors.push_back({fmt::format("model.layers.{:06}.weight", t), DType::kBFloat16, {64, 64}});
  }
  std::vector<RouteMember> sources;
  for (uint32_t rank = 0; rank < 4 * kParallel; ++rank) {
    auto layout = std::make_shared<Layout>();
    const auto add = [&](uint32_t t) {
      const auto index = static_cast<uint32_t>(layout->tensors.size());
      layout->tensors.push_back(tensors[t]);
      layout->pieces.push_back(Dense(index, WholeBox(tensors[t].shape), int64_t{index} * 8192));
    };
    for (uint32_t t = rank % kParallel; t < kExperts; t += kParallel) add(t);
    for (uint32_t t = kExperts; t < kExperts + kDense; ++t) add(t);
    sources.push_back({std::move(layout), rank / 8, 0, fmt::format("trainer rank {}", rank)});
  }
  const auto plan = CompileRefit(sources, {}, {});
  REQUIRE(plan.ok());
  CHECK((*plan)->replicas.boxes.size() == kExperts + kDense);
  CHECK((*plan)->replicas.holder_sets.size() == kParallel + 1);
}

TEST_CASE("What a plan moves is counted, and what no destination wants is named") {
  const auto with = [](const std::vector<std::string>& stored, const std::string& named) {
    auto layout = std::make_shared<Layout>();
    for (const std::string& name : stored) {
      const auto tensor = static_cast<uint32_t>(layout->tensors.size());
      layout->tensors.push_back({name, DType::kFloat32, {4}});
      layout->pieces.push_back({tensor, {{0}, {4}}, RegionId(1), 16 * int64_t{tensor}, {1}});
    }
    if (!named.empty()) layout->tensors.push_back({named, DType::kFloat32, {4}});
    return layout;
  };
  const std::vector<RouteMember> sources = {{with({"a", "b", "only", "pushed", "rope"}, ""), 0},
                                            {with({"b", "tied"}, ""), 1}};
  const std::vector<RouteMember> destinations = {{with({"a", "pushed", "rope"}, "tied"), 0},
                                                 {with({"b"}, "unheld"), 1}};
  RouteOptions options;
  options.skip_tensors = {"pushed"};
  options.engine_only = {"rope"};
  const RefitContent content = ContentOf(sources, destinations, options);
  CHECK(content.tensors == 2);  // "a" and "b"
  CHECK(content.bytes == 2 * 16);
  CHECK(content.unwanted == std::vector<std::string>{"only", "rope", "tied"});
  CHECK(content.unwanted_bytes == 3 * 16);
}

// Two trainer ranks on two nodes hold halves of "embed" and "head"; the engine ties the two.
RefitPlanPtr TiedPlan() {
  const std::vector<TensorSpec> tensors = {{"embed", DType::kUint8, {8}},
                                           {"head", DType::kUint8, {8}}};
  const auto half = [&](int64_t from) {
    return Make(tensors, {Dense(0, {{from}, {4}}), Dense(1, {{from}, {4}}, 64)});
  };
  Layout engine;
  engine.tensors = tensors;
  engine.pieces = {Dense(0, {{0}, {8}})};
  engine.ties = {{1, 0}};
  const auto plan = CompileRefit(
      {{half(0), 0, 0, "trainer rank 0"}, {half(4), 1, 0, "trainer rank 1"}},
      {{std::make_shared<const Layout>(std::move(engine)), 0, 0, "engine x rank 0"}}, {});
  INFO(plan.status());
  REQUIRE(plan.ok());
  return *plan;
}

TEST_CASE(
    "a head that the engine ties to the embedding must have its values, else both are named") {
  const RefitPlanPtr plan = TiedPlan();
  CHECK(plan->content.unwanted == std::vector<std::string>{"head"});
  REQUIRE(plan->replicas.ties.size() == 1);
  CHECK(plan->replicas.replicated == 0);
  CHECK(plan->replicas.boxes.size() == 4);
  CHECK(NextFraction(plan->replicas, 0, 32) == ReplicaFraction());
  // Each rank has a half of each: the boxes come by tensor ("head" first), each node has one of
  // two.
  CHECK(CompareReplicas(*plan, {{1, 3}, {2, 0}}).ok());
  const absl::Status differ = CompareReplicas(*plan, {{1, 3}, {2, 1}});
  CHECK(differ.code() == absl::StatusCode::kFailedPrecondition);
  CHECK_THAT(std::string(differ.message()),
             Contains("tensor head and tensor embed") && Contains("engine x rank 0"));
}

TEST_CASE("a tie of which the trainers have one name, or pushes one, is not compared") {
  const std::vector<TensorSpec> tensors = {{"embed", DType::kUint8, {8}},
                                           {"head", DType::kUint8, {8}}};
  Layout engine;
  engine.tensors = tensors;
  engine.pieces = {Dense(0, {{0}, {8}})};
  engine.ties = {{1, 0}};
  const std::vector<RouteMember> engines = {
      {std::make_shared<const Layout>(std::move(engine)), 0, 0, "engine"}};
  const auto ties = [&](LayoutPtr trainer, const RouteOptions& options) {
    const auto plan = CompileRefit({{std::move(trainer), 0, 0, "trainer"}}, engines, options);
    REQUIRE(plan.ok());
    return (*plan)->replicas.ties.size();
  };
  CHECK(ties(Make({tensors[0]}, {Dense(0, {{0}, {8}})}), {}) == 0);
  const LayoutPtr both = Make(tensors, {Dense(0, {{0}, {8}}), Dense(1, {{0}, {8}}, 8)});
  CHECK(ties(both, {}) == 1);
  RouteOptions options;
  options.skip_tensors = {"head"};
  CHECK(ties(both, options) == 0);
  // What can't be compared as a whole is refused.
  const LayoutPtr part = Make(tensors, {Dense(0, {{0}, {8}}), Dense(1, {{0}, {4}}, 8)});
  const auto refused = CompileRefit({{part, 0, 0, "trainer"}}, engines, {});
  CHECK(refused.status().code() == absl::StatusCode::kFailedPrecondition);
  CHECK_THAT(std::string(refused.status().message()),
             Contains("tensor head") && Contains("lack 4"));
}

// `count` tensors, each held by two ranks; tensor i has `bytes(i)` bytes.
RefitPlanPtr Replicated(int count, const std::function<int64_t(int)>& bytes) {
  std::vector<TensorSpec> tensors;
  std::vector<Piece> pieces;
  int64_t end = 0;
  for (int i = 0; i < count; ++i) {
    tensors.push_back({fmt::format("w{}", i), DType::kUint8, {bytes(i)}});
    pieces.push_back(Dense(static_cast<uint32_t>(i), {{0}, {bytes(i)}}, end));
    end += bytes(i);
  }
  const LayoutPtr layout = Make(tensors, pieces);
  const auto plan =
      CompileRefit({{layout, 0, 0, "trainer rank 0"}, {layout, 0, 0, "trainer rank 1"}},
                   {{layout, 0, 0, "engine"}}, {});
  REQUIRE(plan.ok());
  return *plan;
}

TEST_CASE(
    "half-stale replicas of a model of few tensors are found at once, of others in bounded time") {
  const RefitPlanPtr few =
      Replicated(static_cast<int>(kTensorsComparedAlways), [](int) { return 9; });
  CHECK(NextFraction(few->replicas, 7, 32) == ReplicaFraction());
  for (const auto& bytes : std::vector<std::function<int64_t(int)>>{
           [](int) { return 8; }, [](int i) { return i == 5 ? 1 << 20 : 1 + i % 7; }}) {
    const RefitPlanPtr plan = Replicated(1000, bytes);
    int64_t total = 0;
    int64_t largest = 0;
    for (const TensorSpec& tensor : plan->routes.tensors) {
      total += tensor.shape[0];
      largest = std::max(largest, tensor.shape[0]);
    }
    for (const int64_t every : {1, 3, 32}) {
      std::set<size_t> compared;
      uint64_t cursor = 0;
      int64_t versions = 0;
      do {
        const ReplicaFraction part = NextFraction(plan->replicas, cursor, every);
        int64_t now = 0;
        for (size_t b = 0; b < plan->replicas.boxes.size(); ++b) {
          if (!part.Has(plan->replicas.boxes[b].hash)) continue;
          CHECK(compared.insert(b).second);
          now += ElementCount(plan->replicas.boxes[b].box);
        }
        CHECK(now > 0);
        CHECK(now <= (total + every - 1) / every + largest);
        cursor = part.last + 1;
        ++versions;
      } while (cursor != 0);
      CHECK(versions <= every);
      CHECK(compared.size() == plan->replicas.boxes.size());
    }
  }
}

TEST_CASE("the error for half-stale replicas says what is likely the cause") {
  const RefitPlanPtr plan = FourTrainers();
  const absl::Status differ = CompareReplicas(*plan, DigestsOf(*plan, {1}));
  CHECK(differ.code() == absl::StatusCode::kDataLoss);
  CHECK_THAT(std::string(differ.message()), Contains("tensor a") && Contains("trainer rank 1") &&
                                                Contains("overlap_param_gather"));
}

}  // namespace
}  // namespace refitd
