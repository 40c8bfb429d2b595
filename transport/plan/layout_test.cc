#include "transport/plan/layout.h"

#include <algorithm>
#include <catch2/catch.hpp>
#include <limits>
#include <map>
#include <numeric>
#include <random>
#include <set>
#include <string>

#include "transport/base/status.h"

namespace refitd {
namespace {

using Catch::Matchers::Contains;
using Rng = std::mt19937_64;

constexpr int64_t kHuge = std::numeric_limits<int64_t>::max();
constexpr int64_t kRegionBytes = 1 << 20;

int64_t Below(Rng* rng, int64_t n) { return static_cast<int64_t>((*rng)() % n); }

std::optional<int64_t> OneRegion(RegionId region) {
  if (region != RegionId(1)) return std::nullopt;
  return kRegionBytes;
}

Piece Dense(uint32_t tensor, Box box, int64_t byte_offset = 0) {
  Dims strides = RowMajorStrides(box.extent);
  return {tensor, std::move(box), RegionId(1), byte_offset, std::move(strides)};
}

// Row-major indices of a box's elements, ascending.
std::vector<int64_t> Elements(const Box& box, const Dims& shape) {
  std::vector<int64_t> indices = {0};
  for (size_t d = 0; d < shape.size(); ++d) {
    std::vector<int64_t> next;
    for (const int64_t index : indices) {
      for (int64_t i = 0; i < box.extent[d]; ++i) {
        next.push_back(index * shape[d] + box.offset[d] + i);
      }
    }
    indices = std::move(next);
  }
  return indices;
}

// Shapes of rank 0 to 4 with dimensions 0 to 3.
std::vector<Dims> SmallShapes() {
  std::vector<Dims> shapes = {{}};
  for (size_t begin = 0, rank = 1; rank <= 4; ++rank) {
    const size_t end = shapes.size();
    for (; begin < end; ++begin) {
      for (int64_t n = 0; n <= 3; ++n) {
        shapes.push_back(shapes[begin]);
        shapes.back().push_back(n);
      }
    }
  }
  return shapes;
}

std::vector<Box> BoxesInside(const Dims& shape) {
  std::vector<Box> boxes = {{}};
  for (const int64_t n : shape) {
    std::vector<Box> next;
    for (const Box& box : boxes) {
      for (int64_t offset = 0; offset <= n; ++offset) {
        for (int64_t extent = 0; extent <= n - offset; ++extent) {
          next.push_back(box);
          next.back().offset.push_back(offset);
          next.back().extent.push_back(extent);
        }
      }
    }
    boxes = std::move(next);
  }
  return boxes;
}

TEST_CASE("Dtypes have torch's names and their sizes") {
  const std::map<std::string, int64_t> expected = {
      {"float64", 8},       {"float32", 4},     {"float16", 2}, {"bfloat16", 2},
      {"float8_e4m3fn", 1}, {"float8_e5m2", 1}, {"int64", 8},   {"int32", 4},
      {"int16", 2},         {"int8", 1},        {"uint8", 1},   {"bool", 1}};
  std::map<std::string, int64_t> found;
  for (int value = 1; value <= 12; ++value) {
    const auto dtype = DTypeFromProto(value);
    REQUIRE(dtype.ok());
    CHECK(static_cast<int>(*dtype) == value);
    const std::string name(DTypeName(*dtype));
    found[name] = ElementBytes(*dtype);
  }
  CHECK(found == expected);
  for (const int value : {-1, 0, 13, 256, 257}) {
    const auto dtype = DTypeFromProto(value);
    CHECK(absl::IsInvalidArgument(dtype.status()));
    CHECK_THAT(Message(dtype.status()), Contains(fmt::format("dtype {}", value)));
  }
}

TEST_CASE("Shapes print as people write them") {
  CHECK(ToString(DType::kBFloat16, {1024, 3072}) == "bfloat16 [1024, 3072]");
  CHECK(ToString(DType::kBool, {}) == "bool []");
}

TEST_CASE("Element counts refuse negative, absurd and overflowing shapes") {
  CHECK(*ElementCount(Dims{}) == 1);
  CHECK(*ElementCount(Dims{2, 3, 4}) == 24);
  CHECK(*ElementCount(Dims{5, 0}) == 0);
  CHECK(*ElementCount(Dims{kMaxTensorBytes}) == kMaxTensorBytes);
  for (const Dims& shape :
       {Dims{-1}, Dims{3, -2}, Dims{kMaxTensorBytes + 1}, Dims{kHuge, kHuge}, Dims{0, kHuge, kHuge},
        Dims{1 << 24, 1 << 24, 2}, Dims{1, 1, 1, 1, 1, 1, 1, 1, 1},
        Dims{std::numeric_limits<int64_t>::min()}}) {
    const auto count = ElementCount(shape);
    CHECK(absl::IsInvalidArgument(count.status()));
    CHECK_THAT(Message(count.status()), Contains("shape [" + std::to_string(shape[0])));
  }
}

TEST_CASE("Tensor names are short text without control characters") {
  const auto valid = [](std::string name) {
    return ValidateTensor({std::move(name), DType::kInt8, {1}}).ok();
  };
  CHECK(valid("model.layers.0.weight"));
  CHECK(valid(std::string(512, 'x')));
  CHECK(valid("gewicht_\xc3\xa4\xe2\x82\xac\xf0\x9f\x98\x80"));
  CHECK(!valid(""));
  CHECK(!valid(std::string(513, 'x')));
  CHECK(!valid(std::string("a\0b", 3)));
  for (const char* name : {"a\nb", "\x7f", "\xc2\x85", "\xc3", "\xff", "\xc0\xaf", "\xe0\x80\x80",
                           "\xed\xa0\x80", "\xf0\x80\x80\x80", "\xf4\x90\x80\x80", "\x80"}) {
    INFO(name);
    CHECK(!valid(name));
  }
  CHECK_THAT(Message(ValidateTensor({"a\nb", DType::kInt8, {1}})),
             Contains("a\\x0ab") && Contains("byte 1"));
  CHECK_THAT(Message(ValidateTensor({"w", DType::kInt8, {-4}})),
             Contains("tensor w") && Contains("[-4]"));
  CHECK_THAT(Message(ValidateTensor({"w", DType::kFloat64, {kMaxTensorBytes / 4}})),
             Contains("tensor w") && Contains("float64"));
  CHECK_THAT(Message(ValidateTensor({"w", static_cast<DType>(99), {}})), Contains("dtype 99"));
}

TEST_CASE("Boxes of small shapes intersect, count and index as their elements do") {
  for (const Dims& shape : {Dims{}, Dims{3}, Dims{0}, Dims{2, 3}, Dims{2, 0}, Dims{2, 2, 2}}) {
    const std::vector<Box> boxes = BoxesInside(shape);
    for (const Box& a : boxes) {
      REQUIRE(ValidateBox(a, shape).ok());
      const std::vector<int64_t> in_a = Elements(a, shape);
      REQUIRE(ElementCount(a) == static_cast<int64_t>(in_a.size()));
      if (!in_a.empty()) REQUIRE(FirstIndex(a, shape) == in_a.front());
      for (const Box& b : boxes) {
        const std::vector<int64_t> in_b = Elements(b, shape);
        std::vector<int64_t> both;
        std::set_intersection(in_a.begin(), in_a.end(), in_b.begin(), in_b.end(),
                              std::back_inserter(both));
        const auto common = Intersect(a, b);
        REQUIRE(common.has_value() == !both.empty());
        if (common.has_value()) REQUIRE(Elements(*common, shape) == both);
      }
    }
  }
}

TEST_CASE("Every range of every small shape is cut into few disjoint boxes in order") {
  for (const Dims& shape : SmallShapes()) {
    const int64_t size = *ElementCount(shape);
    const auto rank = static_cast<int64_t>(shape.size());
    for (int64_t start = 0; start <= size; ++start) {
      for (int64_t count = 0; count <= size - start; ++count) {
        std::vector<int64_t> covered;
        const std::vector<Box> boxes = BoxesOfRange(shape, start, count);
        REQUIRE(static_cast<int64_t>(boxes.size()) <= std::max<int64_t>(2 * rank - 1, 1));
        for (const Box& box : boxes) {
          REQUIRE(ValidateBox(box, shape).ok());
          for (const int64_t index : Elements(box, shape)) covered.push_back(index);
        }
        std::vector<int64_t> expected(static_cast<size_t>(count));
        std::iota(expected.begin(), expected.end(), start);
        REQUIRE(covered == expected);
      }
    }
  }
}

TEST_CASE("Row-major strides are dense, and defined for empty shapes") {
  CHECK(RowMajorStrides({2, 3, 4}) == Dims{12, 4, 1});
  CHECK(RowMajorStrides({2, 0, 4}) == Dims{4, 4, 1});
  CHECK(RowMajorStrides({}).empty());
}

TEST_CASE("A span reaches to the end of the last element and never overflows") {
  Piece piece = Dense(0, {{0, 0}, {3, 4}});
  CHECK(*SpanBytes(piece, DType::kBFloat16) == 24);
  piece.strides = {10, 2};
  CHECK(*SpanBytes(piece, DType::kFloat32) == 4 * (20 + 6 + 1));
  piece.strides = {kHuge, 1};
  CHECK(absl::IsInvalidArgument(SpanBytes(piece, DType::kInt8).status()));
  piece.strides = {kHuge / 2 - 10, 1};
  CHECK(SpanBytes(piece, DType::kInt8).ok());
  CHECK(absl::IsInvalidArgument(SpanBytes(piece, DType::kInt16).status()));
  piece.box.extent = {0, 4};
  piece.strides = {kHuge, kHuge};
  CHECK(*SpanBytes(piece, DType::kInt8) == 0);
}

// ---- digest ----

Layout TwoTensors() {
  Layout layout;
  layout.tensors = {{"a", DType::kBFloat16, {4, 4}}, {"b", DType::kFloat32, {2}}};
  layout.pieces = {Dense(0, {{0, 0}, {2, 4}}), Dense(0, {{2, 0}, {2, 4}}, 16),
                   Dense(1, {{0}, {2}}, 32)};
  return layout;
}

TEST_CASE("A layout's digest is of its structure only, whatever the order") {
  const Layout layout = TwoTensors();
  Layout other = layout;
  std::swap(other.tensors.Edit()[0], other.tensors.Edit()[1]);
  for (Piece& piece : other.pieces) piece.tensor = 1 - piece.tensor;
  std::swap(other.pieces[0], other.pieces[2]);
  other.pieces[1].byte_offset = 512;
  other.pieces[0].region = RegionId(9);
  other.binding_generation = 7;
  CHECK(other.Digest() == layout.Digest());
  CHECK(layout.Bytes() == 40);
}

TEST_CASE("Any change of structure changes a layout's digest") {
  std::set<uint64_t> digests = {TwoTensors().Digest(), Layout().Digest()};
  const auto changed = [&](const auto& change) {
    Layout layout = TwoTensors();
    change(&layout);
    digests.insert(layout.Digest());
  };
  changed([](Layout* l) { l->tensors.Edit()[0].name = "c"; });
  changed([](Layout* l) { l->tensors.Edit()[0].dtype = DType::kFloat16; });
  changed([](Layout* l) { l->tensors.Edit()[0].shape[0] = 5; });
  changed([](Layout* l) { l->tensors.Edit()[1].shape = {2, 1}; });
  changed([](Layout* l) { l->pieces[0].box.offset[0] = 1; });
  changed([](Layout* l) { l->pieces[0].box.extent[0] = 1; });
  changed([](Layout* l) { l->pieces[0].strides[0] = 5; });
  changed([](Layout* l) { l->pieces.pop_back(); });
  changed([](Layout* l) { l->pieces.push_back(l->pieces[0]); });
  changed([](Layout* l) { l->tensors.push_back({"c", DType::kInt8, {}}); });
  CHECK(digests.size() == 12);
}

TEST_CASE("The digest of a known layout stays what the protocol says") {
  Layout layout;
  layout.tensors = {{"a", DType::kInt8, {}}};
  // The tensor's hash starts from FNV-1a("a"), and adds the name's bytes, the dtype and the rank.
  HashChain tensor(0xaf63dc4c8601ec8c);
  tensor.Add(1);
  tensor.Add(10);
  tensor.Add(uint64_t{0});
  CHECK(layout.Digest() == tensor.hash());
  // The first output of splitmix64 from seed 0.
  HashChain zero(0);
  zero.Add(uint64_t{0});
  CHECK(zero.hash() == 0xe220a8397b1dcdaf);
}

// ---- validation ----

void Refused(const Layout& layout, absl::StatusCode code, const std::vector<std::string>& words,
             bool destination = true) {
  const absl::Status status = ValidateLayout(layout, OneRegion, destination);
  CHECK(status.code() == code);
  for (const std::string& word : words) CHECK_THAT(Message(status), Contains(word));
}

TEST_CASE("Each thing that can be wrong with a layout is refused with tensor, field and value") {
  REQUIRE(ValidateLayout(TwoTensors(), OneRegion, true).ok());
  const auto refused = [](const auto& change, std::vector<std::string> words,
                          absl::StatusCode code = absl::StatusCode::kInvalidArgument) {
    Layout layout = TwoTensors();
    change(&layout);
    Refused(layout, code, words, false);
    Refused(layout, code, words, true);
  };
  refused([](Layout* l) { l->tensors.Edit()[1].name = "a"; }, {"tensor a", "twice"});
  refused([](Layout* l) { l->tensors.Edit()[1].name = ""; }, {"name is empty"});
  refused([](Layout* l) { l->tensors.Edit()[1].shape = {-2}; }, {"tensor b", "[-2]"});
  refused([](Layout* l) { l->pieces[1].tensor = 2; }, {"piece 1", "tensor 2"});
  refused([](Layout* l) { l->pieces[0].box.extent = {5, 4}; }, {"tensor a", "piece 0", "[5, 4]"});
  refused([](Layout* l) { l->pieces[0].box.offset = {-1, 0}; }, {"tensor a", "[-1, 0]"});
  refused([](Layout* l) { l->pieces[0].box.extent = {2, -1}; }, {"tensor a", "[2, -1]"});
  refused([](Layout* l) { l->pieces[0].box.offset = {kHuge, 0}; }, {"tensor a", "dimension 0"});
  refused([](Layout* l) { l->pieces[0].box.offset = {0}; }, {"tensor a", "rank"});
  refused([](Layout* l) { l->pieces[2].strides = {1, 1}; }, {"tensor b", "strides [1, 1]"});
  refused([](Layout* l) { l->pieces[2].strides = {-1}; }, {"tensor b", "strides [-1]"});
  refused([](Layout* l) { l->pieces[2].strides = {kHuge}; }, {"tensor b", "overflow"});
  refused([](Layout* l) { l->pieces[2].byte_offset = 34; }, {"tensor b", "byte_offset 34", "4"});
  refused([](Layout* l) { l->pieces[2].byte_offset = -4; }, {"tensor b", "byte_offset -4"});
  refused([](Layout* l) { l->pieces[2].byte_offset = kRegionBytes - 4; },
          {"tensor b", std::to_string(kRegionBytes - 4), "region 1"});
  refused([](Layout* l) { l->pieces[2].byte_offset = kHuge - 3; }, {"tensor b", "region 1"});
  refused([](Layout* l) { l->pieces[2].region = RegionId(5); }, {"tensor b", "region 5"},
          absl::StatusCode::kNotFound);
}

TEST_CASE("More tensors than a layout may have are refused by count") {
  Layout layout;
  layout.tensors.Edit().resize(kMaxTensorsPerLayout + 1);
  Refused(layout, absl::StatusCode::kResourceExhausted, {std::to_string(kMaxTensorsPerLayout)});
}

TEST_CASE("Sources may overlap in elements and memory, destinations may not") {
  Layout layout = TwoTensors();
  layout.pieces[1].box.offset = {1, 0};
  CHECK(ValidateLayout(layout, OneRegion, false).ok());
  Refused(layout, absl::StatusCode::kInvalidArgument,
          {"tensor a", "piece 0", "piece 1", "overlap"});

  layout = TwoTensors();
  layout.pieces[1].byte_offset = 14;
  CHECK(ValidateLayout(layout, OneRegion, false).ok());
  Refused(layout, absl::StatusCode::kInvalidArgument, {"tensor a", "shares memory", "14"});

  layout = TwoTensors();
  layout.pieces[2].strides = {0};
  CHECK(ValidateLayout(layout, OneRegion, false).ok());
  Refused(layout, absl::StatusCode::kInvalidArgument, {"tensor b", "several elements", "[0]"});
}

TEST_CASE("A source repeats memory up to a limit") {
  constexpr int64_t kRows = int64_t{1} << 27;  // with 2 bytes an element: 256 MiB
  for (const int64_t rows : {kRows, kRows + 1, int64_t{1} << 46}) {
    Layout layout;
    layout.tensors = {{"a", DType::kBFloat16, {rows}}};
    layout.pieces = {{0, WholeBox({rows}), RegionId(1), 0, {0}}};
    CHECK(ValidateLayout(layout, OneRegion, false).ok() == (rows == kRows));
  }
}

TEST_CASE("Column slices of one fused matrix are disjoint however many rows it has") {
  constexpr int64_t kRows = 3'000'000;
  Layout layout;
  layout.tensors = {{"a", DType::kInt8, {kRows, 4}}, {"b", DType::kInt8, {kRows, 4}}};
  layout.pieces = {{0, WholeBox({kRows, 4}), RegionId(1), 0, {8, 1}},
                   {1, WholeBox({kRows, 4}), RegionId(1), 4, {8, 1}}};
  const auto big = [](RegionId) { return std::optional<int64_t>(kRows * 8); };
  CHECK(ValidateLayout(layout, big, true).ok());
  layout.pieces[1].byte_offset = 3;
  const absl::Status status = ValidateLayout(layout, big, true);
  CHECK(absl::IsInvalidArgument(status));
  CHECK_THAT(Message(status), Contains("tensor a") && Contains("shares memory"));
}

// Gate and up alternate in the last dimension, as published models store them.
Layout Interleaved(int64_t experts, int64_t rows, int64_t columns) {
  Layout layout;
  for (int64_t e = 0; e < experts; ++e) {
    for (const std::string name : {"gate", "up"}) {
      const auto tensor = static_cast<uint32_t>(layout.tensors.size());
      const int64_t first = e * rows * columns * 2 + (name == "up" ? 1 : 0);
      layout.tensors.push_back({std::to_string(e) + "." + name, DType::kBFloat16, {rows, columns}});
      layout.pieces.push_back(
          {tensor, WholeBox({rows, columns}), RegionId(1), 2 * first, {2 * columns, 2}});
    }
  }
  return layout;
}

TEST_CASE("Elements of two pieces that alternate in memory are disjoint however many they are") {
  const auto big = [](RegionId) { return std::optional<int64_t>(int64_t{1} << 40); };
  Layout layout = Interleaved(32, 2880, 2880);
  CHECK(ValidateLayout(layout, big, true).ok());
  layout.pieces[41].byte_offset -= 2;
  absl::Status status = ValidateLayout(layout, big, true);
  CHECK_THAT(Message(status), Contains("20.gate") && Contains("shares memory"));
  // One of the 8,294,400 elements of a piece meets one element of the other piece.
  layout = Interleaved(1, 2880, 2880);
  layout.pieces[1].byte_offset = 2 * (2880 * 2880 * 2 - 2);
  status = ValidateLayout(layout, big, true);
  CHECK_THAT(Message(status), Contains("0.up") && Contains("shares memory"));
  layout.pieces[1].byte_offset += 2;
  CHECK(ValidateLayout(layout, big, true).ok());
}

TEST_CASE("A hundred pieces whose elements take turns are disjoint, in any order of dimensions") {
  constexpr int64_t kPieces = 100;
  constexpr int64_t kRows = 3000;
  constexpr int64_t kColumns = 500;
  const auto big = [](RegionId) { return std::optional<int64_t>(int64_t{1} << 40); };
  for (const bool transposed : {false, true}) {
    Layout layout;
    for (int64_t p = 0; p < kPieces; ++p) {
      layout.tensors.push_back({std::to_string(p), DType::kInt8, {kRows, kColumns}});
      const Dims strides = transposed && p % 2 == 0 ? Dims{kPieces, kPieces * kRows}
                                                    : Dims{kPieces * kColumns, kPieces};
      layout.pieces.push_back(
          {static_cast<uint32_t>(p), WholeBox({kRows, kColumns}), RegionId(1), p, strides});
    }
    CHECK(ValidateLayout(layout, big, true).ok());
    layout.pieces[7].byte_offset += 1;
    const absl::Status status = ValidateLayout(layout, big, true);
    CHECK_THAT(Message(status), Contains("shares memory"));
  }
}

TEST_CASE("Overlap of boxes and of strided storage is found exactly as by brute force") {
  int refused = 0;
  int accepted = 0;
  for (uint64_t seed = 1; seed <= 20'000; ++seed) {
    INFO("seed " << seed);
    Rng rng(seed);
    Layout layout;
    layout.tensors = {{"a", DType::kInt8, {4, 4}}, {"b", DType::kInt16, {3, 3, 3}}};
    std::vector<int> written(4096, 0);
    std::map<std::pair<uint32_t, int64_t>, int> elements;
    const int64_t pieces = 1 + Below(&rng, 3 + (seed % 4 == 0 ? 10 : 0));
    for (int64_t p = 0; p < pieces; ++p) {
      const auto tensor = static_cast<uint32_t>(Below(&rng, 2));
      const TensorSpec& spec = layout.tensors[tensor];
      const int64_t bytes = ElementBytes(spec.dtype);
      Piece piece{tensor, WholeBox(spec.shape), RegionId(1), Below(&rng, 100) * bytes, {}};
      for (size_t d = 0; d < spec.shape.size(); ++d) {
        piece.box.offset[d] = Below(&rng, spec.shape[d]);
        piece.box.extent[d] =
            1 + Below(&rng, std::min<int64_t>(2, spec.shape[d] - piece.box.offset[d]));
        piece.strides.push_back(1 + Below(&rng, 12));
      }
      for (const int64_t index : Elements(piece.box, spec.shape)) ++elements[{tensor, index}];
      const Box local{Dims(piece.box.offset.size(), 0), piece.box.extent};
      for (int64_t index : Elements(local, spec.shape)) {
        int64_t at = piece.byte_offset;
        for (size_t d = spec.shape.size(); d-- > 0;) {
          at += index % spec.shape[d] * piece.strides[d] * bytes;
          index /= spec.shape[d];
        }
        for (int64_t i = 0; i < bytes; ++i) ++written[static_cast<size_t>(at + i)];
      }
      layout.pieces.push_back(std::move(piece));
    }
    const bool once =
        std::all_of(written.begin(), written.end(), [](int n) { return n <= 1; }) &&
        std::all_of(elements.begin(), elements.end(), [](const auto& e) { return e.second <= 1; });
    const absl::Status status = ValidateLayout(layout, OneRegion, true);
    INFO(status);
    REQUIRE(status.ok() == once);
    ++(once ? accepted : refused);
  }
  CHECK(refused > 1000);
  CHECK(accepted > 1000);
}

TEST_CASE("A tensor in a hundred thousand boxes is checked without comparing all pairs") {
  constexpr int64_t kSide = 320;
  Layout layout;
  layout.tensors = {{"w", DType::kInt8, {kSide, kSide}}};
  for (int64_t i = 0; i < kSide * kSide; ++i) {
    layout.pieces.push_back(Dense(0, {{i / kSide, i % kSide}, {1, 1}}, i));
  }
  std::shuffle(layout.pieces.begin(), layout.pieces.end(), Rng(5));
  CHECK(ValidateLayout(layout, OneRegion, true).ok());
  layout.pieces.push_back(Dense(0, {{17, 5}, {1, 1}}, kSide * kSide));
  Refused(layout, absl::StatusCode::kInvalidArgument, {"tensor w", "[17, 5]", "overlap"});
}

// ---- intervals ----

TEST_CASE("An interval set agrees with a bitmap") {
  for (uint64_t seed = 1; seed <= 500; ++seed) {
    INFO("seed " << seed);
    Rng rng(seed);
    constexpr int64_t kSize = 24;
    IntervalSet set;
    std::vector<bool> bits(kSize, false);
    for (int step = 0; step < 30; ++step) {
      const int64_t begin = Below(&rng, kSize);
      const int64_t end = begin + Below(&rng, std::min<int64_t>(6, kSize - begin + 1));
      const bool free =
          std::none_of(bits.begin() + begin, bits.begin() + end, [](bool b) { return b; });
      REQUIRE(set.Add(begin, end) == free);
      if (free) std::fill(bits.begin() + begin, bits.begin() + end, true);
      REQUIRE(set.total() == std::count(bits.begin(), bits.end(), true));
      for (int64_t b = 0; b < kSize; ++b) {
        const auto gap = std::find(bits.begin(), bits.begin() + b, false) - bits.begin();
        REQUIRE(set.FirstGap(b) == (gap == b ? std::nullopt : std::optional<int64_t>(gap)));
      }
    }
  }
}

// ---- buckets ----

TEST_CASE("Buckets carry every range once, aligned, in order, within their limits, and full") {
  constexpr DType kTypes[] = {DType::kInt8, DType::kBFloat16, DType::kFloat32, DType::kFloat64};
  for (uint64_t seed = 1; seed <= 2000; ++seed) {
    INFO("seed " << seed);
    Rng rng(seed);
    std::vector<TensorSpec> tensors;
    std::vector<TensorRange> ranges;
    const int64_t count = Below(&rng, 10);
    for (uint32_t t = 0; t < count; ++t) {
      tensors.push_back({fmt::format("t{}", t), kTypes[Below(&rng, 4)], {5000}});
      const int64_t elements = Below(&rng, 4) == 0 ? 0 : Below(&rng, 1500);
      ranges.push_back({t, Below(&rng, 100), elements});
    }
    const int64_t bucket_bytes = kPackAlignment + Below(&rng, 3000);
    const int64_t max_ranges = 1 + Below(&rng, 6);
    const auto buckets = FormBuckets(tensors, ranges, bucket_bytes, max_ranges);
    std::vector<TensorRange> joined;
    for (const PackedBucket& bucket : buckets) {
      REQUIRE(bucket.ranges.size() == bucket.byte_offsets.size());
      REQUIRE(!bucket.ranges.empty());
      REQUIRE(static_cast<int64_t>(bucket.ranges.size()) <= max_ranges);
      int64_t end = 0;
      for (size_t i = 0; i < bucket.ranges.size(); ++i) {
        const TensorRange& range = bucket.ranges[i];
        const int64_t bytes = ElementBytes(tensors[range.tensor].dtype);
        REQUIRE(bucket.byte_offsets[i] % kPackAlignment == 0);
        REQUIRE(bucket.byte_offsets[i] >= end);
        REQUIRE(bucket.byte_offsets[i] - end < kPackAlignment);
        end = bucket.byte_offsets[i] + range.count * bytes;
        const bool continues = !joined.empty() && joined.back().tensor == range.tensor;
        if (continues) {
          REQUIRE(joined.back().start + joined.back().count == range.start);
          joined.back().count += range.count;
        } else {
          joined.push_back(range);
        }
      }
      REQUIRE(bucket.bytes == end);
      REQUIRE(end <= bucket_bytes);
      // A bucket that is not the last has no room for one more element, or has the most ranges.
      const bool last = &bucket == &buckets.back();
      const int64_t next = (end + kPackAlignment - 1) / kPackAlignment * kPackAlignment;
      const bool full = static_cast<int64_t>(bucket.ranges.size()) == max_ranges;
      if (!last && !full) REQUIRE(bucket_bytes - next < 8);
    }
    REQUIRE(joined == ranges);
  }
}

TEST_CASE("A tensor larger than a bucket is split at elements") {
  const auto buckets = FormBuckets({{"w", DType::kFloat64, {200}}}, {{0, 0, 200}}, 700);
  REQUIRE(buckets.size() == 3);
  CHECK(buckets[0].ranges == std::vector<TensorRange>{{0, 0, 87}});
  CHECK(buckets[1].ranges == std::vector<TensorRange>{{0, 87, 87}});
  CHECK(buckets[2].ranges == std::vector<TensorRange>{{0, 174, 26}});
  CHECK(buckets[2].bytes == 208);
}

TEST_CASE("A matrix larger than a bucket is split after 128 rows, a row, or at an element") {
  const auto split = [](const Dims& shape, TensorRange range, int64_t bucket_bytes) {
    std::vector<std::pair<int64_t, int64_t>> parts;
    for (const PackedBucket& bucket :
         FormBuckets({{"first", DType::kFloat32, {10}}, {"w", DType::kBFloat16, shape}},
                     {{0, 0, 10}, range}, bucket_bytes)) {
      for (const TensorRange& part : bucket.ranges) {
        if (part.tensor == 1) parts.emplace_back(part.start, part.count);
      }
    }
    return parts;
  };
  using Parts = std::vector<std::pair<int64_t, int64_t>>;
  constexpr int64_t kRows = 128 * 10;  // elements
  // 300 rows fit into a bucket, and 274 behind the first tensor.
  CHECK(split({700, 10}, {1, 0, 7000}, 6000) ==
        Parts{{0, 2 * kRows}, {2 * kRows, 2 * kRows}, {4 * kRows, 7000 - 4 * kRows}});
  // Multiples of 128 rows count from each matrix's begin: of 200 rows each.
  CHECK(split({3, 200, 10}, {1, 0, 6000}, 6000) == Parts{{0, 2000}, {2000, 2000}, {4000, 2000}});
  // From row 100 on.
  CHECK(split({700, 10}, {1, 1000, 6000}, 6000) ==
        Parts{{1000, 2 * kRows - 1000}, {2 * kRows, 2 * kRows}, {4 * kRows, 7000 - 4 * kRows}});
  // 100 rows fit into an empty bucket.
  CHECK(split({250, 10}, {1, 0, 2500}, 2000) ==
        Parts{{0, 1000}, {1000, 280}, {1280, 1000}, {2280, 220}});
  // Half a row fits into a bucket.
  CHECK(split({4, 500}, {1, 0, 1000}, 512) == Parts{{0, 256}, {256, 244}, {500, 256}, {756, 244}});
}

TEST_CASE("two names of exactly one memory are tied, and others that share memory are refused") {
  const TensorSpec embed{"embed", DType::kFloat32, {8, 4}};
  const TensorSpec head{"head", DType::kFloat32, {8, 4}};
  Layout layout;
  layout.tensors = {embed, head, {"norm", DType::kFloat32, {4}}};
  const Box upper{{0, 0}, {4, 4}};
  const Box lower{{4, 0}, {4, 4}};
  layout.pieces = {Dense(1, upper), Dense(0, upper), Dense(2, {{0}, {4}}, 512), Dense(1, lower, 64),
                   Dense(0, lower, 64)};
  const Layout both = layout;
  TieSharedTensors(&layout);
  CHECK(layout.ties == std::vector<Tie>{{1, 0}});
  CHECK(layout.pieces.size() == 3);
  CHECK(ValidateLayout(layout, OneRegion, true).ok());
  CHECK(layout.Digest() != both.Digest());

  const auto untouched = [&](const auto& change) {
    Layout other = both;
    change(&other);
    Layout tied = other;
    TieSharedTensors(&tied);
    CHECK(tied.ties.empty());
    CHECK(tied.pieces == other.pieces);
    CHECK(!ValidateLayout(tied, OneRegion, true).ok());
  };
  untouched([](Layout* l) { l->tensors.Edit()[1].dtype = DType::kInt32; });
  untouched([](Layout* l) { l->pieces[3].byte_offset = 68; });
  untouched([](Layout* l) { l->pieces.pop_back(); });
}

TEST_CASE("ties that are wrong are refused by name") {
  Layout layout;
  layout.tensors = {
      {"a", DType::kFloat32, {4}}, {"b", DType::kFloat32, {4}}, {"c", DType::kFloat32, {5}}};
  layout.pieces = {Dense(0, {{0}, {4}}), Dense(2, {{0}, {5}}, 64)};
  const auto refused = [&](std::vector<Tie> ties, const std::string& what) {
    Layout wrong = layout;
    wrong.ties = std::move(ties);
    const absl::Status status = ValidateLayout(wrong, OneRegion, true);
    CHECK(status.code() == absl::StatusCode::kInvalidArgument);
    CHECK_THAT(std::string(status.message()), Contains(what));
  };
  layout.ties = {{1, 0}};
  CHECK(ValidateLayout(layout, OneRegion, true).ok());
  refused({{1, 3}}, "tied_tensors[0] is 1 tied to 3");
  refused({{3, 1}}, "tied_tensors[0] is 3");
  refused({{1, 2}}, "tensor b: float32 [4], but tied to tensor c");
  refused({{0, 1}}, "tensor a: is tied to another tensor, and has a piece of its own");
  refused({{1, 0}, {1, 0}}, "must ascend");
  refused({{0, 1}, {1, 0}}, "which is tied itself");
}

}  // namespace
}  // namespace refitd
