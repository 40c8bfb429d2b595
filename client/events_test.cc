#include "client/events.h"

#include <catch2/catch.hpp>
#include <functional>
#include <vector>

namespace refitd::client {
namespace {

constexpr int64_t kSlotBytes = 64;

v1::BucketReady Ready() {
  v1::BucketReady ready;
  ready.set_version(3);
  ready.set_part(5);
  ready.set_slot(1);
  ready.set_slot_byte_offset(kSlotBytes);
  ready.add_names("w");
  ready.add_dtypes(v1::DTYPE_FLOAT32);
  ready.add_shapes()->add_dims(100);
  ready.add_starts(90);
  ready.add_sizes(10);
  ready.add_byte_offsets(24);
  return ready;
}

TEST_CASE("a part's views point into its slot of the pool") {
  const std::vector<char> pool(2 * kSlotBytes);
  const auto part = DecodePart(Ready(), pool, kSlotBytes);
  REQUIRE(part.ok());
  CHECK(part->version == Version(3));
  CHECK(part->part == PartSeq(5));
  REQUIRE(part->tensors.size() == 1);
  CHECK(part->tensors[0].tensor == TensorSpec{"w", DType::kFloat32, {100}});
  CHECK(part->tensors[0].start == 90);
  CHECK(part->tensors[0].count == 10);
  CHECK(part->tensors[0].data == pool.data() + kSlotBytes + 24);
}

TEST_CASE("a message that disagrees with itself or the pool gives no view") {
  const std::vector<char> pool(2 * kSlotBytes);
  const std::vector<std::function<void(v1::BucketReady*)>> damages = {
      [](v1::BucketReady* r) { r->add_names("more"); },
      [](v1::BucketReady* r) { r->clear_byte_offsets(); },
      [](v1::BucketReady* r) { r->set_slot_byte_offset(kSlotBytes + 1); },
      [](v1::BucketReady* r) { r->set_slot_byte_offset(-1); },
      [](v1::BucketReady* r) { r->set_slot_byte_offset(INT64_MAX); },
      [](v1::BucketReady* r) { r->set_byte_offsets(0, 25); },
      [](v1::BucketReady* r) { r->set_byte_offsets(0, -4); },
      [](v1::BucketReady* r) { r->set_starts(0, 91); },
      [](v1::BucketReady* r) { r->set_starts(0, -1); },
      [](v1::BucketReady* r) { r->set_sizes(0, INT64_MAX); },
      [](v1::BucketReady* r) { r->set_dtypes(0, static_cast<v1::DType>(99)); },
      [](v1::BucketReady* r) { r->mutable_shapes(0)->set_dims(0, -5); },
      [](v1::BucketReady* r) { r->set_names(0, ""); },
  };
  for (size_t i = 0; i < damages.size(); ++i) {
    INFO("damage " << i);
    v1::BucketReady ready = Ready();
    damages[i](&ready);
    CHECK_FALSE(DecodePart(ready, pool, kSlotBytes).ok());
  }
}

}  // namespace
}  // namespace refitd::client
