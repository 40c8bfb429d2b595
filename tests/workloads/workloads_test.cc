#include <unistd.h>

#include <catch2/catch.hpp>

#include "daemon/refitctl/safetensors.h"
#include "tests/workloads/checkpoint_writer.h"
#include "tests/workloads/models.h"
#include "tests/workloads/safetensors_writer.h"
#include "transport/base/temp_folder_testing.h"

namespace refitd::workloads {
namespace {

TEST_CASE("the tables have as many tensors and bytes as the published models") {
  const auto small = TensorsOf(kQwen3_0_6B);
  CHECK(small.size() == 310);
  CHECK(BytesOf(small) == 596'049'920 * int64_t{2});  // parameters of two bytes
  const auto larger = TensorsOf(kQwen3_4B);
  CHECK(larger.size() == 398);
  CHECK(static_cast<double>(BytesOf(larger)) / (1 << 30) == Approx(7.49).margin(0.005));
  CHECK_FALSE(FindModel("none").ok());
}

TEST_CASE("weights are finite, follow from the seed, and differ nearly everywhere between seeds") {
  std::vector<uint16_t> a(100'003);
  std::vector<uint16_t> b(a.size());
  const auto fill = [](uint64_t seed, uint64_t tensor, std::vector<uint16_t>& values) {
    FillBFloat16(seed, tensor, 0, {reinterpret_cast<char*>(values.data()), values.size() * 2});
  };
  fill(1, 5, a);
  fill(1, 5, b);
  CHECK(a == b);
  for (const uint16_t value : a) REQUIRE((value & 0x7f80) < 0x7f80 / 2 + 0x80);
  for (const auto& [seed, tensor] : {std::pair<uint64_t, uint64_t>{2, 5}, {1, 6}}) {
    fill(seed, tensor, b);
    size_t equal = 0;
    for (size_t i = 0; i < a.size(); ++i) equal += a[i] == b[i] ? 1 : 0;
    CHECK(equal < 50);
  }
}

TEST_CASE("a tensor filled in parts is the same as one filled at once") {
  std::vector<char> whole(1000);
  std::vector<char> parts(1000);
  FillBFloat16(3, 1, 0, whole);
  FillBFloat16(3, 1, 0, std::span(parts).first(408));
  FillBFloat16(3, 1, 408, std::span(parts).subspan(408));
  CHECK(whole == parts);
}

TEST_CASE("written checkpoints are read back with the model's tensors, in one file or several") {
  const TempFolder folder;
  for (const int shards : {1, 3}) {
    const std::string path = folder / std::to_string(shards);
    REQUIRE(WriteModelCheckpoint(kTiny, 4, path, shards).ok());
    const auto checkpoint = Checkpoint::Open(path);
    REQUIRE(checkpoint.ok());
    const auto tensors = TensorsOf(kTiny);
    CHECK(checkpoint->tensors() == tensors);
    CHECK(checkpoint->bytes() == BytesOf(tensors));
    std::vector<char> stored(static_cast<size_t>(checkpoint->bytes(7)));
    std::vector<char> expected(stored.size());
    REQUIRE(checkpoint->Read(7, 0, stored).ok());
    FillBFloat16(4, 7, 0, expected);
    CHECK(stored == expected);
  }
}

TEST_CASE("a writer that got too few bytes does not finish") {
  TempFolder folder;
  auto writer = SafetensorsWriter::Create(folder / "m", {{"x", DType::kUint8, {2}}});
  REQUIRE(writer.ok());
  REQUIRE((*writer)->Append(std::string("a")).ok());
  CHECK((*writer)->Finish().code() == absl::StatusCode::kFailedPrecondition);
  CHECK(SafetensorsWriter::Create(folder / "n",
                                  {{"x", DType::kUint8, {2}}, {"x", DType::kUint8, {2}}})
            .status()
            .code() == absl::StatusCode::kInvalidArgument);
}

}  // namespace
}  // namespace refitd::workloads
