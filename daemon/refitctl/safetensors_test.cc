#include "daemon/refitctl/safetensors.h"

#include <sys/stat.h>

#include <catch2/catch.hpp>
#include <fstream>

#include "tests/workloads/safetensors_writer.h"
#include "transport/base/status.h"
#include "transport/base/temp_folder_testing.h"

namespace refitd {
namespace {

using Catch::Contains;
using workloads::SafetensorsWord;
using workloads::SafetensorsWriter;
using workloads::WriteSafetensorsIndex;

std::string Head(const std::string& json) {
  const uint64_t length = json.size();
  return std::string(reinterpret_cast<const char*>(&length), sizeof(length)) + json;
}

void Put(const std::string& path, const std::string& text) {
  std::ofstream(path, std::ios::binary) << text;
}

absl::Status ParseWith(const std::string& json, int64_t data_bytes) {
  const std::string head = Head(json);
  return ParseSafetensorsHeader(head, static_cast<int64_t>(head.size()) + data_bytes).status();
}

void CheckRefused(const std::string& json, int64_t data_bytes, const std::string& message) {
  const absl::Status status = ParseWith(json, data_bytes);
  INFO(json);
  CHECK(status.code() == absl::StatusCode::kInvalidArgument);
  CHECK_THAT(Message(status), Contains(message));
}

absl::Status WriteFile(const std::string& path, const std::vector<TensorSpec>& tensors,
                       const std::string& data) {
  REFITD_ASSIGN_OR_RETURN(auto writer, SafetensorsWriter::Create(path, tensors));
  REFITD_RETURN_IF_ERROR(writer->Append(data));
  return writer->Finish();
}

TEST_CASE("every dtype has one word, read as it is written") {
  for (int value = 1; value <= 12; ++value) {
    const auto dtype = static_cast<DType>(value);
    CHECK(DTypeOfSafetensors(SafetensorsWord(dtype)) == dtype);
  }
  CHECK_FALSE(DTypeOfSafetensors("bf16").has_value());
  CHECK_FALSE(DTypeOfSafetensors("U64").has_value());
}

TEST_CASE("a header gives its tensors in the order of their bytes") {
  const std::string head = Head(R"({"__metadata__":{"format":"pt"},)"
                                R"("b":{"dtype":"BF16","shape":[2,3],"data_offsets":[4,16]},)"
                                R"("a":{"dtype":"F32","shape":[],"data_offsets":[0,4]},)"
                                R"("e":{"dtype":"F64","shape":[0,5],"data_offsets":[4,4]}}   )");
  const auto tensors = ParseSafetensorsHeader(head, static_cast<int64_t>(head.size()) + 16);
  REQUIRE(tensors.ok());
  REQUIRE(tensors->size() == 3);
  CHECK((*tensors)[0].spec == TensorSpec{"a", DType::kFloat32, {}});
  CHECK((*tensors)[1].spec == TensorSpec{"e", DType::kFloat64, {0, 5}});
  CHECK((*tensors)[2].spec == TensorSpec{"b", DType::kBFloat16, {2, 3}});
  CHECK((*tensors)[2].file_offset == static_cast<int64_t>(head.size()) + 4);
  CHECK((*tensors)[2].bytes == 12);
}

TEST_CASE("malformed headers are refused with the tensor and the value in the message") {
  CheckRefused("{", 0, "not valid JSON");
  CheckRefused("[]", 0, "not an object");
  CheckRefused(R"({"a":1})", 0, "'a'");
  CheckRefused(R"({"a":{"shape":[1],"data_offsets":[0,1]}})", 1, "no dtype");
  CheckRefused(R"({"a":{"dtype":"U64","shape":[1],"data_offsets":[0,8]}})", 8, "'U64'");
  CheckRefused(R"({"a":{"dtype":"U8","shape":[-1],"data_offsets":[0,1]}})", 1, "-1");
  CheckRefused(R"({"a":{"dtype":"U8","shape":[1.5],"data_offsets":[0,1]}})", 1, "1.5");
  CheckRefused(R"({"a":{"dtype":"U8","shape":[99999999999999999999],"data_offsets":[0,1]}})", 1,
               "shape");
  CheckRefused(R"({"a":{"dtype":"U8","shape":[1,1,1,1,1,1,1,1,1],"data_offsets":[0,1]}})", 1,
               "9 dimensions");
  CheckRefused(
      R"({"a":{"dtype":"U8","shape":[4294967296,4294967296,4294967296],"data_offsets":[0,1]}})", 1,
      "a");
  CheckRefused(R"({"a":{"dtype":"U8","shape":[1],"data_offsets":[0]}})", 1, "not a pair");
  CheckRefused(R"({"a":{"dtype":"U8","shape":[1],"data_offsets":[0,2]}})", 1, "[0,2]");
  CheckRefused(R"({"a":{"dtype":"U8","shape":[1],"data_offsets":[1,0]}})", 1, "[1,0]");
  CheckRefused(R"({"a":{"dtype":"U8","shape":[1],"data_offsets":[-1,0]}})", 1, "[-1,0]");
  CheckRefused(R"({"a":{"dtype":"BF16","shape":[2],"data_offsets":[0,2]}})", 2, "span 2");
  CheckRefused(R"({"a":{"dtype":"U8","shape":[1],"data_offsets":[0,1]},)"
               R"("a":{"dtype":"U8","shape":[1],"data_offsets":[1,2]}})",
               2, "'a' comes twice");
  CheckRefused(R"({"a":{"dtype":"U8","shape":[1],"dtype":"I8","data_offsets":[0,1]}})", 1,
               "'dtype' comes twice");
}

TEST_CASE("tensors that overlap, leave a hole or end before the file does are refused") {
  CheckRefused(R"({"a":{"dtype":"U8","shape":[2],"data_offsets":[0,2]},)"
               R"("b":{"dtype":"U8","shape":[2],"data_offsets":[1,3]}})",
               3, "'b': begins at 1, inside");
  CheckRefused(R"({"a":{"dtype":"U8","shape":[1],"data_offsets":[0,1]},)"
               R"("b":{"dtype":"U8","shape":[1],"data_offsets":[2,3]}})",
               3, "hole from 1");
  CheckRefused(R"({"a":{"dtype":"U8","shape":[1],"data_offsets":[0,1]}})", 2, "2 bytes of data");
}

TEST_CASE("deeply nested headers are refused") {
  std::string json;
  for (int i = 0; i < 100'000; ++i) json += R"({"a":)";
  json += "1";
  for (int i = 0; i < 100'000; ++i) json += "}";
  CheckRefused(json, 0, "nested");
}

TEST_CASE("header lengths beyond the file or the limit are refused before anything is allocated") {
  TempFolder folder;
  for (const uint64_t length : {uint64_t{9}, uint64_t{1} << 40, UINT64_MAX}) {
    std::string text(reinterpret_cast<const char*>(&length), sizeof(length));
    Put(folder / "model.safetensors", text + "{}");
    const absl::Status status = Checkpoint::Open(folder.path()).status();
    CHECK(status.code() == absl::StatusCode::kInvalidArgument);
    CHECK_THAT(Message(status), Contains(std::to_string(length)));
  }
  Put(folder / "model.safetensors", "short");
  CHECK(Checkpoint::Open(folder.path()).status().code() == absl::StatusCode::kInvalidArgument);
}

TEST_CASE("what was written is read back, tensor by tensor and in part") {
  TempFolder folder;
  REQUIRE(WriteFile(folder / "model.safetensors",
                    {{"x", DType::kInt16, {3}}, {"y", DType::kUint8, {4}}}, "abcdef0123")
              .ok());
  const auto checkpoint = Checkpoint::Open(folder.path());
  REQUIRE(checkpoint.ok());
  CHECK(checkpoint->bytes() == 10);
  REQUIRE(checkpoint->Find("y").has_value());
  CHECK_FALSE(checkpoint->Find("z").has_value());
  std::string out(2, ' ');
  REQUIRE(checkpoint->Read(*checkpoint->Find("y"), 1, out).ok());
  CHECK(out == "12");
  CHECK(checkpoint->Read(0, 5, out).code() == absl::StatusCode::kInvalidArgument);
  CHECK(checkpoint->Read(0, -1, out).code() == absl::StatusCode::kInvalidArgument);
}

TEST_CASE("a file that shrank after it was opened is an error and not a crash") {
  TempFolder folder;
  const std::string path = folder / "model.safetensors";
  REQUIRE(WriteFile(path, {{"x", DType::kUint8, {8}}}, "01234567").ok());
  const auto checkpoint = Checkpoint::Open(folder.path());
  REQUIRE(checkpoint.ok());
  REQUIRE(::truncate(path.c_str(), 20) == 0);
  std::string out(8, ' ');
  CHECK(checkpoint->Read(0, 0, out).code() == absl::StatusCode::kDataLoss);
}

TEST_CASE("shards are joined by their index") {
  TempFolder folder;
  REQUIRE(WriteFile(folder / "m-1.safetensors", {{"x", DType::kUint8, {2}}}, "ab").ok());
  REQUIRE(WriteFile(folder / "m-2.safetensors", {{"y", DType::kUint8, {2}}}, "cd").ok());
  REQUIRE(
      WriteSafetensorsIndex(folder.path(), {{"x", "m-1.safetensors"}, {"y", "m-2.safetensors"}}, 4)
          .ok());
  const auto checkpoint = Checkpoint::Open(folder.path());
  REQUIRE(checkpoint.ok());
  REQUIRE(checkpoint->tensors().size() == 2);
  std::string out(2, ' ');
  REQUIRE(checkpoint->Read(*checkpoint->Find("y"), 0, out).ok());
  CHECK(out == "cd");
}

TEST_CASE("an index that disagrees with its shards is refused with the name in the message") {
  TempFolder folder;
  const auto refused = [&](const std::map<std::string, std::string>& shard_of,
                           absl::StatusCode code, const std::string& message) {
    REQUIRE(WriteSafetensorsIndex(folder.path(), shard_of, 4).ok());
    const absl::Status status = Checkpoint::Open(folder.path()).status();
    CHECK(status.code() == code);
    CHECK_THAT(Message(status), Contains(message));
  };
  REQUIRE(WriteFile(folder / "a", {{"x", DType::kUint8, {2}}}, "ab").ok());
  REQUIRE(
      WriteFile(folder / "b", {{"x", DType::kUint8, {1}}, {"y", DType::kUint8, {1}}}, "cd").ok());
  const auto invalid = absl::StatusCode::kInvalidArgument;
  refused({{"x", "a"}, {"y", "b"}}, invalid, "'x' is in a already");
  refused({{"x", "a"}, {"y", "a"}}, invalid, "'y' is not in a");
  refused({{"x", "b"}}, invalid, "'y' is in b but not in the index");
  refused({{"x", "a"}, {"y", "gone"}}, absl::StatusCode::kNotFound, "gone");
  refused({{"x", "../a"}}, invalid, "../a");
  refused({{"x", ".."}}, invalid, "..");
}

TEST_CASE("a folder without a checkpoint, and a pipe in place of a file, are refused at once") {
  TempFolder folder;
  const absl::Status none = Checkpoint::Open(folder.path()).status();
  CHECK(none.code() == absl::StatusCode::kNotFound);
  CHECK_THAT(Message(none), Contains(folder.path()));
  REQUIRE(::mkfifo((folder / "model.safetensors").c_str(), 0600) == 0);
  CHECK(Checkpoint::Open(folder.path()).status().code() == absl::StatusCode::kInvalidArgument);
}

}  // namespace
}  // namespace refitd
