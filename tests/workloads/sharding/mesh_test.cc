#include "tests/workloads/sharding/mesh.h"

#include <catch2/catch.hpp>
#include <random>
#include <vector>

namespace refitd::sharding {
namespace {

Mesh MustMake(std::vector<MeshDim> dims) {
  auto mesh = Mesh::Make(std::move(dims));
  INFO(mesh.status());
  REQUIRE(mesh.ok());
  return *std::move(mesh);
}

std::vector<int64_t> Sizes(int64_t n, int64_t shards, ShardRule rule) {
  std::vector<int64_t> sizes;
  int64_t at = 0;
  for (int64_t i = 0; i < shards; ++i) {
    const ShardRange range = ShardOf(n, shards, i, rule);
    REQUIRE(range.offset == at);
    at = range.end();
    sizes.push_back(range.extent);
  }
  REQUIRE(at == n);
  return sizes;
}

TEST_CASE("Ranks are row-major over the mesh, the last dimension innermost") {
  const Mesh mesh = MustMake({{"pp", 2}, {"dp", 3}, {"tp", 4}});
  CHECK(mesh.ranks() == 24);
  CHECK(*mesh.Coordinates(0) == Dims{0, 0, 0});
  CHECK(*mesh.Coordinates(1) == Dims{0, 0, 1});
  CHECK(*mesh.Coordinates(4) == Dims{0, 1, 0});
  CHECK(*mesh.Coordinates(23) == Dims{1, 2, 3});
  CHECK(*mesh.Coordinate("dp", 17) == 1);
  for (int64_t rank = 0; rank < mesh.ranks(); ++rank) {
    CHECK(*mesh.RankOf(*mesh.Coordinates(rank)) == rank);
  }
}

TEST_CASE("A mesh that can't be is refused with the value that is wrong") {
  CHECK_FALSE(Mesh::Make({}).ok());
  CHECK_FALSE(Mesh::Make(std::vector<MeshDim>(9, {"x", 1})).ok());
  CHECK_FALSE(Mesh::Make({{"", 1}}).ok());
  CHECK_FALSE(Mesh::Make({{"tp", 2}, {"tp", 2}}).ok());
  CHECK(Mesh::Make({{"tp", 0}}).status().message() == "mesh dimension tp has size 0");
  CHECK_FALSE(Mesh::Make({{"a", 1 << 20}, {"b", 2}}).ok());
  CHECK_FALSE(Mesh::Make({{"a", INT64_MAX}, {"b", INT64_MAX}}).ok());
  const Mesh mesh = MustMake({{"dp", 2}, {"tp", 2}});
  CHECK_FALSE(mesh.Coordinates(-1).ok());
  CHECK_FALSE(mesh.Coordinates(4).ok());
  CHECK_FALSE(mesh.Coordinate("pp", 0).ok());
  CHECK_FALSE(mesh.RankOf({0}).ok());
  CHECK_FALSE(mesh.RankOf({0, 2}).ok());
}

TEST_CASE("Chunks are as torch.chunk makes them, balanced shards differ by one at most") {
  using Expected = std::vector<int64_t>;
  CHECK(Sizes(10, 4, ShardRule::kChunk) == Expected{3, 3, 3, 1});
  CHECK(Sizes(10, 4, ShardRule::kBalanced) == Expected{3, 3, 2, 2});
  CHECK(Sizes(5, 8, ShardRule::kChunk) == Expected{1, 1, 1, 1, 1, 0, 0, 0});
  CHECK(Sizes(9, 8, ShardRule::kChunk) == Expected{2, 2, 2, 2, 1, 0, 0, 0});
  CHECK(Sizes(3, 4, ShardRule::kBalanced) == Expected{1, 1, 1, 0});
  CHECK(Sizes(0, 3, ShardRule::kChunk) == Expected{0, 0, 0});
  CHECK(Sizes(0, 3, ShardRule::kBalanced) == Expected{0, 0, 0});
  CHECK(Sizes(8, 4, ShardRule::kChunk) == Sizes(8, 4, ShardRule::kBalanced));
}

TEST_CASE("One tensor dimension sharded twice is divided by the outer mesh dimension first") {
  const Mesh mesh = MustMake({{"dp", 2}, {"tp", 3}});
  const Placement nested[] = {Placement::Shard(0), Placement::Shard(0)};
  // 11 over 2: 6, 5; over 3 each: 2, 2, 2 and 2, 2, 1.
  CHECK(*ShardBox({11, 4}, mesh, nested, 2) == Box{{4, 0}, {2, 4}});
  CHECK(*ShardBox({11, 4}, mesh, nested, 3) == Box{{6, 0}, {2, 4}});
  CHECK(*ShardBox({11, 4}, mesh, nested, 5) == Box{{10, 0}, {1, 4}});
  const Placement both[] = {Placement::Shard(1), Placement::Shard(0, ShardRule::kBalanced)};
  CHECK(*ShardBox({11, 4}, mesh, both, 5) == Box{{8, 2}, {3, 2}});
  const Placement replicated[] = {Placement::Replicate(), Placement::Replicate()};
  CHECK(*ShardBox({11, 4}, mesh, replicated, 5) == WholeBox({11, 4}));
}

TEST_CASE("The shards of all ranks cover each element as often as replication says") {
  std::mt19937_64 rng(7);
  const auto below = [&](int64_t n) { return static_cast<int64_t>(rng() % n); };
  for (int round = 0; round < 500; ++round) {
    const Mesh mesh = MustMake({{"a", 1 + below(4)}, {"b", 1 + below(3)}, {"c", 1 + below(5)}});
    const Dims shape = {below(12), 1 + below(12)};
    std::vector<Placement> placements;
    int64_t replicas = 1;
    for (const MeshDim& dim : mesh.dims()) {
      const int64_t kind = below(3);
      const ShardRule rule = below(2) == 0 ? ShardRule::kChunk : ShardRule::kBalanced;
      placements.push_back(kind == 2 ? Placement::Replicate()
                                     : Placement::Shard(static_cast<int>(kind), rule));
      if (kind == 2) replicas *= dim.size;
    }
    std::vector<int64_t> times(shape[0] * shape[1], 0);
    for (int64_t rank = 0; rank < mesh.ranks(); ++rank) {
      const auto box = ShardBox(shape, mesh, placements, rank);
      REQUIRE(box.ok());
      REQUIRE(ValidateBox(*box, shape).ok());
      for (int64_t i = 0; i < box->extent[0]; ++i) {
        for (int64_t j = 0; j < box->extent[1]; ++j) {
          ++times[(box->offset[0] + i) * shape[1] + box->offset[1] + j];
        }
      }
    }
    for (const int64_t count : times) REQUIRE(count == replicas);
  }
}

TEST_CASE("A placement that does not fit mesh, tensor or rank is refused") {
  const Mesh mesh = MustMake({{"dp", 2}, {"tp", 2}});
  const Placement one[] = {Placement::Replicate()};
  CHECK_FALSE(ShardBox({4}, mesh, one, 0).ok());
  const Placement outside[] = {Placement::Replicate(), Placement::Shard(1)};
  CHECK(ShardBox({4}, mesh, outside, 0).status().message() ==
        "mesh dimension tp shards dimension 1 of a tensor of rank 1");
  const Placement negative[] = {Placement::Replicate(), Placement::Shard(-1)};
  CHECK_FALSE(ShardBox({4}, mesh, negative, 0).ok());
  const Placement good[] = {Placement::Replicate(), Placement::Shard(0)};
  CHECK_FALSE(ShardBox({4}, mesh, good, 4).ok());
  CHECK_FALSE(ShardBox({-4}, mesh, good, 0).ok());
  CHECK(ShardBox({4}, mesh, good, 3).ok());
}

}  // namespace
}  // namespace refitd::sharding
