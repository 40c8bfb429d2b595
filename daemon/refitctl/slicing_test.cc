#include "daemon/refitctl/slicing.h"

#include <catch2/catch.hpp>
#include <random>

namespace refitd {
namespace {

TEST_CASE("uneven dimensions are cut as torch.chunk cuts them") {
  CHECK(ChunkOf(10, 4, 0) == Chunk{0, 3});
  CHECK(ChunkOf(10, 4, 2) == Chunk{6, 3});
  CHECK(ChunkOf(10, 4, 3) == Chunk{9, 1});
  CHECK(ChunkOf(2, 4, 3) == Chunk{2, 0});
  CHECK(ChunkOf(0, 2, 1) == Chunk{0, 0});
}

TEST_CASE("one-dimensional tensors, scalars and tensors without the dimension are held whole") {
  CHECK(SliceOf({7}, 0, 1, 2) == WholeBox({7}));
  CHECK(SliceOf({}, 0, 1, 2) == WholeBox({}));
  CHECK(SliceOf({4, 6}, 2, 1, 2) == WholeBox({4, 6}));
  CHECK(SliceOf({4, 6}, std::nullopt, 1, 2) == WholeBox({4, 6}));
  CHECK(SliceOf({4, 6}, 1, 1, 2) == Box{{0, 3}, {4, 3}});
}

TEST_CASE("a whole tensor is one run") {
  CHECK(StripsOf({4, 6}, WholeBox({4, 6})) == Strips{0, 24, 24, 1});
  CHECK(StripsOf({}, WholeBox({})) == Strips{0, 1, 1, 1});
}

TEST_CASE("runs inside any range name each held element once, as the definition says") {
  const uint64_t seed = 20261121;
  INFO("seed " << seed);
  std::mt19937_64 random(seed);
  const auto below = [&](int64_t n) { return static_cast<int64_t>(random() % n); };
  for (int round = 0; round < 2000; ++round) {
    Dims shape;
    for (int64_t rank = 1 + below(4); rank > 0; --rank) shape.push_back(below(6));
    const int ranks = 1 + static_cast<int>(below(4));
    const int rank = static_cast<int>(below(ranks));
    const Box box = SliceOf(shape, static_cast<int>(below(4)), rank, ranks);
    const Strips strips = StripsOf(shape, box);
    const int64_t total = *ElementCount(shape);
    const int64_t start = below(total + 1);
    const int64_t count = below(total - start + 1);

    std::vector<std::pair<int64_t, int64_t>> expected;  // global, local
    int64_t local = 0;
    for (int64_t global = 0; global < total; ++global) {
      bool inside = true;
      int64_t rest = global;
      for (size_t d = shape.size(); d-- > 0; rest /= shape[d]) {
        const int64_t at = rest % shape[d];
        inside = inside && at >= box.offset[d] && at < box.offset[d] + box.extent[d];
      }
      if (!inside) continue;
      if (global >= start && global < start + count) expected.emplace_back(global, local);
      ++local;
    }
    std::vector<std::pair<int64_t, int64_t>> got;
    ForEachRun(strips, start, count, [&](int64_t global, int64_t from, int64_t elements) {
      for (int64_t i = 0; i < elements; ++i) got.emplace_back(global + i, from + i);
    });
    REQUIRE(got == expected);
    REQUIRE(local == ElementCount(box));
  }
}

TEST_CASE("a rank's memory is aligned, without overlap, and large enough") {
  const std::vector<TensorSpec> tensors = {{"a", DType::kBFloat16, {5, 3}},
                                           {"b", DType::kFloat32, {7}},
                                           {"c", DType::kInt8, {0, 4}},
                                           {"d", DType::kFloat64, {}}};
  const Holding holding = PlanHolding(tensors, 0, 1, 2);
  CHECK(holding.held[0].bytes == 2 * 3 * 2);
  CHECK(holding.held[1].bytes == 28);
  CHECK(holding.tensor_bytes == 12 + 28 + 0 + 8);
  int64_t end = 0;
  for (const HeldTensor& held : holding.held) {
    CHECK(held.byte_offset % kPackAlignment == 0);
    CHECK(held.byte_offset >= end);
    end = held.byte_offset + held.bytes;
  }
  CHECK(holding.memory_bytes >= end);
}

}  // namespace
}  // namespace refitd
