// Strided storage against a brute-force oracle that marks every byte.
#include "transport/plan/strided_bytes.h"

#include <algorithm>
#include <catch2/catch.hpp>
#include <cstdint>
#include <random>
#include <vector>

namespace refitd {
namespace {

using Rng = std::mt19937_64;

constexpr int64_t kManySteps = int64_t{1} << 20;

int64_t Pick(Rng* rng, int64_t low, int64_t high) {
  return std::uniform_int_distribution<int64_t>(low, high)(*rng);
}

void SetEnd(StridedBytes* bytes) {
  std::sort(bytes->outer.begin(), bytes->outer.end(),
            [](const Axis& a, const Axis& b) { return a.stride > b.stride; });
  bytes->end = bytes->begin + bytes->run;
  for (const Axis& axis : bytes->outer) bytes->end += axis.stride * (axis.count - 1);
}

// Random strides, or the strides of a sliced tensor, several of which alternate.
StridedBytes Random(Rng* rng) {
  StridedBytes bytes;
  bytes.begin = Pick(rng, 0, 60);
  bytes.run = Pick(rng, 1, 4);
  const bool nested = Pick(rng, 0, 1) == 0;
  int64_t stride = bytes.run;
  for (int64_t axes = Pick(rng, 0, 3); axes > 0; --axes) {
    const Axis axis = {nested ? stride * Pick(rng, 1, 3) : Pick(rng, 0, 30), Pick(rng, 2, 5)};
    bytes.outer.push_back(axis);
    stride = axis.stride * axis.count;
  }
  SetEnd(&bytes);
  return bytes;
}

void Mark(const StridedBytes& bytes, std::vector<uint8_t>* marks) {
  std::vector<int64_t> runs = {bytes.begin};
  for (const Axis& axis : bytes.outer) {
    std::vector<int64_t> more;
    for (const int64_t run : runs) {
      for (int64_t i = 0; i < axis.count; ++i) more.push_back(run + i * axis.stride);
    }
    runs = std::move(more);
  }
  marks->assign(1 << 14, 0);
  for (const int64_t run : runs) {
    for (int64_t i = 0; i < bytes.run; ++i) ++(*marks)[static_cast<size_t>(run + i)];
  }
}

TEST_CASE("Whether strided storage shares bytes is decided as by marking every byte") {
  constexpr uint64_t kSeed = 2880;
  Rng rng(kSeed);
  int sharing = 0;
  int apart = 0;
  int repeating = 0;
  std::vector<uint8_t> a_marks;
  std::vector<uint8_t> b_marks;
  for (int round = 0; round < 20'000; ++round) {
    INFO("seed " << kSeed << ", round " << round);
    const StridedBytes a = Random(&rng);
    StridedBytes b = Random(&rng);
    if (round % 3 == 0) {  // the same strides at another place
      b = a;
      b.begin = Pick(&rng, 0, 60);
      SetEnd(&b);
    }
    Mark(a, &a_marks);
    Mark(b, &b_marks);
    const bool repeats =
        std::any_of(a_marks.begin(), a_marks.end(), [](uint8_t n) { return n > 1; });
    bool share = false;
    for (size_t i = 0; i < a_marks.size(); ++i) share |= a_marks[i] > 0 && b_marks[i] > 0;
    int64_t steps = 0;
    REQUIRE(RepeatsBytes(a, kManySteps, &steps) == repeats);
    steps = 0;
    REQUIRE(ShareBytes(a, b, kManySteps, &steps) == share);
    ++(share ? sharing : apart);
    repeating += repeats ? 1 : 0;
  }
  CHECK(sharing > 2'000);
  CHECK(apart > 2'000);
  CHECK(repeating > 2'000);
}

TEST_CASE("Millions of elements in turns take a few steps, not one each") {
  StridedBytes gate = {.begin = 0, .run = 2, .outer = {{11'520, 2880}, {4, 2880}}};
  SetEnd(&gate);
  StridedBytes up = gate;
  up.begin = 2;
  SetEnd(&up);
  int64_t steps = 0;
  CHECK(ShareBytes(gate, up, kManySteps, &steps) == false);
  CHECK(RepeatsBytes(gate, kManySteps, &steps) == false);
  CHECK(steps < 20);
  up.begin = 2 + 11'520 * 2880 - 4;  // past all but the last element
  SetEnd(&up);
  CHECK(ShareBytes(gate, up, kManySteps, &steps) == false);
  up.begin -= 2;
  SetEnd(&up);
  CHECK(ShareBytes(gate, up, kManySteps, &steps) == true);
  CHECK(steps < 40);
}

TEST_CASE(
    "What takes more steps than allowed, or spans more than can be added up, is not decided") {
  // Strides without a common divisor, none of which steps over the others.
  StridedBytes a = {.begin = 0, .run = 1, .outer = {{10'007, 10'000}, {10'003, 10'000}}};
  a.outer.push_back({9'973, 10'000});
  SetEnd(&a);
  StridedBytes b = a;
  b.begin = 4'999;
  SetEnd(&b);
  int64_t steps = 0;
  CHECK_FALSE(ShareBytes(a, b, 3, &steps).has_value());
  CHECK(steps <= 4);
  StridedBytes huge = {.begin = 0, .run = 1, .outer = {{kMaxStridedSpan, 2}}};
  SetEnd(&huge);
  CHECK_FALSE(ShareBytes(huge, a, kManySteps, &steps).has_value());
  CHECK_FALSE(RepeatsBytes(huge, kManySteps, &steps).has_value());
}

}  // namespace
}  // namespace refitd
