#include "transport/plan/block_scales.h"

#include <catch2/catch.hpp>
#include <string>

namespace refitd {
namespace {

Layout BlockLayout(const Dims& shape, const Box& box, const Box& scale_box) {
  Layout layout;
  layout.tensors = {
      {"w", DType::kFloat8E4M3FN, shape},
      {"w_scale_inv", DType::kFloat32, {(shape[0] + 127) / 128, (shape[1] + 127) / 128}}};
  layout.pieces = {{0, box, RegionId(1), 0, RowMajorStrides(box.extent)},
                   {1, scale_box, RegionId(1), 1 << 20, RowMajorStrides(scale_box.extent)}};
  return layout;
}

TEST_CASE("Shards on block boundaries pass, also where the last block is short") {
  CHECK(CheckFloat8Scales(BlockLayout({300, 200}, {{128, 0}, {128, 200}}, {{1, 0}, {1, 2}})).ok());
  CHECK(CheckFloat8Scales(BlockLayout({300, 200}, {{256, 0}, {44, 200}}, {{2, 0}, {1, 2}})).ok());
  CHECK(CheckFloat8Scales(BlockLayout({300, 200}, {{0, 128}, {300, 72}}, {{0, 1}, {3, 1}})).ok());
  CHECK(CheckFloat8Scales({}).ok());
}

TEST_CASE("A shard that cuts a block whose scales are sharded is named") {
  const auto rows =
      CheckFloat8Scales(BlockLayout({768, 256}, {{192, 0}, {192, 256}}, {{1, 0}, {2, 2}}));
  CHECK(rows.code() == absl::StatusCode::kFailedPrecondition);
  CHECK(rows.message() ==
        "tensor w: the shard [192, 384) of dimension 0 cuts a block of 128 whose scales in "
        "w_scale_inv are sharded along it");
  const auto columns =
      CheckFloat8Scales(BlockLayout({256, 1408}, {{0, 0}, {256, 704}}, {{0, 0}, {2, 6}}));
  CHECK(columns.message().find("[0, 704) of dimension 1") != std::string::npos);
}

TEST_CASE("A cut block whose scales are all there passes") {
  CHECK(CheckFloat8Scales(BlockLayout({768, 256}, {{192, 0}, {192, 256}}, {{0, 0}, {6, 2}})).ok());
  // The weight is one block, which a rank may halve if it holds the block's scale.
  CHECK(CheckFloat8Scales(BlockLayout({128, 128}, {{64, 0}, {64, 128}}, {{0, 0}, {1, 1}})).ok());
}

TEST_CASE("The size of blocks is found from the shapes") {
  const auto block = [](const Dims& weight, const Dims& scale) {
    return ScaleBlockOf({"w", DType::kFloat8E4M3FN, weight}, {"s", DType::kFloat32, scale});
  };
  CHECK(block({300, 200}, {3, 2}) == 128);
  CHECK(block({64, 64}, {1, 1}) == 128);
  CHECK(block({4, 256, 300}, {1, 2, 3}) == 128);
  CHECK(block({256, 128}, {4, 2}) == 64);
  CHECK(block({96, 32}, {3, 1}) == 32);
  // No size of blocks fits if every row has its own scale, if blocks are not square, if blocks are
  // not whole, or if one scale serves the whole tensor.
  CHECK(!block({256, 128}, {256, 1}).has_value());
  CHECK(!block({256, 128}, {4, 4}).has_value());
  CHECK(!block({256, 100}, {4, 3}).has_value());
  CHECK(!block({256, 256}, {}).has_value());
  CHECK(!block({256, 256}, {1}).has_value());
  CHECK(!block({}, {}).has_value());
  CHECK(!block({0, 256}, {1, 4}).has_value());
  CHECK(!block({256, 256}, {0, 4}).has_value());
}

TEST_CASE("Float8 weights with scales of square blocks are checked, and no others") {
  Layout layout = BlockLayout({768, 256}, {{192, 0}, {192, 256}}, {{1, 0}, {2, 2}});
  CHECK(CheckFloat8Scales(layout).code() == absl::StatusCode::kFailedPrecondition);
  layout.tensors.Edit()[0].dtype = DType::kFloat8E5M2;
  CHECK(CheckFloat8Scales(layout).code() == absl::StatusCode::kFailedPrecondition);
  layout.tensors.Edit()[0].dtype = DType::kBFloat16;
  CHECK(CheckFloat8Scales(layout).ok());
  layout = BlockLayout({768, 256}, {{192, 0}, {192, 256}}, {{1, 0}, {2, 2}});
  layout.tensors.Edit()[1].shape = {12, 4};  // blocks of 64, so 192 is no cut
  CHECK(CheckFloat8Scales(layout).ok());
  layout.tensors.Edit()[1].shape = {12, 2};
  CHECK(CheckFloat8Scales(layout).ok());
  // An empty shard cuts nothing.
  layout = BlockLayout({768, 256}, {{100, 0}, {0, 256}}, {{0, 0}, {0, 2}});
  CHECK(CheckFloat8Scales(layout).ok());
  CHECK(CheckFloat8Scales({}).ok());
}

}  // namespace
}  // namespace refitd
