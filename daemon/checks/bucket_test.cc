#include <catch2/catch.hpp>
#include <cstdint>
#include <functional>
#include <limits>
#include <random>
#include <string>
#include <utility>
#include <vector>

#include "daemon/checks/bucket_test_util.h"
#include "transport/base/failure.h"
#include "transport/base/status.h"

namespace refitd {
namespace {

using absl::StatusCode;
using Catch::Matchers::Contains;
using Catch::Matchers::StartsWith;

constexpr int64_t kMax = std::numeric_limits<int64_t>::max();
constexpr int64_t kMin = std::numeric_limits<int64_t>::min();

constexpr BucketLimits kLimits{.inline_bytes = 1024, .slot_bytes = 4096};

// This member has region 7 of 1000 bytes and region 8 of 16.
std::optional<int64_t> Regions(RegionId id) {
  if (id == RegionId(7)) return 1000;
  if (id == RegionId(8)) return 16;
  return std::nullopt;
}

void AddTensor(v1::Bucket* bucket, const std::string& name, v1::DType dtype,
               const std::vector<int64_t>& dims) {
  bucket->add_names(name);
  bucket->add_dtypes(dtype);
  bucket->add_shapes()->mutable_dims()->Add(dims.begin(), dims.end());
}

// Two tensors of 24 and 12 bytes, each inline.
v1::Bucket Unpacked() {
  v1::Bucket bucket;
  AddTensor(&bucket, "w", v1::DTYPE_FLOAT32, {2, 3});
  AddTensor(&bucket, "b", v1::DTYPE_BFLOAT16, {6});
  bucket.mutable_inline_bytes()->add_chunks(std::string(24, 'w'));
  bucket.mutable_inline_bytes()->add_chunks(std::string(12, 'b'));
  return bucket;
}

v1::Bucket Packed() {
  v1::Bucket bucket = Unpacked();
  bucket.set_packed(true);
  bucket.mutable_inline_bytes()->clear_chunks();
  bucket.mutable_inline_bytes()->add_chunks(std::string(36, 'p'));
  return bucket;
}

v1::Bucket InRegions(std::vector<std::pair<uint64_t, int64_t>> refs, bool packed = false) {
  v1::Bucket bucket = Unpacked();
  bucket.set_packed(packed);
  bucket.mutable_regions();
  for (const auto& [region, offset] : refs) {
    v1::RegionRef* ref = bucket.mutable_regions()->add_refs();
    ref->set_region_id(region);
    ref->set_byte_offset(offset);
  }
  return bucket;
}

v1::Bucket InSlot() {
  v1::Bucket bucket = Unpacked();
  bucket.set_packed(true);
  bucket.mutable_slot()->set_slot(3);
  bucket.mutable_slot()->set_grant(99);
  return bucket;
}

struct BadCase {
  std::string what;
  StatusCode code;
  std::vector<std::string> said;  // the field and value that the error must name
  v1::Bucket bucket;
};

BadCase Bad(std::string what, StatusCode code, std::vector<std::string> said, v1::Bucket bucket,
            const std::function<void(v1::Bucket&)>& damage = {}) {
  if (damage) damage(bucket);
  return {std::move(what), code, std::move(said), std::move(bucket)};
}

void CheckRefused(const std::vector<BadCase>& cases) {
  for (const BadCase& c : cases) {
    INFO(c.what);
    const auto checked = CheckBucket(c.bucket, kLimits, Regions);
    INFO(checked.status().ToString());
    CHECK(checked.status().code() == c.code);
    if (c.code == StatusCode::kInvalidArgument) {
      CHECK_THAT(FailureOf(checked.status()).field, StartsWith("bucket"));
    }
    for (const std::string& word : c.said) {
      CHECK_THAT(Message(checked.status()), Contains(word));
    }
  }
}

void SetDims(v1::Bucket& bucket, const std::vector<int64_t>& dims) {
  bucket.mutable_shapes(0)->clear_dims();
  bucket.mutable_shapes(0)->mutable_dims()->Add(dims.begin(), dims.end());
}

TEST_CASE("An unpacked inline bucket without sizes carries whole tensors, one chunk each") {
  v1::Bucket bucket = Unpacked();
  bucket.set_seq(5);
  const auto checked = CheckBucket(bucket, kLimits, Regions);
  REQUIRE(checked.ok());
  CHECK(checked->seq == 5);
  CHECK(checked->tensors ==
        std::vector<TensorSpec>{{"w", DType::kFloat32, {2, 3}}, {"b", DType::kBFloat16, {6}}});
  CHECK(checked->ranges == std::vector<TensorRange>{{0, 0, 6}, {1, 0, 6}});
  CHECK(checked->bytes == 36);
  CHECK(checked->source == CheckedBucket::Source::kInline);
  REQUIRE(checked->places.size() == 2);
  CHECK(checked->places[0].inline_data == bucket.inline_bytes().chunks(0).data());
  CHECK(checked->places[1].inline_data == bucket.inline_bytes().chunks(1).data());
  CHECK_FALSE(checked->slot.has_value());
}

TEST_CASE("Implied packed offsets are back to back without padding") {
  v1::Bucket bucket;
  AddTensor(&bucket, "odd", v1::DTYPE_UINT8, {3});
  AddTensor(&bucket, "wide", v1::DTYPE_FLOAT64, {});
  bucket.set_packed(true);
  bucket.mutable_inline_bytes()->add_chunks(std::string(11, 'x'));
  const auto checked = CheckBucket(bucket, kLimits, Regions);
  REQUIRE(checked.ok());
  const char* begin = bucket.inline_bytes().chunks(0).data();
  CHECK(checked->places[0].inline_data == begin);
  CHECK(checked->places[1].inline_data == begin + 3);
  CHECK(checked->ranges[1] == TensorRange{1, 0, 1});
}

TEST_CASE("Explicit packed offsets may leave gaps and need no order") {
  v1::Bucket bucket = InRegions({{7, 64}}, /*packed=*/true);
  bucket.add_byte_offsets(512);
  bucket.add_byte_offsets(0);
  const auto checked = CheckBucket(bucket, kLimits, Regions);
  REQUIRE(checked.ok());
  CHECK(checked->source == CheckedBucket::Source::kRegions);
  CHECK(checked->places[0].region == RegionId(7));
  CHECK(checked->places[0].byte_offset == 64 + 512);
  CHECK(checked->places[1].byte_offset == 64);
}

TEST_CASE("Sizes with starts carry parts of tensors") {
  v1::Bucket bucket = InRegions({{7, 4}, {7, 998}});
  bucket.mutable_sizes()->Add(2);
  bucket.mutable_sizes()->Add(1);
  bucket.mutable_starts()->Add(4);
  bucket.mutable_starts()->Add(0);
  const auto checked = CheckBucket(bucket, kLimits, Regions);
  REQUIRE(checked.ok());
  CHECK(checked->ranges == std::vector<TensorRange>{{0, 4, 2}, {1, 0, 1}});
  CHECK(checked->bytes == 10);
}

TEST_CASE("Sizes that state the whole tensor need no starts") {
  v1::Bucket bucket = Packed();
  bucket.mutable_sizes()->Add(6);
  bucket.mutable_sizes()->Add(6);
  CHECK(CheckBucket(bucket, kLimits, Regions).ok());
}

TEST_CASE("A bucket in a leased slot carries offsets from the slot's start and the grant") {
  const auto checked = CheckBucket(InSlot(), kLimits, Regions);
  REQUIRE(checked.ok());
  CHECK(checked->source == CheckedBucket::Source::kSlot);
  CHECK(checked->slot == SlotGrant{SlotIndex(3), GrantId(99)});
  CHECK(checked->places[1].byte_offset == 24);
}

TEST_CASE("A tensor of no elements is carried as no bytes, and may lie at a region's end") {
  v1::Bucket bucket;
  AddTensor(&bucket, "none", v1::DTYPE_INT64, {0, 5});
  bucket.mutable_regions()->add_refs()->set_region_id(7);
  bucket.mutable_regions()->mutable_refs(0)->set_byte_offset(1000);
  const auto checked = CheckBucket(bucket, kLimits, Regions);
  REQUIRE(checked.ok());
  CHECK(checked->bytes == 0);
  CHECK(checked->ranges[0].count == 0);
}

TEST_CASE("Lists of unequal length are refused with both lengths") {
  const auto kCode = StatusCode::kInvalidArgument;
  CheckRefused({
      Bad("no names", kCode, {"names", "empty"}, v1::Bucket()),
      Bad("dtypes short", kCode, {"bucket.dtypes", "1", "2"}, Unpacked(),
          [](auto& b) { b.mutable_dtypes()->RemoveLast(); }),
      Bad("shapes long", kCode, {"bucket.shapes", "3", "2"}, Unpacked(),
          [](auto& b) { b.add_shapes(); }),
      Bad("sizes short", kCode, {"bucket.sizes", "1", "2"}, Unpacked(),
          [](auto& b) { b.add_sizes(6); }),
      Bad("starts short", kCode, {"bucket.starts", "1", "2"}, Unpacked(),
          [](auto& b) {
            b.add_sizes(6);
            b.add_sizes(6);
            b.add_starts(0);
          }),
      Bad("starts without sizes", kCode, {"bucket.starts", "2", "bucket.sizes"}, Unpacked(),
          [](auto& b) {
            b.add_starts(0);
            b.add_starts(0);
          }),
      Bad("byte_offsets short", kCode, {"bucket.byte_offsets", "1", "2"}, Packed(),
          [](auto& b) { b.add_byte_offsets(0); }),
      Bad("chunks short", kCode, {"inline_bytes.chunks", "1", "2"}, Unpacked(),
          [](auto& b) { b.mutable_inline_bytes()->mutable_chunks()->RemoveLast(); }),
      Bad("chunks of a packed bucket", kCode, {"inline_bytes.chunks", "2", "1"}, Unpacked(),
          [](auto& b) { b.set_packed(true); }),
      Bad("refs short", kCode, {"regions.refs", "1", "2"}, InRegions({{7, 0}})),
      Bad("refs of a packed bucket", kCode, {"regions.refs", "2", "1"},
          InRegions({{7, 0}, {7, 0}}, true)),
  });
}

TEST_CASE("Negative, overflowing and absurd shapes are refused with tensor and value") {
  const auto kCode = StatusCode::kInvalidArgument;
  std::vector<BadCase> cases;
  const std::vector<std::pair<std::vector<int64_t>, std::string>> shapes = {
      {{-1}, "-1"},
      {{2, kMin}, "-9223372036854775808"},
      {{kMax}, "9223372036854775807"},
      {{kMax, kMax}, "9223372036854775807"},
      {{int64_t{1} << 32, int64_t{1} << 32}, "4294967296"},
      {{0, kMax, kMax}, "9223372036854775807"},
      {{-1, -6}, "-1"},
      {{int64_t{1} << 47}, "140737488355328"},  // four bytes each
      {{1, 1, 1, 1, 1, 1, 1, 1, 6}, "9 dims"},
  };
  for (const auto& [dims, value] : shapes) {
    cases.push_back(Bad("shape with " + value, kCode, {"bucket.shapes[0]", "\"w\"", value},
                        Unpacked(), [&dims = dims](auto& b) { SetDims(b, dims); }));
  }
  cases.push_back(Bad("a sum beyond all memory", kCode, {"bucket.shapes[1]", "larger than"},
                      Unpacked(), [](auto& b) {
                        SetDims(b, {int64_t{1} << 46});
                        b.mutable_shapes(1)->set_dims(0, int64_t{1} << 46);
                      }));
  CheckRefused(cases);
}

TEST_CASE("Sizes and starts that disagree with shapes are refused with the value") {
  const auto kCode = StatusCode::kInvalidArgument;
  const auto sized = [](int64_t size, std::optional<int64_t> start) {
    v1::Bucket bucket = Unpacked();
    bucket.add_sizes(6);
    bucket.add_sizes(size);
    if (start.has_value()) {
      bucket.add_starts(0);
      bucket.add_starts(*start);
    }
    return bucket;
  };
  CheckRefused({
      Bad("less", kCode, {"bucket.sizes[1]", "\"b\"", "5", "6 elements"}, sized(5, {})),
      Bad("more", kCode, {"bucket.sizes[1]", "7", "6 elements"}, sized(7, {})),
      Bad("negative", kCode, {"bucket.sizes[1]", "-6"}, sized(-6, {})),
      Bad("overflow", kCode, {"bucket.sizes[1]", "9223372036854775807"}, sized(kMax, 1)),
      Bad("past the end", kCode, {"bucket.sizes[1]", "5", "start 2"}, sized(5, 2)),
      Bad("start past the end", kCode, {"bucket.sizes[1]", "start 7"}, sized(0, 7)),
      Bad("start negative", kCode, {"bucket.starts[1]", "-1"}, sized(6, -1)),
      Bad("start overflows", kCode, {"9223372036854775807"}, sized(6, kMax)),
  });
}

TEST_CASE("Unknown dtypes and bad or repeated names are refused") {
  const auto kCode = StatusCode::kInvalidArgument;
  const auto named = [](std::string name) {
    return [name](v1::Bucket& b) { b.set_names(1, name); };
  };
  CheckRefused({
      Bad("dtype unspecified", kCode, {"bucket.dtypes[0]", "0", "\"w\""}, Unpacked(),
          [](auto& b) { b.set_dtypes(0, v1::DTYPE_UNSPECIFIED); }),
      Bad("dtype unknown", kCode, {"bucket.dtypes[0]", "77"}, Unpacked(),
          [](auto& b) { b.set_dtypes(0, static_cast<v1::DType>(77)); }),
      Bad("dtype negative", kCode, {"bucket.dtypes[0]", "-3"}, Unpacked(),
          [](auto& b) { b.set_dtypes(0, static_cast<v1::DType>(-3)); }),
      Bad("repeated", kCode, {"bucket.names[1]", "\"w\""}, Unpacked(), named("w")),
      Bad("empty", kCode, {"bucket.names[1]"}, Unpacked(), named("")),
      Bad("too long", kCode, {"bucket.names[1]", "513"}, Unpacked(), named(std::string(513, 'n'))),
      Bad("control character", kCode, {"bucket.names[1]"}, Unpacked(), named("a\nb")),
      Bad("seq negative", kCode, {"bucket.seq", "-1"}, Unpacked(), [](auto& b) { b.set_seq(-1); }),
  });
}

TEST_CASE("A bucket of more tensors than the limit is refused before any is looked at") {
  v1::Bucket bucket;
  for (int64_t i = 0; i <= kMaxTensorsPerBucket; ++i) {
    bucket.add_names(std::string(1, 'n'));  // a string literal makes gcc 12 warn falsely
    bucket.add_dtypes(v1::DTYPE_UINT8);
    bucket.add_shapes();
  }
  CheckRefused({Bad("too many", StatusCode::kInvalidArgument, {"bucket.names", "65537", "65536"},
                    std::move(bucket))});
}

TEST_CASE("Regions that are unknown, too small, overrun or unaligned are refused") {
  const auto kCode = StatusCode::kInvalidArgument;
  CheckRefused({
      Bad("unknown region", StatusCode::kNotFound, {"refs[1].region_id", "9"},
          InRegions({{7, 0}, {9, 0}})),
      Bad("too small", kCode, {"refs[0]", "region 8", "24 bytes", "16"},
          InRegions({{8, 0}, {7, 0}})),
      Bad("too small for the pack", kCode, {"refs[0]", "36 bytes", "16"},
          InRegions({{8, 0}}, true)),
      Bad("runs over the end", kCode, {"refs[1]", "12 bytes", "990"},
          InRegions({{7, 0}, {7, 990}})),
      Bad("offset outside", kCode, {"refs[1].byte_offset", "1001"}, InRegions({{7, 0}, {7, 1001}})),
      Bad("offset negative", kCode, {"refs[1].byte_offset", "-2"}, InRegions({{7, 0}, {7, -2}})),
      Bad("offset overflows", kCode, {"refs[0].byte_offset", "9223372036854775807"},
          InRegions({{7, kMax}}, true)),
      Bad("unaligned", kCode, {"refs[0].byte_offset", "2", "unaligned", "4"},
          InRegions({{7, 2}, {7, 0}})),
      Bad("packed unaligned", kCode, {"refs[0].byte_offset", "2", "unaligned", "4"},
          InRegions({{7, 2}}, true)),
  });
}

TEST_CASE("Packed offsets that overlap, overrun, are unaligned or belong to no pack are refused") {
  const auto kCode = StatusCode::kInvalidArgument;
  const auto at = [](int64_t first, int64_t second) {
    return [=](v1::Bucket& b) {
      b.add_byte_offsets(first);
      b.add_byte_offsets(second);
    };
  };
  CheckRefused({
      Bad("overlapping", kCode, {"byte_offsets[1]", "\"b\"", "22", "overlaps \"w\""}, Packed(),
          at(0, 22)),
      Bad("overlapping backwards", kCode, {"byte_offsets[0]", "\"w\"", "8", "overlaps \"b\""},
          Packed(), at(8, 0)),
      Bad("equal", kCode, {"overlaps"}, Packed(), at(0, 0)),
      Bad("negative", kCode, {"byte_offsets[0]", "-4"}, Packed(), at(-4, 24)),
      Bad("overflow", kCode, {"byte_offsets[1]", "9223372036854775806"}, Packed(), at(0, kMax - 1)),
      Bad("unaligned", kCode, {"byte_offsets[0]", "2", "4"}, Packed(), at(2, 30)),
      Bad("not packed", kCode, {"byte_offsets", "2", "packed"}, Unpacked(), at(0, 24)),
      Bad("past the slot", kCode, {"bucket.slot", "4108", "4096"}, InSlot(), at(0, 4096)),
      Bad("past the region", kCode, {"refs[0]", "1004", "1000"}, InRegions({{7, 0}}, true),
          at(0, 992)),
  });
}

TEST_CASE("Inline bytes over the limit or of another length than carried are refused") {
  const auto kCode = StatusCode::kInvalidArgument;
  CheckRefused({
      Bad("over the limit", StatusCode::kResourceExhausted, {"inline_bytes", "1049", "1024"},
          Unpacked(),
          [](auto& b) { b.mutable_inline_bytes()->set_chunks(1, std::string(1025, 'x')); }),
      Bad("chunk too short", kCode, {"inline_bytes.chunks[1]", "\"b\"", "11", "12"}, Unpacked(),
          [](auto& b) { b.mutable_inline_bytes()->set_chunks(1, std::string(11, 'x')); }),
      Bad("chunk too long", kCode, {"inline_bytes.chunks[0]", "25", "24"}, Unpacked(),
          [](auto& b) { b.mutable_inline_bytes()->set_chunks(0, std::string(25, 'x')); }),
      Bad("pack too short", kCode, {"inline_bytes.chunks[0]", "35", "36"}, Packed(),
          [](auto& b) { b.mutable_inline_bytes()->set_chunks(0, std::string(35, 'x')); }),
  });
}

TEST_CASE("A packed inline chunk may have padding after its last tensor, as a region may") {
  v1::Bucket padded = Packed();
  padded.mutable_inline_bytes()->set_chunks(0, std::string(512, 'x'));
  const auto checked = CheckBucket(padded, kLimits, Regions);
  INFO(checked.status());
  REQUIRE(checked.ok());
  CHECK(checked->bytes == 36);
  CHECK(checked->places[0].inline_data == padded.inline_bytes().chunks(0).data());
  CHECK(checked->places[1].inline_data == padded.inline_bytes().chunks(0).data() + 24);
}

TEST_CASE("Missing sources, cuda handles and slots that can't carry the bucket are refused") {
  const auto kCode = StatusCode::kInvalidArgument;
  CheckRefused({
      Bad("no source", kCode, {"source is missing"}, Unpacked(), [](auto& b) { b.clear_source(); }),
      Bad("cuda", StatusCode::kUnimplemented, {"cuda_ipc", "1 handles", "no cuda transport"},
          Unpacked(), [](auto& b) { b.mutable_cuda_ipc()->add_handles(); }),
      Bad("unpacked slot", kCode, {"packed", "slot 3"}, InSlot(),
          [](auto& b) { b.set_packed(false); }),
      Bad("too large for a slot", kCode, {"bucket.slot", "4108", "4096"}, InSlot(),
          [](auto& b) { SetDims(b, {1024}); }),
      Bad("implied offset unaligned in a slot", kCode, {"byte_offsets[1]", "3", "multiple of 2"},
          InSlot(),
          [](auto& b) {
            b.set_dtypes(0, v1::DTYPE_UINT8);
            SetDims(b, {3});
          }),
  });
}

TEST_CASE("Names of groups and instances keep to their alphabet and length") {
  CHECK(CheckName("policy-7B_v1.2", "group").ok());
  CHECK(CheckName(std::string(128, 'a'), "group").ok());
  for (const std::string& name : {std::string(), std::string(129, 'a'), std::string("a/b"),
                                  std::string("a b"), std::string("a\0b", 3),
                                  std::string("gr\xc3\xbc"
                                              "n")}) {
    const absl::Status status = CheckName(name, "instance");
    CHECK(status.code() == StatusCode::kInvalidArgument);
    CHECK_THAT(Message(status), Contains("instance"));
  }
  CHECK_THAT(Message(CheckName("a/b", "group")), Contains("0x2f at 1"));
}

TEST_CASE("A group could be named as a folder or as an option of a command") {
  for (const std::string name : {".", "..", "-", "-x", "--help"}) {
    const absl::Status status = CheckName(name, "group");
    CHECK(status.code() == StatusCode::kInvalidArgument);
    CHECK(FailureOf(status).field == "group");
  }
  for (const std::string name : {"...", ".a", "_-", "a-"}) CHECK(CheckName(name, "group").ok());
}

TEST_CASE("Whatever is accepted of random buckets lies inside its memory") {
  const uint64_t kSeed = 20'261'121;
  std::mt19937_64 random(kSeed);
  const std::vector<int64_t> kNumbers = {-1, 0, 1, 2, 3, 4, 8, 12, 16, 24, 992, 1000, kMax, kMin};
  const auto number = [&] { return kNumbers[random() % kNumbers.size()]; };
  int accepted = 0;
  for (int round = 0; round < 20'000; ++round) {
    INFO("seed " << kSeed << " round " << round);
    v1::Bucket bucket;
    const int tensors = 1 + static_cast<int>(random() % 3);
    for (int i = 0; i < tensors; ++i) {
      AddTensor(&bucket, std::string(1, static_cast<char>('a' + i)),
                static_cast<v1::DType>(1 + random() % 12),
                {1 + static_cast<int64_t>(random() % 9)});
      if (random() % 8 == 0) bucket.mutable_shapes(i)->add_dims(number());
    }
    bucket.set_packed(random() % 2 == 0);
    const bool offsets = bucket.packed() && random() % 2 == 0;
    for (int i = 0; i < tensors && offsets; ++i) bucket.add_byte_offsets(number());
    for (int i = 0; i < (bucket.packed() ? 1 : tensors); ++i) {
      v1::RegionRef* ref = bucket.mutable_regions()->add_refs();
      ref->set_region_id(7 + random() % 2);
      ref->set_byte_offset(number());
    }
    const auto checked = CheckBucket(bucket, kLimits, Regions);
    if (!checked.ok()) continue;
    ++accepted;
    for (int i = 0; i < tensors; ++i) {
      const auto& place = checked->places[static_cast<size_t>(i)];
      const int64_t bytes = checked->ranges[static_cast<size_t>(i)].count *
                            ElementBytes(checked->tensors[static_cast<size_t>(i)].dtype);
      REQUIRE(place.byte_offset >= 0);
      REQUIRE(bytes >= 0);
      REQUIRE(place.byte_offset + bytes <= *Regions(place.region));
    }
  }
  CHECK(accepted > 500);
}

}  // namespace
}  // namespace refitd
