#include <algorithm>
#include <catch2/catch.hpp>
#include <cstring>
#include <numeric>
#include <random>
#include <string>
#include <vector>

#include "client/engine.h"

namespace refitd::client {
namespace {

TensorSpec Tensor(std::string name, DType dtype, const Dims& shape) {
  return TensorSpec{std::move(name), dtype, shape};
}

TensorView View(const TensorSpec& tensor, int64_t start, int64_t count,
                const std::vector<char>& bytes) {
  return TensorView{tensor, start, count, bytes.data() + start * ElementBytes(tensor.dtype)};
}

Part PartOf(std::vector<TensorView> views) {
  static int64_t next = 0;
  return Part{Version(1), UpdateId(1), PartSeq(next++), std::move(views)};
}

std::vector<char> Bytes(int64_t size) {
  std::vector<char> bytes(size);
  std::iota(bytes.begin(), bytes.end(), 1);
  return bytes;
}

TEST_CASE("a tensor that arrives whole is passed on without a copy") {
  const TensorSpec tensor = Tensor("w", DType::kFloat32, {2, 3});
  const std::vector<char> bytes = Bytes(24);
  PartJoiner joiner;
  const auto whole = joiner.Add(PartOf({View(tensor, 0, 6, bytes)}));
  REQUIRE(whole.ok());
  REQUIRE(whole->size() == 1);
  CHECK(whole->front().data == bytes.data());
  CHECK(joiner.Unfinished().empty());
}

TEST_CASE("a scalar and a tensor of no elements are whole at once") {
  const std::vector<char> bytes = Bytes(8);
  PartJoiner joiner;
  const auto whole = joiner.Add(PartOf({View(Tensor("s", DType::kInt64, {}), 0, 1, bytes),
                                        View(Tensor("e", DType::kInt64, {0, 4}), 0, 0, bytes)}));
  REQUIRE(whole.ok());
  CHECK(whole->size() == 2);
}

TEST_CASE("parts are joined, byte for byte, in whatever order and sizes they come") {
  constexpr uint64_t kSeed = 20'240'607;
  INFO("seed " << kSeed);
  std::mt19937_64 random(kSeed);
  for (int round = 0; round < 200; ++round) {
    const int64_t count = 2 + static_cast<int64_t>(random() % 500);
    const TensorSpec tensor = Tensor("w", DType::kBFloat16, {count});
    const std::vector<char> bytes = Bytes(count * 2);
    std::vector<std::pair<int64_t, int64_t>> runs;
    for (int64_t at = 0; at < count;) {
      const int64_t run = std::min<int64_t>(1 + random() % (count - 1), count - at);
      runs.emplace_back(at, run);
      at += run;
    }
    std::shuffle(runs.begin(), runs.end(), random);
    PartJoiner joiner;
    for (size_t i = 0; i < runs.size(); ++i) {
      const auto whole = joiner.Add(PartOf({View(tensor, runs[i].first, runs[i].second, bytes)}));
      REQUIRE(whole.ok());
      if (i + 1 < runs.size()) {
        REQUIRE(whole->empty());
        REQUIRE(joiner.Unfinished() == std::vector<std::string>{"w"});
        continue;
      }
      REQUIRE(whole->size() == 1);
      REQUIRE(whole->front().start == 0);
      REQUIRE(whole->front().count == count);
      REQUIRE(std::memcmp(whole->front().data, bytes.data(), bytes.size()) == 0);
      REQUIRE(joiner.Unfinished().empty());
    }
  }
}

TEST_CASE("a part that overlaps what came before is refused") {
  const TensorSpec tensor = Tensor("w", DType::kFloat32, {10});
  const std::vector<char> bytes = Bytes(40);
  PartJoiner joiner;
  REQUIRE(joiner.Add(PartOf({View(tensor, 0, 4, bytes)})).ok());
  SECTION("in part") {
    const auto added = joiner.Add(PartOf({View(tensor, 3, 4, bytes)}));
    CHECK(absl::IsInvalidArgument(added.status()));
    CHECK(std::string(added.status().message()).find("\"w\"") != std::string::npos);
  }
  SECTION("as a whole") {
    CHECK(absl::IsInvalidArgument(joiner.Add(PartOf({View(tensor, 0, 10, bytes)})).status()));
  }
}

TEST_CASE("a part that disagrees about dtype or shape is refused") {
  const std::vector<char> bytes = Bytes(80);
  PartJoiner joiner;
  REQUIRE(joiner.Add(PartOf({View(Tensor("w", DType::kFloat32, {10}), 0, 4, bytes)})).ok());
  CHECK(absl::IsInvalidArgument(
      joiner.Add(PartOf({View(Tensor("w", DType::kInt32, {10}), 4, 4, bytes)})).status()));
  CHECK(absl::IsInvalidArgument(
      joiner.Add(PartOf({View(Tensor("w", DType::kFloat32, {5, 2}), 4, 4, bytes)})).status()));
}

TEST_CASE("elements outside of the tensor are refused") {
  const std::vector<char> bytes = Bytes(80);
  const TensorSpec tensor = Tensor("w", DType::kFloat32, {10});
  PartJoiner joiner;
  CHECK(absl::IsInvalidArgument(joiner.Add(PartOf({View(tensor, 8, 3, bytes)})).status()));
  TensorView negative = View(tensor, 0, 3, bytes);
  negative.start = -1;
  CHECK(absl::IsInvalidArgument(joiner.Add(PartOf({negative})).status()));
}

TEST_CASE("after Reset an unfinished tensor may begin anew") {
  const TensorSpec tensor = Tensor("w", DType::kFloat32, {10});
  const std::vector<char> bytes = Bytes(40);
  PartJoiner joiner;
  REQUIRE(joiner.Add(PartOf({View(tensor, 0, 4, bytes)})).ok());
  joiner.Reset();
  CHECK(joiner.Unfinished().empty());
  REQUIRE(joiner.Add(PartOf({View(tensor, 0, 4, bytes)})).ok());
  const auto whole = joiner.Add(PartOf({View(tensor, 4, 6, bytes)}));
  REQUIRE(whole.ok());
  CHECK(whole->size() == 1);
}

}  // namespace
}  // namespace refitd::client
