#include "client/bucket.h"

#include <catch2/catch.hpp>
#include <functional>
#include <string>
#include <vector>

#include "client/c_structures.h"
#include "client/refit_test_util.h"

namespace refitd::client {
namespace {

// Regions and slots are interfaces of the client; these implementations are plain memory.
class LocalRegion final : public Region {
 public:
  char* data() const override { return nullptr; }
  int64_t bytes() const override { return 4'096; }
  RegionId id() const override { return RegionId(7); }
};
class LocalSlot final : public LeasedSlot {
 public:
  char* data() const override { return nullptr; }
  int64_t bytes() const override { return 4'096; }
};

constexpr int64_t kInlineLimit = 64;

std::vector<TensorSpec> TwoTensors() {
  return {{"a", DType::kFloat32, {2, 3}}, {"b", DType::kBFloat16, {8}}};
}

std::shared_ptr<Region> AnyRegion() { return std::make_shared<LocalRegion>(); }

TEST_CASE("a packed bucket names its region once and its tensors in order") {
  v1::Bucket wire;
  REQUIRE(EncodeBucket(Bucket::Packed(TwoTensors(), AnyRegion(), 512, {0, 24}), kInlineLimit, &wire)
              .ok());
  CHECK(wire.packed());
  REQUIRE(wire.names_size() == 2);
  CHECK(wire.names(1) == "b");
  CHECK(wire.dtypes(1) == v1::DTYPE_BFLOAT16);
  CHECK(wire.shapes(0).dims(1) == 3);
  CHECK(wire.byte_offsets(1) == 24);
  CHECK(wire.sizes_size() == 0);
  REQUIRE(wire.regions().refs_size() == 1);
  CHECK(wire.regions().refs(0).region_id() == 7);
  CHECK(wire.regions().refs(0).byte_offset() == 512);
}

TEST_CASE("an unpacked bucket has one reference a tensor and leaves packed out") {
  v1::Bucket wire;
  REQUIRE(EncodeBucket(Bucket::Unpacked(TwoTensors(), AnyRegion(), {0, 512}), kInlineLimit, &wire)
              .ok());
  CHECK_FALSE(wire.has_packed());
  REQUIRE(wire.regions().refs_size() == 2);
  CHECK(wire.regions().refs(1).byte_offset() == 512);
}

TEST_CASE("inline bytes go out as they are") {
  const std::string a(24, 'a');
  const std::string b(16, 'b');
  v1::Bucket wire;
  REQUIRE(EncodeBucket(Bucket::Inline(TwoTensors(), {a, b}), kInlineLimit, &wire).ok());
  REQUIRE(wire.inline_bytes().chunks_size() == 2);
  CHECK(wire.inline_bytes().chunks(0) == a);
  CHECK(wire.inline_bytes().chunks(1) == b);
}

TEST_CASE("ranges go out as starts and sizes") {
  Bucket bucket = Bucket::Unpacked(TwoTensors(), AnyRegion(), {0, 512});
  bucket.ranges = {{0, 2, 4}, {1, 0, 8}};
  v1::Bucket wire;
  REQUIRE(EncodeBucket(bucket, kInlineLimit, &wire).ok());
  CHECK(wire.starts(0) == 2);
  CHECK(wire.sizes(0) == 4);
  CHECK(wire.sizes(1) == 8);
}

TEST_CASE("inline bytes over the daemon's limit are refused, naming it") {
  const std::string chunk(kInlineLimit + 1, 'x');
  v1::Bucket wire;
  const absl::Status status = EncodeBucket(
      Bucket::Inline({{"a", DType::kUint8, {kInlineLimit + 1}}}, {chunk}), kInlineLimit, &wire);
  CHECK(absl::IsResourceExhausted(status));
  CHECK(std::string(status.message()).find("inline_bytes") != std::string::npos);
}

TEST_CASE("a bucket that can't be meant is refused with the field in the message") {
  struct Case {
    std::string field;
    std::function<void(Bucket*)> damage;
  };
  const std::vector<Case> cases = {
      {"sources", [](Bucket* b) { b->region.reset(); }},
      {"sources", [](Bucket* b) { b->slot = std::make_unique<LocalSlot>(); }},
      {"tensors", [](Bucket* b) { b->tensors.clear(); }},
      {"ranges",
       [](Bucket* b) {
         b->ranges = {{0, 0, 6}};
       }},
      {"ranges[1]",
       [](Bucket* b) {
         b->ranges = {{0, 0, 6}, {0, 0, 8}};
       }},
      {"ranges[0]",
       [](Bucket* b) {
         b->ranges = {{0, 0, 7}, {1, 0, 8}};
       }},
      {"ranges[0]",
       [](Bucket* b) {
         b->ranges = {{0, -1, 2}, {1, 0, 8}};
       }},
      {"ranges[0]",
       [](Bucket* b) {
         b->ranges = {{0, 1, INT64_MAX}, {1, 0, 8}};
       }},
      {"byte_offsets", [](Bucket* b) { b->byte_offsets = {0}; }},
      {"byte_offsets",
       [](Bucket* b) {
         b->packed = false;
         b->region_offsets = {0, 512};
       }},
      {"region_offsets",
       [](Bucket* b) {
         b->region_offsets = {0, 512};
       }},
      {"-1", [](Bucket* b) { b->tensors[0].shape = {-1}; }},
  };
  for (const Case& each : cases) {
    Bucket bucket = Bucket::Packed(TwoTensors(), AnyRegion(), 0, {0, 24});
    each.damage(&bucket);
    v1::Bucket wire;
    const absl::Status status = EncodeBucket(bucket, kInlineLimit, &wire);
    INFO(each.field << ": " << status.ToString());
    CHECK(absl::IsInvalidArgument(status));
    CHECK(std::string(status.message()).find(each.field) != std::string::npos);
  }
}

TEST_CASE("a bucket in a slot must be packed") {
  Bucket bucket = Bucket::InSlot(TwoTensors(), std::make_unique<LocalSlot>(), {0, 512});
  v1::Bucket wire;
  REQUIRE(EncodeBucket(bucket, kInlineLimit, &wire).ok());
  bucket.packed = false;
  bucket.byte_offsets.clear();
  CHECK(absl::IsInvalidArgument(EncodeBucket(bucket, kInlineLimit, &wire)));
}

TEST_CASE("a bucket of the C interface becomes the same bucket") {
  const int64_t dims[] = {2, 3};
  const refit_tensor tensors[] = {{"a", REFIT_FLOAT32, 2, dims, 0, REFIT_WHOLE},
                                  {"b", REFIT_BFLOAT16, 1, dims + 1, 1, 2}};
  const int64_t offsets[] = {0, 24};
  refit_region region{AnyRegion()};
  auto given = Initialised<refit_bucket>();
  given.tensors = tensors;
  given.tensor_count = 2;
  given.packed = 1;
  given.byte_offsets = offsets;
  given.region = &region;
  const absl::StatusOr<Bucket> bucket = BucketOf(&given);
  REQUIRE(bucket.ok());
  CHECK(bucket->tensors ==
        std::vector<TensorSpec>{{"a", DType::kFloat32, {2, 3}}, {"b", DType::kBFloat16, {3}}});
  REQUIRE(bucket->ranges.size() == 2);
  CHECK(bucket->ranges[0].count == 6);
  CHECK(bucket->ranges[1].start == 1);
  CHECK(bucket->ranges[1].count == 2);
  CHECK(bucket->packed);
  CHECK(bucket->byte_offsets == std::vector<int64_t>{0, 24});
  CHECK(bucket->region == region.region);
  CHECK(bucket->region_offsets == std::vector<int64_t>{0});

  given.packed = 0;  // a bucket that is not packed says where each tensor lies
  CHECK(absl::IsInvalidArgument(BucketOf(&given).status()));
}

TEST_CASE("a bucket of the C interface empties its slot's handle, whatever else is wrong") {
  refit_slot slot{std::make_unique<LocalSlot>()};
  auto given = Initialised<refit_bucket>();
  given.slot = &slot;
  given.tensor_count = 1;  // at NULL
  CHECK(absl::IsInvalidArgument(BucketOf(&given).status()));
  CHECK(slot.slot == nullptr);
  CHECK(absl::IsFailedPrecondition(BucketOf(&given).status()));
}

}  // namespace
}  // namespace refitd::client
