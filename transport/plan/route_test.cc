#include "transport/plan/route.h"

#include <algorithm>
#include <catch2/catch.hpp>
#include <set>

#include "tests/workloads/route_explanation.h"
#include "transport/base/status.h"
#include "transport/plan/route_testing.h"

namespace refitd {
namespace {

using Catch::Matchers::Contains;

RoutePlan MustCompile(const std::vector<RouteMember>& sources,
                      const std::vector<RouteMember>& destinations,
                      const RouteOptions& options = {}) {
  auto plan = CompileRoutes(sources, destinations, options);
  INFO(plan.status());
  REQUIRE(plan.ok());
  return *std::move(plan);
}

std::string CompileError(const std::vector<RouteMember>& sources,
                         const std::vector<RouteMember>& destinations,
                         const RouteOptions& options = {}) {
  const auto plan = CompileRoutes(sources, destinations, options);
  REQUIRE(!plan.ok());
  CHECK(plan.status().code() == absl::StatusCode::kFailedPrecondition);
  return Message(plan.status());
}

RouteMember Trainer(LayoutPtr layout, uint32_t node, uint32_t rank = 0) {
  return {std::move(layout), node, 0, fmt::format("trainer {}", rank)};
}

RouteMember Engine(LayoutPtr layout, uint32_t node, uint32_t rank = 0, uint32_t instance = 0) {
  return {std::move(layout), node, instance, fmt::format("engine {}", rank)};
}

// One tensor "w" of bytes, and some boxes of it.
LayoutPtr Bytes(const Dims& shape, const std::vector<Box>& boxes) {
  std::vector<Piece> pieces;
  int64_t offset = 0;
  for (const Box& box : boxes) {
    pieces.push_back(Dense(0, box, offset));
    offset += ElementCount(box);
  }
  return Make({{"w", DType::kUint8, shape}}, std::move(pieces));
}

RouteOptions RandomOptions(Rng* rng) {
  RouteOptions options;
  constexpr int64_t kSplits[] = {1, 8, 64, kSplitBytes};
  options.split_bytes = kSplits[Below(rng, 4)];
  if (Below(rng, 4) == 0) options.skip_instance = {true};
  return options;
}

RouteOptions RandomChains(Rng* rng) {
  RouteOptions options = RandomOptions(rng);
  options.relay_lag = static_cast<uint32_t>(1 + Below(rng, 2));
  options.relay_excess = 0;
  return options;
}

TEST_CASE("Every node gets each element that it wants once and from itself where it can") {
  size_t routes = 0;
  for (uint64_t seed = 1; seed <= 3000; ++seed) {
    INFO("seed " << seed);
    Rng rng(seed);
    const RouteWorld world = RandomRouteWorld(&rng);
    const RouteOptions options = RandomOptions(&rng);
    const RoutePlan plan = MustCompile(world.source_members, world.destination_members, options);
    REQUIRE(PlanFault(world, plan, options) == "");
    routes += plan.routes.size();
  }
  CHECK(routes > 10'000);
}

TEST_CASE("With chains every node gets each element once and sources send it once") {
  int64_t chained = 0;
  uint32_t longest = 0;
  for (uint64_t seed = 1; seed <= 3000; ++seed) {
    INFO("seed " << seed);
    Rng rng(seed);
    const RouteWorld world = RandomRouteWorld(&rng, 7);
    const RouteOptions options = RandomChains(&rng);
    const RoutePlan plan = MustCompile(world.source_members, world.destination_members, options);
    REQUIRE(PlanFault(world, plan, options) == "");
    REQUIRE(ValidatePlan(plan).ok());
    if (plan.relay.lag == 0) continue;
    ++chained;
    REQUIRE(plan.relay.lag == options.relay_lag);
    longest = std::max(longest, plan.relay.longest);
    uint32_t most = 0;
    for (const ChainUse& use : ChainsOf(plan)) {
      most = std::max(most, static_cast<uint32_t>(use.nodes.size()));
    }
    REQUIRE(plan.relay.longest == most);
  }
  CHECK(chained > 1000);
  CHECK(longest >= 6);
}

TEST_CASE("A plan without shared destinations is the same with chains allowed") {
  int64_t same = 0;
  for (uint64_t seed = 1; seed <= 1500; ++seed) {
    INFO("seed " << seed);
    Rng rng(seed);
    const RouteWorld world = RandomRouteWorld(&rng);
    RouteOptions options = RandomOptions(&rng);
    const RoutePlan plain = MustCompile(world.source_members, world.destination_members, options);
    // No two nodes share a box if all engines are on one node.
    const std::vector<RouteMember>& engines = world.destination_members;
    const bool alone = std::all_of(engines.begin(), engines.end(),
                                   [&](const RouteMember& m) { return m.node == engines[0].node; });
    options.relay_lag = 2;
    const RoutePlan allowed = MustCompile(world.source_members, world.destination_members, options);
    if (!alone && allowed.relay.lag > 0) continue;
    ++same;
    REQUIRE(allowed.relay == RelayShape());
    REQUIRE(DigestOf(allowed) == DigestOf(plain));
    REQUIRE(allowed.longest_stream == plain.longest_stream);
    REQUIRE(ChainsOf(allowed).empty());
  }
  CHECK(same > 500);
}

// Trainers of four nodes with a part of the model each, whole or replicated in pairs, and
// instances of two nodes each.
RoutePlan Fleet(uint32_t instances, bool replicated, uint32_t lag = 2, int64_t rows = 1 << 20) {
  constexpr uint32_t kHolders = 4;
  const auto part = [rows](int64_t first, int64_t count) {
    return Bytes({rows, 1024}, {{{first, 0}, {count, 1024}}});
  };
  std::vector<RouteMember> trainers;
  for (uint32_t r = 0; r < kHolders; ++r) {
    const int64_t parts = replicated ? kHolders / 2 : kHolders;
    trainers.push_back(Trainer(part(r % parts * rows / parts, rows / parts), r, r));
  }
  const std::vector<LayoutPtr> halves = {part(0, rows / 2), part(rows / 2, rows / 2)};
  std::vector<RouteMember> engines;
  for (uint32_t e = 0; e < 2 * instances; ++e) {
    engines.push_back(Engine(halves[e % 2], kHolders + e, e, e / 2));
  }
  RouteOptions options;
  options.relay_lag = lag;
  return MustCompile(trainers, engines, options);
}

TEST_CASE("With chains no link carries much more than the bound whatever the number of instances") {
  for (const bool replicated : {false, true}) {
    for (const uint32_t instances : {2, 3, 4, 8, 13, 32, 128}) {
      INFO(instances << " instances, replicated " << replicated);
      const RoutePlan plan = Fleet(instances, replicated);
      const int64_t held = (int64_t{1} << 30) / (replicated ? 2 : 4);
      for (uint32_t n = 0; n < 4; ++n) CHECK(plan.links.node_sends[n] <= held * 105 / 100);
      CHECK(WorstLinkOf(plan).bytes <= plan.bound.bytes() * 110 / 100);
      if (replicated && instances == 2) continue;  // each replica serves one instance
      CHECK(plan.relay.longest == instances);
      CHECK(Estimate(plan, {.node_out = 1e6, .node_in = 1e6}).seconds <=
            1.15 * 1.05 * static_cast<double>(plan.bound.bytes()) / 1e6);
    }
  }
  // Without chains the sources' links carry everything.
  const RoutePlan plain = Fleet(8, false, 0);
  CHECK(plain.links.node_sends[0] == 8 * (int64_t{1} << 28));
  CHECK(plain.relay == RelayShape());
}

TEST_CASE("Nodes of a chain send to each other equally much") {
  const RoutePlan plan = Fleet(8, false, 2, 8 << 20);
  const size_t nodes = plan.nodes;
  int64_t least = INT64_MAX;
  int64_t most = 0;
  for (uint32_t a = 4; a < nodes; ++a) {
    for (uint32_t b = 4; b < nodes; ++b) {
      if (a == b || a % 2 != b % 2) continue;
      least = std::min(least, plan.links.matrix[a * nodes + b]);
      most = std::max(most, plan.links.matrix[a * nodes + b]);
    }
  }
  CHECK(least > 0);
  CHECK(most <= 2 * least);
}

TEST_CASE("A small model takes a single order where nobody sends more than the bound") {
  const RoutePlan plan = Fleet(16, false, 2, 64 << 10);
  CHECK(plan.relay.longest == 16);
  CHECK(WorstLinkOf(plan).bytes <= plan.bound.bytes());
  for (uint32_t a = 0; a < plan.nodes; ++a) {
    int peers = 0;
    for (uint32_t b = 0; b < plan.nodes; ++b) {
      peers += plan.links.matrix[a * plan.nodes + b] > 0 ? 1 : 0;
    }
    CHECK(peers <= 1);
  }
}

TEST_CASE("A node that sends something else as well is last in a chain") {
  // Node 5 holds what engines of nodes 0 to 4 want; node 0 holds what the other ranks of their
  // instances want, which are all on node 6.
  constexpr int64_t kRows = 1 << 14;
  const auto of = [](const std::string& name) {
    return Make({{name, DType::kUint8, {kRows, 1024}}}, {Dense(0, {{0, 0}, {kRows, 1024}})});
  };
  std::vector<RouteMember> engines;
  for (uint32_t n = 0; n < 5; ++n) {
    engines.push_back(Engine(of("a"), n, 2 * n, n));
    engines.push_back(Engine(of("b"), 6, 2 * n + 1, n));
  }
  RouteOptions options;
  options.relay_lag = 1;
  const RoutePlan plan =
      MustCompile({Trainer(of("b"), 0), Trainer(of("a"), 5, 1)}, engines, options);
  CHECK(plan.relay.longest == 5);
  CHECK(WorstLinkOf(plan).bytes <= plan.bound.bytes() * 110 / 100);
  CHECK(plan.links.node_forwards[0] <= kRows * 1024 / 10);
}

TEST_CASE("A trainers' node with engines sends no more than the bound") {
  // Node 0 holds everything and node 1 nothing; engines of nodes 0 to 5 want all of it.
  constexpr int64_t kRows = 1 << 14;
  const auto of = [](const std::string& name) {
    return Make({{name, DType::kUint8, {kRows, 1024}}}, {Dense(0, {{0, 0}, {kRows, 1024}})});
  };
  const LayoutPtr both =
      Make({{"a", DType::kUint8, {kRows, 1024}}, {"b", DType::kUint8, {kRows, 1024}}},
           {Dense(0, {{0, 0}, {kRows, 1024}}), Dense(1, {{0, 0}, {kRows, 1024}}, kRows * 1024)});
  std::vector<RouteMember> engines;
  for (uint32_t n = 0; n < 6; ++n) engines.push_back(Engine(both, n, n, n));
  RouteOptions options;
  options.relay_lag = 1;
  const RoutePlan plan =
      MustCompile({Trainer(of("a"), 0), Trainer(of("b"), 5, 1)}, engines, options);
  CHECK(plan.relay.lag == 1);
  CHECK(plan.bound.bytes() == 2 * kRows * 1024);
  CHECK(WorstLinkOf(plan).bytes <= plan.bound.bytes());
}

TEST_CASE("Instances that are sharded differently are sent each element once") {
  // Two instances of one node, and one over three nodes.
  constexpr int64_t kRows = 3 << 10;
  const auto rows = [](int64_t first, int64_t count) {
    return Bytes({kRows, 1024}, {{{first, 0}, {count, 1024}}});
  };
  const LayoutPtr whole = rows(0, kRows);
  std::vector<RouteMember> engines = {Engine(whole, 1, 0, 0), Engine(whole, 2, 1, 1)};
  for (uint32_t i = 0; i < 3; ++i) {
    engines.push_back(Engine(rows(i * kRows / 3, kRows / 3), 3 + i, i, 2));
  }
  RouteOptions options;
  options.relay_lag = 2;
  const RoutePlan plan = MustCompile({Trainer(whole, 0)}, engines, options);
  CHECK(plan.links.node_sends[0] == kRows * 1024);
  CHECK(WorstLinkOf(plan).bytes == kRows * 1024);
  CHECK_THAT(ToText(Explain(plan)), Contains("chains of at most 3 nodes") && Contains("0 > "));
}

TEST_CASE("The digest does not depend on the order of tensors and pieces or on shared objects") {
  for (uint64_t seed = 1; seed <= 800; ++seed) {
    INFO("seed " << seed);
    Rng rng(seed);
    const bool chains = seed > 500;
    const RouteWorld world = RandomRouteWorld(&rng, chains ? 7 : 4);
    const RouteOptions options = chains ? RandomChains(&rng) : RandomOptions(&rng);
    const uint64_t digest =
        DigestOf(MustCompile(world.source_members, world.destination_members, options));
    REQUIRE(DigestOf(MustCompile(world.source_members, world.destination_members, options)) ==
            digest);
    std::vector<RouteMember> sources = world.source_members;
    std::vector<RouteMember> destinations = world.destination_members;
    for (auto* members : {&sources, &destinations}) {
      for (RouteMember& member : *members) member.layout = Shuffled(&rng, *member.layout);
    }
    REQUIRE(DigestOf(MustCompile(sources, destinations, options)) == digest);
  }
}

TEST_CASE("The digest depends on routes nodes layouts and who is left out") {
  const LayoutPtr whole = Bytes({8}, {{{0}, {8}}});
  const LayoutPtr half = Bytes({8}, {{{0}, {4}}});
  std::set<uint64_t> digests = {DigestOf(MustCompile({Trainer(whole, 0)}, {Engine(whole, 1)}))};
  digests.insert(DigestOf(MustCompile({Trainer(whole, 1)}, {Engine(whole, 0)})));
  digests.insert(DigestOf(MustCompile({Trainer(whole, 0)}, {Engine(half, 1)})));
  digests.insert(
      DigestOf(MustCompile({Trainer(whole, 0)}, {Engine(whole, 1), Engine(half, 1, 1)})));
  RouteOptions skip;
  skip.skip_instance = {true};
  digests.insert(DigestOf(MustCompile({Trainer(whole, 0)}, {Engine(whole, 1)}, skip)));
  RoutePlan plan = MustCompile({Trainer(whole, 0), Trainer(whole, 0, 1)}, {Engine(whole, 1)});
  digests.insert(DigestOf(plan));
  plan.routes[0].source ^= 1U;
  digests.insert(DigestOf(plan));
  plan.box_numbers[1] -= 1;
  digests.insert(DigestOf(plan));
  plan.node_sets[0] = {0};
  digests.insert(DigestOf(plan));
  CHECK(digests.size() == 9);
}

TEST_CASE("Planted faults of a plan are found") {
  Rng rng(7);
  RouteWorld world = RandomRouteWorld(&rng);
  RoutePlan plan = MustCompile(world.source_members, world.destination_members);
  while (plan.routes.size() < 4 || plan.nodes < 2 || plan.wire_bytes == 0) {
    world = RandomRouteWorld(&rng);
    plan = MustCompile(world.source_members, world.destination_members);
  }
  REQUIRE(PlanFault(world, plan, {}) == "");
  const auto fault = [&](const auto& plant) {
    RoutePlan wrong = plan;
    plant(&wrong);
    return PlanFault(world, wrong, {});
  };
  CHECK(fault([](RoutePlan* p) { p->routes.pop_back(); }) != "");
  CHECK(fault([](RoutePlan* p) { p->routes.push_back(p->routes[0]); }) != "");
  CHECK(fault([](RoutePlan* p) { ++p->links.node_sends[0]; }) == "node_sends");
  CHECK(fault([](RoutePlan* p) { ++p->bound.node_alone; }) == "bound of a node alone");
  CHECK(fault([](RoutePlan* p) {
          for (auto& nodes : p->node_sets) nodes[0] = (nodes[0] + 1) % p->nodes;
        }) != "");
}

TEST_CASE("Slices that ranks of one node want are one route") {
  // Tensor parallel over 32 ranks of 4 nodes, 2 instances on 8 nodes, rows and columns.
  for (const size_t dim : {size_t{0}, size_t{1}}) {
    const Dims shape = {64, 64};
    std::vector<RouteMember> engines;
    std::vector<LayoutPtr> slices;
    for (int64_t r = 0; r < 32; ++r) {
      Box box = WholeBox(shape);
      box.offset[dim] = r * 2;
      box.extent[dim] = 2;
      slices.push_back(Bytes(shape, {box}));
    }
    for (uint32_t e = 0; e < 64; ++e) {
      engines.push_back(Engine(slices[e % 32], 1 + e / 8, e, e / 32));
    }
    const RoutePlan plan = MustCompile({Trainer(Bytes(shape, {WholeBox(shape)}), 0)}, engines);
    REQUIRE(plan.routes.size() == 4);
    for (const Route& route : plan.routes) {
      CHECK(plan.BoxOf(route).extent[dim] == 16);
      CHECK(plan.NodesOf(route).size() == 2);
    }
    CHECK(plan.bytes == 2 * 64 * 64);
    CHECK(plan.bound.rank_alone == 2 * 64 * 64);
    CHECK(plan.bound.node_receives == 64 * 64 / 4);
  }
}

TEST_CASE("Replicated sources share the load over nodes and over ranks") {
  // Node 0 has three holders, node 1 one, and one more tensor that only rank 3 on node 1 has.
  constexpr int64_t kRows = 4096;
  const auto layout = [](bool more) {
    std::vector<Piece> pieces = {Dense(0, {{0, 0}, {kRows, 1024}})};
    if (more) pieces.push_back(Dense(1, {{0}, {1 << 20}}, kRows * 1024));
    return Make({{"w", DType::kUint8, {kRows, 1024}}, {"x", DType::kUint8, {1 << 20}}}, pieces);
  };
  const LayoutPtr replica = layout(false);
  const std::vector<RouteMember> trainers = {Trainer(replica, 0, 0), Trainer(replica, 0, 1),
                                             Trainer(replica, 0, 2), Trainer(layout(true), 1, 3)};
  std::vector<RouteMember> engines;
  for (uint32_t e = 0; e < 3; ++e) engines.push_back(Engine(layout(true), 2 + e, e, e));
  const RoutePlan plan = MustCompile(trainers, engines);
  // The two nodes send 15 MiB in all, 3 MiB of which only rank 3 holds.
  constexpr int64_t kSlack = kSplitBytes / 4;
  CHECK(plan.bytes == int64_t{15} << 20);
  CHECK(std::abs(plan.links.node_sends[0] - plan.links.node_sends[1]) <= 2 * kSlack);
  for (const int rank : {0, 1, 2}) {
    CHECK(std::abs(plan.links.rank_supplies[rank] - plan.links.node_sends[0] / 3) <= 2 * kSlack);
  }
  CHECK(plan.bound.rank_alone == 3 << 20);
  CHECK(plan.bound.node_receives == 5 << 20);
  CHECK(plan.routes.size() <= 8);
}

TEST_CASE("Small replicated tensors are shared out whole") {
  std::vector<TensorSpec> tensors;
  std::vector<Piece> pieces;
  for (uint32_t t = 0; t < 400; ++t) {
    tensors.push_back({fmt::format("t{}", t), DType::kUint8, {100 + t % 7}});
    pieces.push_back(Dense(t, {{0}, {100 + t % 7}}, t * 128));
  }
  const LayoutPtr layout = Make(tensors, pieces);
  const RoutePlan plan = MustCompile(
      {Trainer(layout, 0, 0), Trainer(layout, 0, 1), Trainer(layout, 1, 2), Trainer(layout, 1, 3)},
      {Engine(layout, 2), Engine(layout, 3, 1, 1)});
  for (const Route& route : plan.routes) {
    CHECK(plan.BoxOf(route).extent == plan.tensors[route.tensor].shape);
  }
  const auto [least, most] =
      std::minmax_element(plan.links.rank_supplies.begin(), plan.links.rank_supplies.end());
  CHECK(*most - *least <= 200);
}

TEST_CASE("Replicated boxes are cut only where they are large beside what a source supplies") {
  // 400 tensors of 2 MiB and one of 256 MiB, whole on four ranks of a node.
  std::vector<TensorSpec> tensors;
  std::vector<Piece> pieces;
  int64_t end = 0;
  const auto add = [&](const std::string& name, int64_t rows) {
    const auto t = static_cast<uint32_t>(tensors.size());
    tensors.push_back({name, DType::kUint8, {rows, 2048}});
    pieces.push_back(Dense(t, {{0, 0}, {rows, 2048}}, end));
    end += rows * 2048;
  };
  for (int t = 0; t < 400; ++t) add(fmt::format("small{}", t), 1024);
  add("large", 128 * 1024);
  const LayoutPtr layout = Make(tensors, pieces);
  std::vector<RouteMember> trainers;
  for (uint32_t r = 0; r < 4; ++r) trainers.push_back(Trainer(layout, 0, r));
  const std::vector<RouteMember> engines = {Engine(layout, 0)};
  const RoutePlan plan = MustCompile(trainers, engines);
  int64_t of_large = 0;
  for (const Route& route : plan.routes) {
    const bool large = plan.tensors[route.tensor].name == "large";
    of_large += large ? 1 : 0;
    if (!large) CHECK(plan.BoxOf(route).extent == plan.tensors[route.tensor].shape);
  }
  CHECK(of_large > 1);
  const auto [least, most] =
      std::minmax_element(plan.links.rank_supplies.begin(), plan.links.rank_supplies.end());
  CHECK(*most - *least <= end / 4 / RouteOptions().split_share);

  RouteOptions cut;
  cut.split_share = 0;
  const auto finer = CompileRoutes(trainers, engines, cut);
  REQUIRE(finer.ok());
  CHECK(finer->routes.size() >= 2 * plan.routes.size());
}

TEST_CASE("A disagreement about dtype or shape names the tensor and both sides") {
  const auto of = [](DType dtype, Dims shape) {
    Box box = WholeBox(shape);
    return Make({{"w", dtype, std::move(shape)}}, {Dense(0, std::move(box))});
  };
  const LayoutPtr a = of(DType::kBFloat16, {4});
  const LayoutPtr b = of(DType::kFloat16, {4});
  const LayoutPtr c = of(DType::kBFloat16, {5});
  CHECK_THAT(
      CompileError({Trainer(a, 0)}, {Engine(b, 1)}),
      Contains("tensor w") && Contains("bfloat16 [4] in trainer 0") &&
          Contains("float16 [4] in engine 0; a trainer's register(dtype=) casts to float16"));
  CHECK_THAT(CompileError({Trainer(a, 0), Trainer(c, 0, 1)}, {Engine(a, 1)}),
             Contains("bfloat16 [4] in trainer 0") && Contains("bfloat16 [5] in trainer 1"));
  // No cast makes a tensor of another shape, and none is between two trainers.
  CHECK_THAT(CompileError({Trainer(c, 0)}, {Engine(b, 1)}), !Contains("dtype="));
  CHECK_THAT(CompileError({Trainer(a, 0), Trainer(b, 0, 1)}, {Engine(a, 1)}), !Contains("dtype="));
}

TEST_CASE("An element that no trainer holds is named") {
  const LayoutPtr whole = Bytes({4, 4}, {{{0, 0}, {4, 4}}});
  const LayoutPtr hole = Bytes({4, 4}, {{{0, 0}, {2, 4}}, {{2, 0}, {2, 3}}});
  CHECK_THAT(CompileError({Trainer(hole, 0)}, {Engine(whole, 1)}),
             Contains("tensor w") && Contains("[2, 3]") && Contains("engine 0"));
  const RoutePlan plan = MustCompile({Trainer(whole, 0)}, {Engine(hole, 1)});
  CHECK(plan.bytes == 14);
  CHECK(plan.links.node_stores[1] == 14);
}

TEST_CASE("A tensor that is missing on either side is an error unless allowed") {
  const LayoutPtr a = Make({{"a", DType::kUint8, {1}}}, {Dense(0, {{0}, {1}})});
  const LayoutPtr both = Make({{"a", DType::kUint8, {1}}, {"b", DType::kUint8, {2}}},
                              {Dense(0, {{0}, {1}}), Dense(1, {{0}, {2}}, 1)});
  CHECK_THAT(CompileError({Trainer(a, 0)}, {Engine(both, 0)}),
             Contains("tensor b") && Contains("engine 0"));
  CHECK_THAT(CompileError({Trainer(both, 0)}, {Engine(both, 0), Engine(a, 0, 1, 7)}),
             Contains("tensor b") && Contains("trainer 0") &&
                 Contains("no rank of the instance of engine 1 declares it") &&
                 Contains("every instance must declare"));
  CHECK_THAT(CompileError({Trainer(a, 0)}, {Engine(both, 0)}),
             Contains("engine_only_tensors") && Contains("tied="));
  CHECK_THAT(CompileError({Trainer(both, 0)}, {Engine(a, 0)}), Contains("unwanted_tensors"));
  // Names of a model that torch.compile wraps: leaving the tensor out would leave it stale.
  const LayoutPtr wrapped = Make({{"_orig_mod.a", DType::kUint8, {1}}}, {Dense(0, {{0}, {1}})});
  for (const std::string& error : {CompileError({Trainer(wrapped, 0)}, {Engine(a, 0)}),
                                   CompileError({Trainer(a, 0)}, {Engine(wrapped, 0)})}) {
    CHECK_THAT(error, Contains("is known: \"_orig_mod.\" (torch.compile)") &&
                          !Contains("unwanted_tensors") && !Contains("engine_only_tensors"));
  }
  RouteOptions options;
  options.unwanted_allowed = {"b"};
  CHECK(MustCompile({Trainer(both, 0)}, {Engine(a, 0)}, options).bytes == 1);
  options = {};
  options.skip_tensors = {"b"};
  CHECK(MustCompile({Trainer(both, 0)}, {Engine(a, 0)}, options).bytes == 1);
  CHECK(MustCompile({Trainer(a, 0)}, {Engine(both, 0)}, options).bytes == 1);
  options = {};
  options.engine_only = {"b"};
  CHECK(MustCompile({Trainer(a, 0)}, {Engine(both, 0)}, options).bytes == 1);
  // No engine is left that wants the tensor.
  options = {};
  options.skip_instance = {true};
  CHECK(MustCompile({Trainer(both, 0)}, {Engine(a, 0)}, options).bytes == 0);
}

TEST_CASE("An element that a destination has twice is an error") {
  const LayoutPtr twice = Bytes({8}, {{{0}, {5}}, {{4}, {4}}});
  const LayoutPtr whole = Bytes({8}, {{{0}, {8}}});
  CHECK_THAT(CompileError({Trainer(whole, 0)}, {Engine(twice, 1)}),
             Contains("tensor w") && Contains("engine 0") && Contains("[4] twice"));
  // Trainers' boxes may overlap.
  CHECK(MustCompile({Trainer(twice, 0)}, {Engine(whole, 1)}).bytes == 8);
}

TEST_CASE("Limits are kept") {
  constexpr int64_t kSlices = 100;
  std::vector<Box> rows;
  std::vector<Box> columns;
  for (int64_t i = 0; i < kSlices; ++i) {
    rows.push_back({{i, 0}, {1, kSlices}});
    if (i % 2 == 0) columns.push_back({{0, i}, {kSlices, 1}});
  }
  const std::vector<RouteMember> trainers = {Trainer(Bytes({kSlices, kSlices}, rows), 0)};
  const std::vector<RouteMember> engines = {Engine(Bytes({kSlices, kSlices}, columns), 1)};
  RouteOptions options;
  options.max_routes = kSlices * kSlices / 2;
  CHECK(MustCompile(trainers, engines, options).bytes == kSlices * kSlices / 2);
  options.max_routes -= 1;
  const auto plan = CompileRoutes(trainers, engines, options);
  REQUIRE(plan.status().code() == absl::StatusCode::kResourceExhausted);
  CHECK_THAT(Message(plan.status()), Contains("tensor w"));
  const auto node = CompileRoutes({Trainer(trainers[0].layout, kMaxRouteNodes)}, engines, {});
  CHECK(node.status().code() == absl::StatusCode::kInvalidArgument);
}

TEST_CASE("Boxes of absurd size are refused and overflow nothing") {
  // Strides of 0 make any box fit.
  const Dims shape = {kMaxTensorBytes};
  std::vector<TensorSpec> tensors;
  std::vector<Piece> pieces;
  for (uint32_t t = 0; t < 20'000; ++t) {
    tensors.push_back({fmt::format("t{}", t), DType::kUint8, shape});
    pieces.push_back({t, WholeBox(shape), RegionId(1), 0, {0}});
  }
  const LayoutPtr layout = Make(tensors, pieces);
  const auto plan = CompileRoutes({Trainer(layout, 0), Trainer(layout, 0, 1)},
                                  {Engine(layout, 1), Engine(layout, 0, 1)}, {});
  REQUIRE(plan.status().code() == absl::StatusCode::kResourceExhausted);
}

TEST_CASE("Finely sharded tensors are planned without comparing all pairs") {
  constexpr int64_t kShards = 50'000;
  std::vector<Box> even;
  std::vector<Box> odd;
  for (int64_t i = 0; i < kShards; ++i) even.push_back({{i * 2, 0}, {2, 2}});
  for (int64_t i = 0; i < kShards; ++i) odd.push_back({{i * 2, 0}, {i % 2 == 0 ? 1 : 2, 2}});
  const Dims shape = {kShards * 2, 2};
  const RoutePlan plan =
      MustCompile({Trainer(Bytes(shape, even), 0), Trainer(Bytes(shape, odd), 1, 1)},
                  {Engine(Bytes(shape, {WholeBox(shape)}), 2)});
  CHECK(plan.bytes == kShards * 4);
  CHECK(std::abs(plan.links.node_sends[0] - plan.links.node_sends[1]) <= 4);
}

TEST_CASE("An estimate is the slowest link") {
  const LayoutPtr whole = Bytes({1000}, {{{0}, {1000}}});
  const RoutePlan plan = MustCompile(
      {Trainer(whole, 0)}, {Engine(whole, 1), Engine(whole, 2, 1, 1), Engine(whole, 2, 2, 2)});
  CHECK(plan.links.node_sends[0] == 2000);
  CHECK(plan.links.node_stores[2] == 2000);
  RouteRates rates;
  CHECK(Estimate(plan, rates).seconds == 0);
  rates.node_out = 1000;
  CHECK(Estimate(plan, rates).seconds == Approx(2));
  CHECK(Estimate(plan, rates).limit == "node 0 sends");
  rates.node_in = 200;
  CHECK(Estimate(plan, rates).seconds == Approx(5));
  CHECK(Estimate(plan, rates).limit == "node 1 receives");
  rates.local_copy = 250;
  CHECK(Estimate(plan, rates).limit == "node 2 stores");
  rates.rank_out = 10;
  CHECK(Estimate(plan, rates).limit == "trainer 0 supplies");
  CHECK(Estimate(plan, rates).seconds == Approx(200));
}

TEST_CASE("An explanation says bytes a link and bound and worst link") {
  const LayoutPtr whole = Bytes({4096}, {{{0}, {4096}}});
  const RoutePlan plan =
      MustCompile({Trainer(whole, 0)}, {Engine(whole, 1), Engine(whole, 2, 1, 1)});
  const RouteExplanation explanation = Explain(plan);
  CHECK(explanation.bound.bytes() == 8192);
  CHECK(explanation.worst.bytes == 8192);
  CHECK(explanation.ratio == Approx(1));
  const std::string text = ToText(explanation);
  CHECK_THAT(text, Contains("lower bound 8.00 KiB"));
  CHECK_THAT(text, Contains("worst link: node 0 sends 8.00 KiB, 1.000 of the lower bound"));
  CHECK_THAT(text, Contains("0 to 2"));
  CHECK_THAT(ToText(explanation, 1), Contains("and 1 more, the least 4.00 KiB"));
}

TEST_CASE("Nobody to supply or to want is a plan without routes") {
  const LayoutPtr whole = Bytes({4}, {{{0}, {4}}});
  CHECK(MustCompile({}, {}).routes.empty());
  CHECK(MustCompile({Trainer(whole, 0), Trainer(nullptr, 0, 1)}, {}).routes.empty());
  CHECK(MustCompile({Trainer(whole, 0)}, {Engine(nullptr, 1)}).routes.empty());
  CHECK(Explain(MustCompile({}, {})).ratio == 1);
}

}  // namespace
}  // namespace refitd
