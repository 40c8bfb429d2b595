#include "daemon/refitctl/placement.h"

#include <catch2/catch.hpp>

namespace refitd {
namespace {

TEST_CASE("tensors lie one behind the other, aligned, in regions of at most the limit") {
  const std::vector<TensorSpec> tensors = {{"a", DType::kInt8, {1000}},
                                           {"b", DType::kFloat32, {2, 100}},
                                           {"c", DType::kInt8, {600}},
                                           {"none", DType::kInt8, {0, 3}},
                                           {"scalar", DType::kFloat64, {}}};
  const Placement placement = PlaceWhole(tensors, 2048);
  // The first region has a and b of 1024 bytes each; the second has c of 1024, none and scalar of
  // 512.
  CHECK(placement.region_bytes == std::vector<int64_t>{2048, 2048});
  const std::vector<RegionId> ids = {RegionId(7), RegionId(9)};
  const Layout layout = LayoutOf(tensors, placement, ids);
  CHECK(layout.pieces[1].region == RegionId(7));
  CHECK(layout.pieces[1].byte_offset == 1024);
  CHECK(layout.pieces[4].region == RegionId(9));
  CHECK(layout.pieces[4].byte_offset == 1536);
  CHECK(placement.places[3].bytes == 0);
  CHECK(placement.places[4].bytes == 8);
  CHECK(ValidateLayout(
            layout, [](RegionId) -> std::optional<int64_t> { return 2048; }, true)
            .ok());
}

TEST_CASE("a tensor larger than the limit has a region of its own") {
  const std::vector<TensorSpec> tensors = {
      {"a", DType::kInt8, {10}}, {"big", DType::kInt8, {5000}}, {"b", DType::kInt8, {10}}};
  const Placement placement = PlaceWhole(tensors, 1024);
  CHECK(placement.region_bytes == std::vector<int64_t>{512, 5120, 512});
  CHECK(placement.places[1].byte_offset == 0);
  CHECK(placement.places[2].region == 2);
}

}  // namespace
}  // namespace refitd
