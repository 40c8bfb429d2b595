#include "tests/workloads/safetensors_writer.h"

#include <fcntl.h>
#include <unistd.h>

#include <array>
#include <cerrno>
#include <nlohmann/json.hpp>

#include "daemon/refitctl/safetensors.h"
#include "transport/base/status.h"

namespace refitd::workloads {
namespace {

using Json = nlohmann::json;

constexpr std::array<std::string_view, 12> kWords = {
    "F64", "F32", "F16", "BF16", "F8_E4M3", "F8_E5M2", "I64", "I32", "I16", "I8", "U8", "BOOL"};

absl::Status Invalid(std::string text) { return absl::InvalidArgumentError(std::move(text)); }

absl::Status WriteAll(int fd, std::span<const char> bytes, const std::string& path) {
  while (!bytes.empty()) {
    const ssize_t put = ::write(fd, bytes.data(), bytes.size());
    if (put < 0 && errno == EINTR) continue;
    if (put < 0) return ErrnoError(errno, path);
    bytes = bytes.subspan(static_cast<size_t>(put));
  }
  return absl::OkStatus();
}

}  // namespace

std::string_view SafetensorsWord(DType dtype) {
  for (const std::string_view word : kWords) {
    if (DTypeOfSafetensors(word) == dtype) return word;
  }
  REFITD_CHECK(false);
  return {};
}

absl::StatusOr<std::unique_ptr<SafetensorsWriter>> SafetensorsWriter::Create(
    const std::string& path, const std::vector<TensorSpec>& tensors) {
  Json header = Json::object();
  header["__metadata__"] = {{"format", "pt"}};
  int64_t offset = 0;
  for (const TensorSpec& tensor : tensors) {
    REFITD_RETURN_IF_ERROR(ValidateTensor(tensor));
    REFITD_ASSIGN_OR_RETURN(const int64_t elements, ElementCount(tensor.shape));
    const int64_t end = offset + elements * ElementBytes(tensor.dtype);
    if (header.contains(tensor.name)) {
      return Invalid(fmt::format("tensor '{}' comes twice", tensor.name));
    }
    header[tensor.name] = {
        {"dtype", SafetensorsWord(tensor.dtype)},
        {"shape", std::vector<int64_t>(tensor.shape.begin(), tensor.shape.end())},
        {"data_offsets", {offset, end}}};
    offset = end;
  }
  std::string text = header.dump();
  // The header is padded to a multiple of 8 bytes, so that readers that map the file find aligned
  // data.
  text.append((8 - text.size() % 8) % 8, ' ');
  const uint64_t length = text.size();
  UniqueFd fd(::open(path.c_str(), O_WRONLY | O_CREAT | O_TRUNC | O_CLOEXEC, 0644));
  if (!fd.valid()) return ErrnoError(errno, path);
  REFITD_RETURN_IF_ERROR(
      WriteAll(fd.get(), {reinterpret_cast<const char*>(&length), sizeof(length)}, path));
  REFITD_RETURN_IF_ERROR(WriteAll(fd.get(), text, path));
  return std::unique_ptr<SafetensorsWriter>(new SafetensorsWriter(path, std::move(fd), offset));
}

absl::Status SafetensorsWriter::Append(std::span<const char> bytes) {
  appended_ += static_cast<int64_t>(bytes.size());
  return WriteAll(fd_.get(), bytes, path_);
}

absl::Status SafetensorsWriter::Finish() {
  if (appended_ != data_bytes_) {
    return Error(absl::StatusCode::kFailedPrecondition, "{}: {} bytes written, tensors have {}",
                 path_, appended_, data_bytes_);
  }
  if (::close(fd_.Release()) != 0) return ErrnoError(errno, path_);
  return absl::OkStatus();
}

absl::Status WriteSafetensorsIndex(const std::string& folder,
                                   const std::map<std::string, std::string>& shard_of,
                                   int64_t total_bytes) {
  const Json index = {{"metadata", {{"total_size", total_bytes}}}, {"weight_map", shard_of}};
  const std::string path = folder + "/model.safetensors.index.json";
  UniqueFd fd(::open(path.c_str(), O_WRONLY | O_CREAT | O_TRUNC | O_CLOEXEC, 0644));
  if (!fd.valid()) return ErrnoError(errno, path);
  REFITD_RETURN_IF_ERROR(WriteAll(fd.get(), index.dump(2) + "\n", path));
  if (::close(fd.Release()) != 0) return ErrnoError(errno, path);
  return absl::OkStatus();
}

}  // namespace refitd::workloads
