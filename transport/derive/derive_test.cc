#include "transport/derive/derive.h"

#include <algorithm>
#include <catch2/catch.hpp>
#include <cmath>
#include <cstring>
#include <iterator>
#include <limits>
#include <random>

#include "transport/derive/held_testing.h"

namespace refitd {
namespace {

using Rng = std::mt19937_64;

constexpr DType kFloats[] = {DType::kFloat32, DType::kBFloat16, DType::kFloat16};
constexpr DerivedKind kQuantised[] = {DerivedKind::kFp8Block,     DerivedKind::kFp8BlockReciprocal,
                                      DerivedKind::kFp8BlockPow2, DerivedKind::kFp8Channel,
                                      DerivedKind::kFp8BlockCuda, DerivedKind::kMxFp8};

int64_t Between(Rng& rng, int64_t low, int64_t high) {
  return std::uniform_int_distribution<int64_t>(low, high)(rng);
}

// A number of E4M3 by its definition: sign, 4 bits of exponent with bias 7, 3 bits of mantissa.
double E4M3(uint8_t bits) {
  const int exponent = bits >> 3 & 15;
  const int mantissa = bits & 7;
  const double magnitude =
      exponent == 0 ? std::ldexp(mantissa, -9) : std::ldexp(8 + mantissa, exponent - 10);
  return (bits & 0x80) != 0 ? -magnitude : magnitude;
}

// The nearest number of E4M3; of two equally near ones, that with an even mantissa.
uint8_t NearestE4M3(float x) {
  uint8_t best = 0;
  for (uint8_t bits = 1; bits <= 0x7e; ++bits) {
    const double now = std::abs(E4M3(bits) - std::abs(static_cast<double>(x)));
    const double before = std::abs(E4M3(best) - std::abs(static_cast<double>(x)));
    if (now < before || (now == before && bits % 2 == 0)) best = bits;
  }
  return static_cast<uint8_t>(best | (std::signbit(x) ? 0x80 : 0));
}

TEST_CASE("E4M3 is the nearest number, ties to even, and saturates") {
  Rng rng(1);
  for (int bits = 0; bits <= 0x7e; ++bits) {
    const auto number = static_cast<float>(E4M3(static_cast<uint8_t>(bits)));
    CHECK(derive::ToE4M3(number) == bits);
    CHECK(derive::ToE4M3(-number) == (bits | 0x80));
    if (bits == 0x7e) continue;
    const auto next = static_cast<float>(E4M3(static_cast<uint8_t>(bits + 1)));
    const float middle = (number + next) / 2;
    for (const float x : {middle, std::nextafter(middle, 0.0F), std::nextafter(middle, 1e9F)}) {
      CHECK(derive::ToE4M3(x) == NearestE4M3(x));
    }
  }
  for (int i = 0; i < 20'000; ++i) {
    const float x = std::ldexp(static_cast<float>(Between(rng, -(1 << 24), 1 << 24)),
                               static_cast<int>(Between(rng, -40, -10)));
    REQUIRE(derive::ToE4M3(x) == NearestE4M3(x));
  }
  for (const float x : {448.0F, 449.0F, 1e30F, std::numeric_limits<float>::infinity()}) {
    CHECK(derive::ToE4M3(x) == 0x7e);
    CHECK(derive::ToE4M3(-x) == 0xfe);
  }
}

// Between each two neighbours of a 16-bit type, what lies below the middle becomes the lower.
template <typename From, typename To>
void CheckRounding(From from, To to, int infinity) {
  for (int bits = 0; bits < infinity; ++bits) {
    const float number = from(static_cast<uint16_t>(bits));
    REQUIRE(to(number) == bits);
    REQUIRE(to(-number) == (bits | 0x8000));
    if (bits + 1 == infinity) break;
    const double next = from(static_cast<uint16_t>(bits + 1));
    const auto middle = static_cast<float>((static_cast<double>(number) + next) / 2);
    REQUIRE(to(middle) == bits + bits % 2);
    REQUIRE(to(std::nextafter(middle, 0.0F)) == bits);
    REQUIRE(to(std::nextafter(middle, std::numeric_limits<float>::infinity())) == bits + 1);
  }
  REQUIRE(to(std::numeric_limits<float>::infinity()) == infinity);
  REQUIRE(std::isinf(from(static_cast<uint16_t>(infinity))));
  REQUIRE((to(std::numeric_limits<float>::quiet_NaN()) & 0x7fff) > infinity);
}

TEST_CASE("bfloat16 and float16 are the nearest numbers, ties to even") {
  CheckRounding([](uint16_t x) { return derive::FromBFloat16(x); },
                [](float x) { return derive::ToBFloat16(x); }, 0x7f80);
  CheckRounding([](uint16_t x) { return derive::FromFloat16(x); },
                [](float x) { return derive::ToFloat16(x); }, 0x7c00);
}

TEST_CASE("the rounded logarithm of two is rounded up as by the C library") {
  Rng rng(6);
  const auto check = [](float x) {
    INFO(x);
    REQUIRE(derive::CeilOfLog2(x) ==
            static_cast<int>(std::ceil(static_cast<float>(std::log2(static_cast<double>(x))))));
  };
  for (int exponent = -149; exponent < 128; ++exponent) {
    float x = std::ldexp(1.0F, exponent);
    if (exponent > -149) check(std::nextafter(x, 0.0F));
    for (int i = 0; i < 60; ++i, x = std::nextafter(x, 3e38F)) check(x);
    for (int i = 0; i < 100; ++i) {
      check(std::ldexp(1 + static_cast<float>(Between(rng, 0, 1 << 22)) / (1 << 22), exponent));
    }
  }
}

TEST_CASE("the quotient has the value of E4M3 that a division has") {
  Rng rng(7);
  for (int i = 0; i < 200'000; ++i) {
    const auto mantissa = [&] {
      return static_cast<float>(Between(rng, 1 << 23, (1 << 24) - 1)) / (1 << 23);
    };
    // Blocks with infinities have no scale: the largest number here, rounded, is finite.
    const int exponent = static_cast<int>(Between(rng, -17, 118));
    const float scale = std::ldexp(mantissa(), exponent);
    const float number = std::ldexp(mantissa(), exponent + static_cast<int>(Between(rng, -16, 8)));
    for (const float x : {number, -number, derive::FromBFloat16(derive::ToBFloat16(number))}) {
      REQUIRE(derive::ToE4M3(derive::Quotient(x, scale, 1 / scale)) == derive::ToE4M3(x / scale));
    }
  }
  for (const float x : {0.0F, -0.0F, 1e-45F, -1e-45F, 1e-38F}) {
    CHECK(derive::ToE4M3(derive::Quotient(x, 0.3F, 1 / 0.3F)) == derive::ToE4M3(x / 0.3F));
  }
}

// ---- boxes ----

std::vector<char> Stored(const std::vector<float>& numbers, DType dtype) {
  std::vector<char> bytes(numbers.size() * static_cast<size_t>(ElementBytes(dtype)));
  for (size_t i = 0; i < numbers.size(); ++i) {
    if (dtype == DType::kFloat32) {
      std::memcpy(&bytes[i * 4], &numbers[i], 4);
    } else {
      const uint16_t bits = dtype == DType::kBFloat16 ? derive::ToBFloat16(numbers[i])
                                                      : derive::ToFloat16(numbers[i]);
      std::memcpy(&bytes[i * 2], &bits, 2);
    }
  }
  return bytes;
}

float NumberAt(const std::vector<char>& bytes, DType dtype, int64_t index) {
  if (dtype == DType::kFloat32) {
    float number = 0;
    std::memcpy(&number, &bytes[static_cast<size_t>(index) * 4], 4);
    return number;
  }
  uint16_t bits = 0;
  std::memcpy(&bits, &bytes[static_cast<size_t>(index) * 2], 2);
  return dtype == DType::kBFloat16 ? derive::FromBFloat16(bits) : derive::FromFloat16(bits);
}

// Weights of many sizes, with blocks of zeros.
std::vector<float> Weights(Rng& rng, int64_t count) {
  std::vector<float> numbers;
  float size = 1;
  for (int64_t i = 0; i < count; ++i) {
    if (i % 97 == 0) size = std::ldexp(1.0F, static_cast<int>(Between(rng, -14, 6)));
    numbers.push_back(static_cast<float>(Between(rng, -1000, 1000)) / 1000 * size);
  }
  const int64_t zeros = Between(rng, 0, count - 1);
  std::fill(numbers.begin() + zeros, numbers.begin() + std::min(count, zeros + 700), 0.0F);
  return numbers;
}

HeldPiece Whole(const Derivation& derivation, const std::vector<char>& bytes) {
  const Dims& shape = derivation.from.shape;
  return HoldOne(std::make_shared<Derivation>(derivation), WholeBox(shape), RowMajorStrides(shape),
                 bytes.data());
}

Dims ShapeOf(const Derivation& derivation) {
  return ComputableBox(derivation, WholeBox(derivation.from.shape))->extent;
}

DType DTypeOf(const Derivation& derivation) {
  if (derivation.role == DerivedRole::kValues) return DType::kFloat8E4M3FN;
  return derivation.kind == DerivedKind::kMxFp8 ? DType::kUint8 : DType::kFloat32;
}

// A scale as a number.
float ScaleAt(const std::vector<char>& scales, const Derivation& derivation, size_t index) {
  if (derivation.kind != DerivedKind::kMxFp8) {
    return NumberAt(scales, DType::kFloat32, static_cast<int64_t>(index));
  }
  return std::ldexp(1.0F, static_cast<uint8_t>(scales[index]) - 127);
}

std::vector<char> DeriveAll(const Derivation& derivation, const std::vector<char>& bytes) {
  const Box all = WholeBox(ShapeOf(derivation));
  std::vector<char> to(static_cast<size_t>(ElementCount(all) * ElementBytes(DTypeOf(derivation))));
  REQUIRE_FALSE(Derive(Whole(derivation, bytes), DTypeOf(derivation), all, to.data()).has_value());
  return to;
}

// Scales and values by the definition, element by element.
TEST_CASE("values and scales are those of the definition, in blocks that end early too") {
  Rng rng(2);
  const DerivedKind kind = GENERATE(from_range(std::begin(kQuantised), std::end(kQuantised)));
  const DType dtype = GENERATE(from_range(std::begin(kFloats), std::end(kFloats)));
  const bool padded = kind == DerivedKind::kFp8Block || kind == DerivedKind::kFp8BlockCuda ||
                      kind == DerivedKind::kFp8Channel;
  const Dims shape = padded ? Dims{2, 150, 300} : Dims{2, 128, 256};
  const Derivation values{{"w", dtype, shape}, kind, DerivedRole::kValues};
  const Derivation scales{{"w", dtype, shape}, kind, DerivedRole::kScales};
  const std::vector<char> bytes = Stored(Weights(rng, ElementCount(WholeBox(shape))), dtype);
  const std::vector<char> quantised = DeriveAll(values, bytes);
  const std::vector<char> scaled = DeriveAll(scales, bytes);
  const Dims block = BlockOf(values);
  const Dims blocks = ShapeOf(scales);
  const Dims strides = RowMajorStrides(shape);
  const auto each = [&](const auto& visit) {
    for (int64_t i = 0; i < ElementCount(WholeBox(shape)); ++i) {
      int64_t of = 0;
      for (size_t d = 0; d < shape.size(); ++d) {
        of = of * blocks[d] + i / strides[d] % shape[d] / block[d];
      }
      visit(i, static_cast<size_t>(of));
    }
  };
  std::vector<float> most(static_cast<size_t>(ElementCount(WholeBox(blocks))));
  each([&](int64_t i, size_t of) {
    most[of] = std::max(most[of], std::abs(NumberAt(bytes, dtype, i)));
  });
  for (size_t of = 0; of < most.size(); ++of) {
    const float scale = ScaleAt(scaled, scales, of);
    const float exact = most[of] / 448;
    INFO("block " << of << " of magnitude " << most[of]);
    switch (kind) {
      case DerivedKind::kFp8Block:
        REQUIRE(scale == std::max(most[of], 1e-4F) / 448);
        break;
      case DerivedKind::kFp8BlockCuda:
        REQUIRE(scale == std::max(most[of], 1e-4F) * (1.0F / 448));
        break;
      case DerivedKind::kFp8BlockReciprocal:
        REQUIRE(scale == (most[of] == 0 ? 1.0F : 1 / (1 / most[of] * 448)));
        break;
      case DerivedKind::kFp8BlockPow2:
      case DerivedKind::kMxFp8:
        if (most[of] == 0) {
          REQUIRE(scale == (kind == DerivedKind::kMxFp8 ? std::ldexp(1.0F, -127) : 1));
          break;
        }
        REQUIRE(std::ldexp(1.0F, std::ilogb(scale)) == scale);
        REQUIRE(scale >= exact * (1 - 1e-5F));
        REQUIRE(scale / 2 < exact);
        break;
      default:
        REQUIRE(scale == std::max(exact, 1.0F / (448 * 512)));
    }
  }
  each([&](int64_t i, size_t of) {
    const float scale = ScaleAt(scaled, scales, of);
    const float number = NumberAt(bytes, dtype, i);
    const float scaled_number = kind == DerivedKind::kFp8Channel ? number / scale
                                : kind == DerivedKind::kFp8BlockReciprocal && most[of] != 0
                                    ? number * (1 / most[of] * 448)
                                    : number * (1 / scale);
    if (static_cast<uint8_t>(quantised[static_cast<size_t>(i)]) != NearestE4M3(scaled_number)) {
      FAIL("element " << i << ": " << number << " by " << scale);
    }
  });
}

TEST_CASE("any box has the values of the whole, wherever what is held lies, in one part or more") {
  Rng rng(3);
  for (int round = 0; round < 120; ++round) {
    const DerivedKind kind = kQuantised[Between(rng, 0, std::size(kQuantised) - 1)];
    const DType dtype = kFloats[Between(rng, 0, 2)];
    const auto role = Between(rng, 0, 1) == 1 ? DerivedRole::kScales : DerivedRole::kValues;
    const Dims shape = {Between(rng, 1, 2), 128 * Between(rng, 1, 3), 128 * Between(rng, 1, 3)};
    const Derivation derivation{{"w", dtype, shape}, kind, role};
    const std::vector<char> bytes = Stored(Weights(rng, ElementCount(WholeBox(shape))), dtype);
    const std::vector<char> all = DeriveAll(derivation, bytes);

    // A rank holds some blocks, rows below one another or columns.
    const Dims block = BlockOf(derivation);
    Box held = WholeBox(shape);
    for (size_t d = 0; d < shape.size(); ++d) {
      const int64_t first = Between(rng, 0, shape[d] / block[d] - 1);
      held.offset[d] = first * block[d];
      held.extent[d] = Between(rng, 1, shape[d] / block[d] - first) * block[d];
    }
    const bool columns = Between(rng, 0, 1) == 1;
    Dims strides = RowMajorStrides(held.extent);
    if (columns) strides = {held.extent[1] * held.extent[2], 1, held.extent[1]};
    const int64_t element = ElementBytes(dtype);
    std::vector<char> memory(static_cast<size_t>(ElementCount(held) * element));
    const Dims whole = RowMajorStrides(shape);
    for (int64_t i = 0; i < held.extent[0]; ++i) {
      for (int64_t j = 0; j < held.extent[1]; ++j) {
        for (int64_t k = 0; k < held.extent[2]; ++k) {
          const int64_t from = (held.offset[0] + i) * whole[0] + (held.offset[1] + j) * whole[1] +
                               held.offset[2] + k;
          const int64_t to = i * strides[0] + j * strides[1] + k * strides[2];
          std::memcpy(&memory[static_cast<size_t>(to * element)],
                      &bytes[static_cast<size_t>(from * element)], static_cast<size_t>(element));
        }
      }
    }
    Box box = *ComputableBox(derivation, held);
    for (size_t d = 0; d < box.offset.size(); ++d) {
      const int64_t first = Between(rng, 0, box.extent[d] - 1);
      box.offset[d] += first;
      box.extent[d] = Between(rng, 1, box.extent[d] - first);
    }
    HeldPiece piece =
        HoldOne(std::make_shared<Derivation>(derivation), held, strides, memory.data());
    std::list<std::vector<char>> parts;
    if (Between(rng, 0, 1) == 1)
      CutHeld(rng, static_cast<int>(Between(rng, 2, 12)), &piece, &parts);
    const int64_t bytes_of = ElementBytes(DTypeOf(derivation));
    const Dims derived_strides = RowMajorStrides(ShapeOf(derivation));
    for (const derive::RowKernels* kernels : AllRowKernels()) {
      INFO(kernels->name << ", " << Describe(derivation));
      std::vector<char> to(static_cast<size_t>(ElementCount(box) * bytes_of + 1), 'x');
      REQUIRE_FALSE(DeriveBy(*kernels, piece, DTypeOf(derivation), box, to.data()).has_value());
      REQUIRE(to.back() == 'x');
      const char* at = to.data();
      for (int64_t i = 0; i < box.extent[0]; ++i) {
        for (int64_t j = 0; j < box.extent[1]; ++j) {
          const int64_t from = (box.offset[0] + i) * derived_strides[0] +
                               (box.offset[1] + j) * derived_strides[1] + box.offset[2];
          REQUIRE(std::memcmp(at, &all[static_cast<size_t>(from * bytes_of)],
                              static_cast<size_t>(box.extent[2] * bytes_of)) == 0);
          at += box.extent[2] * bytes_of;
        }
      }
    }
  }
}

TEST_CASE("all kernels cast and quantise every bit pattern alike") {
  std::vector<uint16_t> patterns(1 << 16);
  for (size_t i = 0; i < patterns.size(); ++i) patterns[i] = static_cast<uint16_t>(i);
  Rng rng(4);
  std::vector<uint32_t> floats(1 << 16);
  for (uint32_t& bits : floats) bits = static_cast<uint32_t>(rng());
  const auto kernels = AllRowKernels();
  for (const DType from : kFloats) {
    const void* const row =
        from == DType::kFloat32 ? static_cast<const void*>(floats.data()) : patterns.data();
    for (const DType to : kFloats) {
      std::vector<char> expected(patterns.size() * 4);
      std::vector<char> found(patterns.size() * 4);
      const auto count = static_cast<int64_t>(patterns.size());
      kernels[0]->cast(row, from, count, to, expected.data());
      for (const derive::RowKernels* other : kernels) {
        other->cast(row, from, count, to, found.data());
        CHECK(found == expected);
      }
    }
    // Only finite numbers are quantised.
    std::vector<char> finite;
    const int64_t element = ElementBytes(from);
    for (int64_t i = 0; i < (1 << 16); ++i) {
      const char* const at = static_cast<const char*>(row) + i * element;
      if (kernels[0]->amax(at, from, 1) < 0x7f800000) finite.insert(finite.end(), at, at + element);
    }
    const int64_t count = static_cast<int64_t>(finite.size()) / element;
    for (const bool divides : {false, true}) {
      for (const float factor : {1.0F, 37.7F, 1e-5F}) {
        const derive::BlockScale scale{1, factor, divides};
        std::vector<char> expected(static_cast<size_t>(count));
        std::vector<char> found(static_cast<size_t>(count));
        kernels[0]->quantise(finite.data(), from, count, scale, expected.data());
        for (const derive::RowKernels* other : kernels) {
          other->quantise(finite.data(), from, count, scale, found.data());
          CHECK(found == expected);
          for (int64_t n : {0, 1, 7, 33, 100}) {
            CHECK(other->amax(finite.data() + element, from, n) ==
                  kernels[0]->amax(finite.data() + element, from, n));
          }
        }
      }
    }
  }
}

TEST_CASE("an element without a result is found") {
  Rng rng(5);
  const DerivedKind kind = GENERATE(from_range(std::begin(kQuantised), std::end(kQuantised)));
  const DType dtype = GENERATE(from_range(std::begin(kFloats), std::end(kFloats)));
  const auto role = GENERATE(DerivedRole::kValues, DerivedRole::kScales);
  const Dims shape = {256, 128};
  const Derivation derivation{{"w", dtype, shape}, kind, role};
  std::vector<float> numbers = Weights(rng, 256 * 128);
  numbers[200 * 128 + 77] =
      GENERATE(std::numeric_limits<float>::infinity(), -std::numeric_limits<float>::infinity(),
               std::numeric_limits<float>::quiet_NaN());
  const std::vector<char> bytes = Stored(numbers, dtype);
  HeldPiece held = Whole(derivation, bytes);
  std::list<std::vector<char>> parts;
  if (GENERATE(false, true)) CutHeld(rng, 9, &held, &parts);
  const Box all = WholeBox(ShapeOf(derivation));
  std::vector<char> to(static_cast<size_t>(ElementCount(all) * 4));
  CHECK(Derive(held, DTypeOf(derivation), all, to.data()) == Dims{200, 77});
  // The blocks beside it have results.
  Box above = all;
  above.extent[0] = role == DerivedRole::kScales ? ShapeOf(derivation)[0] / 2 : 128;
  CHECK_FALSE(Derive(held, DTypeOf(derivation), above, to.data()).has_value());
}

TEST_CASE("tensors of fewer dimensions are cast") {
  for (const Dims& shape : {Dims{}, Dims{5}, Dims{3, 4}, Dims{2, 3, 2, 5}}) {
    const Derivation derivation{{"w", DType::kFloat32, shape}, DerivedKind::kCast, {}};
    std::vector<float> numbers(static_cast<size_t>(ElementCount(WholeBox(shape))));
    for (size_t i = 0; i < numbers.size(); ++i) numbers[i] = 1.01F * static_cast<float>(i + 1);
    const std::vector<char> bytes = Stored(numbers, DType::kFloat32);
    std::vector<char> to(numbers.size() * 2);
    CHECK_FALSE(
        Derive(Whole(derivation, bytes), DType::kBFloat16, WholeBox(shape), to.data()).has_value());
    CHECK(to == Stored(numbers, DType::kBFloat16));
  }
}

}  // namespace
}  // namespace refitd
