// Any checkpoint: accepted tensors lie inside the file and cover its data, each byte once, and
// reading them returns exactly those bytes (P10).
//
// The first byte tells the kind of the rest: 'h' a header's JSON, to which the length word and data
// up to the tensors' largest offset are added; 'r' the unchanged start of a file; 'i' an index. In
// this way inputs are text.
#include <fcntl.h>
#include <sys/stat.h>
#include <unistd.h>

#include <algorithm>
#include <array>
#include <cctype>
#include <cstddef>
#include <cstdint>
#include <cstring>
#include <set>
#include <string>
#include <string_view>
#include <vector>

#include "daemon/refitctl/safetensors.h"
#include "transport/base/status.h"
#include "transport/base/temp_folder_testing.h"
#include "transport/base/unique_fd.h"
#include "transport/plan/layout.h"

namespace refitd {
namespace {

constexpr int64_t kMaxDataBytes = 1 << 16;  // of a file that is really written

std::string WithLength(std::string_view json) {
  const uint64_t length = json.size();
  std::string head(sizeof(length), '\0');
  std::memcpy(head.data(), &length, sizeof(length));
  return head.append(json);
}

// The largest number after "data_offsets": the length that the data must have.
int64_t LargestOffset(std::string_view json) {
  int64_t largest = 0;
  constexpr std::string_view kKey = "data_offsets";
  for (size_t at = json.find(kKey); at != std::string_view::npos; at = json.find(kKey, at + 1)) {
    int64_t number = 0;
    for (size_t i = at + kKey.size(); i < json.size() && json[i] != ']'; ++i) {
      const bool digit = std::isdigit(static_cast<unsigned char>(json[i])) != 0;
      number = digit && number < (int64_t{1} << 40) ? number * 10 + (json[i] - '0') : 0;
      largest = std::max(largest, number);
    }
  }
  return largest;
}

void CheckTensors(const std::vector<StoredTensor>& tensors, int64_t head_bytes,
                  int64_t file_bytes) {
  std::set<std::string> names;
  int64_t next = head_bytes;
  for (const StoredTensor& tensor : tensors) {
    REFITD_CHECK(ValidateTensor(tensor.spec).ok());
    REFITD_CHECK(names.insert(tensor.spec.name).second);
    REFITD_CHECK(tensor.bytes ==
                 *ElementCount(tensor.spec.shape) * ElementBytes(tensor.spec.dtype));
    REFITD_CHECK(tensor.bytes >= 0 && tensor.file_offset == next);
    next += tensor.bytes;
  }
  REFITD_CHECK(next == file_bytes);
}

// The byte at `offset` of a file's data.
char DataByte(int64_t offset) { return static_cast<char>(offset * 131 >> 3); }

// Writes the same file and opens it as a checkpoint.
void CheckOpened(const std::string& head, const std::vector<StoredTensor>& tensors,
                 int64_t file_bytes) {
  static const TempFolder folder;
  const std::string path = folder.path() + "/model.safetensors";
  std::string bytes = head;
  for (int64_t i = static_cast<int64_t>(head.size()); i < file_bytes; ++i) {
    bytes.push_back(DataByte(i));
  }
  const UniqueFd file(open(path.c_str(), O_WRONLY | O_CREAT | O_TRUNC | O_CLOEXEC, 0600));
  REFITD_CHECK(file.valid());
  REFITD_CHECK(write(file.get(), bytes.data(), bytes.size()) == static_cast<ssize_t>(bytes.size()));
  const auto checkpoint = Checkpoint::Open(folder.path());
  REFITD_CHECK(checkpoint.ok());
  REFITD_CHECK(checkpoint->tensors().size() == tensors.size());
  for (size_t i = 0; i < tensors.size(); ++i) {
    const StoredTensor& tensor = tensors[i];
    REFITD_CHECK(checkpoint->tensors()[i] == tensor.spec);
    REFITD_CHECK(checkpoint->Find(tensor.spec.name) == i);
    REFITD_CHECK(checkpoint->bytes(i) == tensor.bytes);
    std::string data(static_cast<size_t>(tensor.bytes), '\0');
    REFITD_CHECK(checkpoint->Read(i, 0, data).ok());
    REFITD_CHECK(data == bytes.substr(static_cast<size_t>(tensor.file_offset), data.size()));
    std::array<char, 1> beyond{};
    REFITD_CHECK(!checkpoint->Read(i, tensor.bytes, beyond).ok());
    REFITD_CHECK(!checkpoint->Read(i, -1, beyond).ok());
  }
}

void FuzzHeader(const std::string& head, int64_t file_bytes) {
  const auto tensors = ParseSafetensorsHeader(head, file_bytes);
  if (!tensors.ok()) {
    REFITD_CHECK(tensors.status().code() == absl::StatusCode::kInvalidArgument);
    return;
  }
  CheckTensors(*tensors, static_cast<int64_t>(head.size()), file_bytes);
  if (file_bytes - static_cast<int64_t>(head.size()) <= kMaxDataBytes) {
    CheckOpened(head, *tensors, file_bytes);
  }
}

void FuzzIndex(std::string_view text) {
  const auto shard_of = ParseSafetensorsIndex(text);
  if (!shard_of.ok()) {
    REFITD_CHECK(shard_of.status().code() == absl::StatusCode::kInvalidArgument);
    return;
  }
  std::set<std::string> shards;
  for (const auto& [name, shard] : *shard_of) {
    shards.insert(shard);
    // No shard may lie outside the folder.
    REFITD_CHECK(!shard.empty() && shard != "." && shard != "..");
    REFITD_CHECK(shard.find('/') == std::string::npos && shard.find('\0') == std::string::npos);
  }
  REFITD_CHECK(shards.size() <= kMaxShards);
}

}  // namespace
}  // namespace refitd

extern "C" int LLVMFuzzerTestOneInput(const uint8_t* data, size_t size) {
  if (size == 0) return 0;
  const std::string_view rest(reinterpret_cast<const char*>(data) + 1, size - 1);
  switch (data[0]) {
    case 'h': {
      const std::string head = refitd::WithLength(rest);
      refitd::FuzzHeader(head, static_cast<int64_t>(head.size()) + refitd::LargestOffset(rest));
      break;
    }
    case 'r':
      refitd::FuzzHeader(std::string(rest), static_cast<int64_t>(rest.size()));
      break;
    case 'i':
      refitd::FuzzIndex(rest);
      break;
    default:
      break;
  }
  return 0;
}
