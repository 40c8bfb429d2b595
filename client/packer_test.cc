#include "client/packer.h"

#include <catch2/catch.hpp>
#include <memory>
#include <string>
#include <vector>

namespace refitd::client {
namespace {

struct Fixture {
  std::shared_ptr<TensorTable> known = std::make_shared<TensorTable>();
  Packer packer{known};
  std::vector<char> memory = std::vector<char>(1024);

  int64_t Learn(const std::string& name, DType dtype, const Dims& shape) {
    const auto number = known->Learn(TensorSpec{name, dtype, shape});
    REQUIRE(number.ok());
    return *number;
  }
};

DlpackTensor Shown(DType dtype, const Dims& shape, const Dims& strides, void* data) {
  DlpackTensor shown;
  shown.data = data;
  shown.device_type = kDlpackHost;
  shown.dim_count = static_cast<int32_t>(shape.size());
  shown.type = DlpackTypeOf(dtype);
  shown.shape = shape.data();
  shown.strides = strides.data();
  return shown;
}

TEST_CASE("tensors are copied one after the other, aligned, and listed") {
  Fixture f;
  const int64_t a = f.Learn("a", DType::kFloat32, {5});
  const int64_t b = f.Learn("b", DType::kUint8, {2, 3});
  const std::string of_a(20, 'a');
  const std::string of_b(6, 'b');
  f.packer.Begin(f.memory.data(), 1024);
  REQUIRE(f.packer.Put(a, of_a.data()));
  REQUIRE(f.packer.Put(b, of_b.data()));
  f.packer.End();
  REQUIRE(f.packer.entries().size() == 2);
  CHECK(f.packer.entries()[0].offset == 0);
  CHECK(std::string(f.memory.data(), 20) == of_a);
  CHECK(std::string(f.memory.data() + 64, 6) == of_b);
  const Packer::Entry& second = f.packer.entries()[1];
  CHECK(second.tensor->spec.name == "b");
  CHECK(second.tensor->spec.dtype == DType::kUint8);
  CHECK(second.tensor->spec.shape == Dims{2, 3});
  CHECK(second.start == 0);
  CHECK(second.count == 6);
  CHECK(second.offset == 64);
  CHECK(f.packer.bytes().data() == f.memory.data());
  CHECK(f.packer.bytes().size() == 70);
}

TEST_CASE("a tensor that does not fit, or is in the bucket, is not put") {
  Fixture f;
  const int64_t a = f.Learn("a", DType::kUint8, {100});
  const int64_t b = f.Learn("b", DType::kUint8, {29});
  const std::string bytes(100, 'x');
  CHECK_FALSE(f.packer.Put(a, bytes.data()));  // there is no bucket
  f.packer.Begin(f.memory.data(), 156);
  CHECK(f.packer.RoomFor(a) == 156);
  REQUIRE(f.packer.Put(a, bytes.data()));
  CHECK(f.packer.RoomFor(a) == -1);
  CHECK_FALSE(f.packer.Put(a, bytes.data()));
  CHECK(f.packer.RoomFor(b) == 28);
  CHECK_FALSE(f.packer.Put(b, bytes.data()));
  CHECK(f.packer.count() == 1);
  f.packer.End();
  f.packer.Begin(f.memory.data(), 156);
  CHECK(f.packer.Put(a, bytes.data()));
}

TEST_CASE("a bucket that is full to its last byte has room for tensors without elements alone") {
  Fixture f;
  const int64_t a = f.Learn("a", DType::kUint8, {100});
  const int64_t empty = f.Learn("empty", DType::kUint8, {0, 7});
  const std::string bytes(100, 'x');
  f.packer.Begin(f.memory.data(), 100);
  REQUIRE(f.packer.Put(a, bytes.data()));
  CHECK(f.packer.RoomFor(empty) == 0);
  REQUIRE(f.packer.Put(empty, nullptr));
  f.packer.End();
  CHECK(f.packer.entries()[1].offset == 100);
  CHECK(f.packer.bytes().size() == 100);
}

TEST_CASE("a part is listed only when it is added, and must lie where room was reserved") {
  Fixture f;
  const int64_t a = f.Learn("a", DType::kFloat32, {100});
  f.packer.Begin(nullptr, 256);
  const auto offset = f.packer.Reserve(a, 80);
  REQUIRE(offset == 0);
  CHECK(f.packer.count() == 0);
  CHECK(f.packer.RoomFor(a) == 128);
  CHECK_FALSE(f.packer.Reserve(a, 129).has_value());
  CHECK_FALSE(f.packer.Add(a, 90, 11, 0).ok());
  CHECK_FALSE(f.packer.Add(a, -1, 1, 0).ok());
  CHECK_FALSE(f.packer.Add(a, 0, 100, 0).ok());
  CHECK_FALSE(f.packer.Add(a, 0, 20, 200).ok());
  REQUIRE(f.packer.Add(a, 80, 20, *offset).ok());
  f.packer.End();
  CHECK(f.packer.entries()[0].start == 80);
  CHECK(f.packer.entries()[0].count == 20);
}

TEST_CASE("a tensor that is learned anew leaves what is listed as it was") {
  Fixture f;
  const int64_t a = f.Learn("a", DType::kUint8, {4});
  f.packer.Begin(f.memory.data(), 256);
  REQUIRE(f.packer.Put(a, "1234"));
  CHECK(f.Learn("a", DType::kFloat32, {7, 1}) == a);
  f.packer.End();
  CHECK(f.packer.entries()[0].tensor->spec.dtype == DType::kUint8);
  CHECK(f.packer.entries()[0].tensor->spec.shape == Dims{4});
}

TEST_CASE("names are found in the order of numbers and in any other") {
  Fixture f;
  for (const char* name : {"a", "b", "c"}) f.Learn(name, DType::kUint8, {1});
  for (const char* names : {"abc", "abc", "cba", "bbb"}) {
    for (const char* at = names; *at != 0; ++at) {
      CHECK(f.known->Find(std::string_view(at, 1)) == *at - 'a');
    }
  }
  CHECK(f.known->Find("d") == -1);
  CHECK(f.known->Find("") == -1);
  CHECK_FALSE(f.known->Learn(TensorSpec{"", DType::kUint8, {1}}).ok());
  CHECK_FALSE(f.known->Learn(TensorSpec{"n", DType::kUint8, {-1}}).ok());
}

TEST_CASE("a tensor of another dtype, shape, device or of strides is not the known one") {
  Fixture f;
  char data = 0;
  const auto matches = [&](DType dtype, const Dims& known, const DlpackTensor& shown) {
    return f.known->At(f.Learn("a", dtype, known)).Matches(shown);
  };
  CHECK(matches(DType::kBFloat16, {2, 3}, Shown(DType::kBFloat16, {2, 3}, {3, 1}, &data)));
  CHECK_FALSE(matches(DType::kBFloat16, {2, 3}, Shown(DType::kFloat16, {2, 3}, {3, 1}, &data)));
  CHECK_FALSE(matches(DType::kUint8, {2, 3}, Shown(DType::kBool, {2, 3}, {3, 1}, &data)));
  CHECK_FALSE(matches(DType::kUint8, {2, 3}, Shown(DType::kInt8, {2, 3}, {3, 1}, &data)));
  CHECK_FALSE(matches(DType::kUint8, {2, 3}, Shown(DType::kUint8, {3, 2}, {2, 1}, &data)));
  CHECK_FALSE(matches(DType::kUint8, {6}, Shown(DType::kUint8, {2, 3}, {3, 1}, &data)));
  CHECK_FALSE(matches(DType::kUint8, {2, 3}, Shown(DType::kUint8, {2, 3}, {1, 2}, &data)));
  CHECK_FALSE(matches(DType::kUint8, {2, 3}, Shown(DType::kUint8, {2, 3}, {0, 1}, &data)));
  CHECK(matches(DType::kUint8, {1, 3}, Shown(DType::kUint8, {1, 3}, {99, 1}, &data)));
  CHECK(matches(DType::kUint8, {}, Shown(DType::kUint8, {}, {}, &data)));
  CHECK_FALSE(matches(DType::kUint8, {1}, Shown(DType::kUint8, {1}, {1}, nullptr)));
  CHECK(matches(DType::kUint8, {0, 3}, Shown(DType::kUint8, {0, 3}, {1, 1}, nullptr)));
  DlpackTensor on_gpu = Shown(DType::kUint8, {1}, {1}, &data);
  on_gpu.device_type = kDlpackCuda;
  CHECK_FALSE(matches(DType::kUint8, {1}, on_gpu));
}

}  // namespace
}  // namespace refitd::client
