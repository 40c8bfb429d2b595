#include "daemon/refitctl/holder.h"

#include <catch2/catch.hpp>
#include <random>

#include "tests/workloads/safetensors_writer.h"
#include "transport/base/status.h"
#include "transport/base/temp_folder_testing.h"

namespace refitd {
namespace {

using Catch::Contains;

const std::vector<TensorSpec>& Tensors() {
  static const std::vector<TensorSpec> tensors = {{"wide", DType::kBFloat16, {6, 10}},
                                                  {"norm", DType::kFloat32, {5}},
                                                  {"scalar", DType::kInt64, {}},
                                                  {"empty", DType::kUint8, {0, 3}},
                                                  {"cube", DType::kUint8, {3, 4, 5}}};
  return tensors;
}

// A checkpoint folder of random bytes, and the same bytes by tensor.
class RandomCheckpoint {
 public:
  explicit RandomCheckpoint(uint64_t seed) {
    std::mt19937_64 random(seed);
    auto writer = workloads::SafetensorsWriter::Create(folder_ / "model.safetensors", Tensors());
    REQUIRE(writer.ok());
    for (const TensorSpec& tensor : Tensors()) {
      std::string bytes(
          static_cast<size_t>(*ElementCount(tensor.shape) * ElementBytes(tensor.dtype)), '\0');
      for (char& byte : bytes) byte = static_cast<char>(random());
      REQUIRE((*writer)->Append(bytes).ok());
      data_.push_back(std::move(bytes));
    }
    REQUIRE((*writer)->Finish().ok());
  }
  const std::string& data(size_t tensor) const { return data_[tensor]; }
  Checkpoint Open() const {
    auto checkpoint = Checkpoint::Open(folder_.path());
    REQUIRE(checkpoint.ok());
    return std::move(*checkpoint);
  }

 private:
  TempFolder folder_;
  std::vector<std::string> data_;
};

absl::Status StoreAll(Holder& holder, const RandomCheckpoint& checkpoint, int64_t step) {
  for (size_t i = 0; i < Tensors().size(); ++i) {
    const TensorSpec& tensor = Tensors()[i];
    const int64_t total = *ElementCount(tensor.shape);
    for (int64_t start = 0; start < total; start += step) {
      REFITD_RETURN_IF_ERROR(
          holder.Store(tensor, start, std::min(step, total - start),
                       checkpoint.data(i).data() + start * ElementBytes(tensor.dtype)));
    }
  }
  return absl::OkStatus();
}

TEST_CASE("a rank that stored all parts verifies, whatever the slice and the parts' size") {
  const RandomCheckpoint source(7);
  const Checkpoint checkpoint = source.Open();
  for (const int dim : {0, 1, 2}) {
    for (const int rank : {0, 1, 2, 3}) {
      for (const int64_t step : {1, 7, 1000}) {
        Holder holder(Tensors(), dim, rank, 4);
        std::vector<char> memory(static_cast<size_t>(holder.holding().memory_bytes));
        holder.SetMemory(memory.data());
        REQUIRE(StoreAll(holder, source, step).ok());
        CHECK(holder.Verify(checkpoint).ok());
      }
    }
  }
}

TEST_CASE("any single wrong byte that a rank holds is found and its tensor named") {
  const RandomCheckpoint source(8);
  const Checkpoint checkpoint = source.Open();
  Holder holder(Tensors(), 1, 1, 2);
  std::vector<char> memory(static_cast<size_t>(holder.holding().memory_bytes));
  holder.SetMemory(memory.data());
  REQUIRE(StoreAll(holder, source, 1000).ok());
  for (size_t i = 0; i < Tensors().size(); ++i) {
    const HeldTensor& held = holder.holding().held[i];
    for (int64_t at = held.byte_offset; at < held.byte_offset + held.bytes; ++at) {
      char& byte = memory[static_cast<size_t>(at)];
      byte = static_cast<char>(byte ^ 1);
      const absl::Status status = holder.Verify(checkpoint);
      REQUIRE(status.code() == absl::StatusCode::kDataLoss);
      REQUIRE_THAT(Message(status), Contains("'" + Tensors()[i].name + "'"));
      byte = static_cast<char>(byte ^ 1);
    }
  }
}

TEST_CASE("a wrong element is named by its index in the global tensor") {
  const RandomCheckpoint source(9);
  const Checkpoint checkpoint = source.Open();
  Holder holder(Tensors(), 1, 1, 2);  // columns 5 to 9 of "wide"
  std::vector<char> memory(static_cast<size_t>(holder.holding().memory_bytes));
  holder.SetMemory(memory.data());
  REQUIRE(StoreAll(holder, source, 1000).ok());
  memory[2 * (5 + 2)] = static_cast<char>(memory[2 * (5 + 2)] ^ 1);  // row 1, column 7
  CHECK_THAT(Message(holder.Verify(checkpoint)), Contains("element 17 "));
}

TEST_CASE("tensors that are not held, or held as something else, are refused") {
  Holder holder(Tensors(), std::nullopt, 0, 1);
  std::vector<char> memory(static_cast<size_t>(holder.holding().memory_bytes));
  holder.SetMemory(memory.data());
  const char byte[8] = {};
  CHECK(holder.Store({"other", DType::kUint8, {1}}, 0, 1, byte).code() ==
        absl::StatusCode::kInvalidArgument);
  CHECK(holder.Store({"norm", DType::kFloat32, {6}}, 0, 1, byte).code() ==
        absl::StatusCode::kInvalidArgument);
  CHECK(holder.Store({"norm", DType::kInt32, {5}}, 0, 1, byte).code() ==
        absl::StatusCode::kInvalidArgument);
}

TEST_CASE("a checkpoint of other tensors is refused and not compared") {
  const RandomCheckpoint source(10);
  Holder holder({{"wide", DType::kBFloat16, {6, 10}}}, std::nullopt, 0, 1);
  CHECK(holder.Verify(source.Open()).code() == absl::StatusCode::kFailedPrecondition);
}

}  // namespace
}  // namespace refitd
