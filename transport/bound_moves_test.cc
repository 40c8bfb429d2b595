#include "transport/bound_moves.h"

#include <catch2/catch.hpp>
#include <memory>
#include <utility>
#include <vector>

#include "transport/base/status.h"
#include "transport/plan/derived.h"

namespace refitd {
namespace {

using Catch::Contains;

// A transfer of one block, which is computed from these shards of it.
Transfer Computed(const std::vector<Box>& shards) {
  static char memory[128 * 128 * 4];
  const Dims shape = {128, 128};
  const TensorSpec from = {"w", DType::kFloat32, shape};
  auto held = std::make_shared<HeldPiece>();
  held->derivation = std::make_shared<const Derivation>(Derivation{from, DerivedKind::kFp8Block});
  for (const Box& box : shards) {
    held->shards.push_back(
        {from.dtype, shape, box, RowMajorStrides(box.extent), memory, from.name});
  }
  BoundPiece values{DType::kFloat8E4M3FN, shape, WholeBox(shape), {128, 1}, memory, "w.q"};
  Transfer transfer;
  transfer.destinations = {{values}};
  values.held = std::move(held);
  transfer.source = {std::move(values)};
  transfer.plan.moves = {CopyMove{.box = WholeBox(shape)}};
  return transfer;
}

absl::Status Bind(const std::vector<Box>& shards) {
  const Transfer transfer = Computed(shards);
  return BindMoves(transfer).status();
}

TEST_CASE("a block is computed from shards that have each of its elements once (P1)") {
  CHECK(Bind({{{0, 0}, {128, 128}}}).ok());
  CHECK(Bind({{{0, 0}, {100, 128}}, {{100, 0}, {28, 128}}}).ok());
  CHECK_THAT(Message(Bind({{{0, 0}, {100, 128}}, {{101, 0}, {27, 128}}})),
             Contains("\"w.q\" is computed from 16384 elements, of which its shards have 16256"));
  // As many elements as the block has: rows 64 to 96 twice, and rows 96 to 128 not at all.
  CHECK_THAT(Message(Bind({{{0, 0}, {96, 128}}, {{64, 0}, {32, 128}}})),
             Contains("shards of \"w.q\" have common elements"));
  CHECK_FALSE(Bind({{{0}, {128}}}).ok());
}

TEST_CASE("shards without end are not compared (P10)") {
  // No two meet, but all have common rows, by which they are searched.
  constexpr int64_t kShards = 17'000;
  std::vector<Box> shards;
  for (int64_t i = 0; i < kShards; ++i) shards.push_back({{i, i}, {kShards, 1}});
  CHECK(Bind(shards).code() == absl::StatusCode::kResourceExhausted);
}

}  // namespace
}  // namespace refitd
