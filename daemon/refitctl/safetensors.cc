#include "daemon/refitctl/safetensors.h"

#include <fcntl.h>
#include <sys/stat.h>
#include <unistd.h>

#include <algorithm>
#include <array>
#include <bit>
#include <cerrno>
#include <cstring>
#include <nlohmann/json.hpp>
#include <set>
#include <utility>

#include "transport/base/status.h"

namespace refitd {
namespace {

// ErrnoError about a file. Its UNAVAILABLE is for daemons that do not answer, which is another exit
// code of refitctl.
absl::Status FileError(int error, const std::string& path) {
  const absl::Status status = ErrnoError(error, path);
  return absl::IsUnavailable(status) ? absl::FailedPreconditionError(status.message()) : status;
}

using Json = nlohmann::json;

constexpr char kSingleFile[] = "model.safetensors";
constexpr char kIndexFile[] = "model.safetensors.index.json";
constexpr int64_t kLengthBytes = 8;
constexpr int kMaxJsonDepth = 8;  // the format needs 3

struct DTypeWord {
  DType dtype;
  std::string_view word;
};
constexpr std::array<DTypeWord, 12> kWords = {{
    {DType::kFloat64, "F64"},
    {DType::kFloat32, "F32"},
    {DType::kFloat16, "F16"},
    {DType::kBFloat16, "BF16"},
    {DType::kFloat8E4M3FN, "F8_E4M3"},
    {DType::kFloat8E5M2, "F8_E5M2"},
    {DType::kInt64, "I64"},
    {DType::kInt32, "I32"},
    {DType::kInt16, "I16"},
    {DType::kInt8, "I8"},
    {DType::kUint8, "U8"},
    {DType::kBool, "BOOL"},
}};

absl::Status Invalid(std::string text) { return absl::InvalidArgumentError(std::move(text)); }

// Parses text whose objects must not repeat a key; the parser alone would silently keep the last.
absl::StatusOr<Json> ParseObject(std::string_view text) {
  std::vector<std::set<std::string>> keys;  // of the open objects
  std::optional<std::string> repeated;
  bool deep = false;
  const auto on_event = [&](int depth, Json::parse_event_t event, Json& parsed) {
    if (event == Json::parse_event_t::object_start) {
      if (depth >= kMaxJsonDepth) {
        deep = true;
        return false;
      }
      keys.emplace_back();
    }
    if (event == Json::parse_event_t::object_end) keys.pop_back();
    if (event == Json::parse_event_t::key && depth <= kMaxJsonDepth &&
        !keys.back().insert(parsed.get_ref<const std::string&>()).second) {
      repeated = parsed.get_ref<const std::string&>();
    }
    return true;
  };
  Json json = Json::parse(text.begin(), text.end(), on_event, /*allow_exceptions=*/false);
  if (deep) return Invalid(fmt::format("JSON nested deeper than {}", kMaxJsonDepth));
  if (json.is_discarded()) return Invalid("not valid JSON");
  if (!json.is_object()) return Invalid("JSON is not an object");
  if (repeated) return Invalid(fmt::format("key '{}' comes twice", *repeated));
  return json;
}

// The number, if it is an integer from 0 that fits int64.
std::optional<int64_t> AsCount(const Json& json) {
  if (!json.is_number_integer()) return std::nullopt;
  if (json.is_number_unsigned()) {
    const uint64_t value = json.get<uint64_t>();
    if (value > static_cast<uint64_t>(INT64_MAX)) return std::nullopt;
    return static_cast<int64_t>(value);
  }
  const int64_t value = json.get<int64_t>();
  if (value < 0) return std::nullopt;
  return value;
}

absl::StatusOr<TensorSpec> ParseSpec(const std::string& name, const Json& entry) {
  const auto dtype = entry.find("dtype");
  const auto shape = entry.find("shape");
  if (dtype == entry.end() || !dtype->is_string()) {
    return Invalid(fmt::format("tensor '{}': no dtype", name));
  }
  if (shape == entry.end() || !shape->is_array()) {
    return Invalid(fmt::format("tensor '{}': no shape", name));
  }
  const auto parsed = DTypeOfSafetensors(dtype->get_ref<const std::string&>());
  if (!parsed) {
    return Invalid(fmt::format("tensor '{}': dtype '{}' is not supported", name,
                               dtype->get_ref<const std::string&>()));
  }
  TensorSpec spec{name, *parsed, {}};
  if (shape->size() > static_cast<size_t>(kMaxDims)) {
    return Invalid(
        fmt::format("tensor '{}': {} dimensions, at most {}", name, shape->size(), kMaxDims));
  }
  for (const Json& dim : *shape) {
    const auto count = AsCount(dim);
    if (!count) return Invalid(fmt::format("tensor '{}': shape has {}", name, dim.dump()));
    spec.shape.push_back(*count);
  }
  REFITD_RETURN_IF_ERROR(ValidateTensor(spec));
  return spec;
}

absl::StatusOr<StoredTensor> ParseEntry(const std::string& name, const Json& entry,
                                        int64_t data_bytes) {
  if (!entry.is_object()) return Invalid(fmt::format("tensor '{}': not an object", name));
  StoredTensor stored;
  REFITD_ASSIGN_OR_RETURN(stored.spec, ParseSpec(name, entry));
  const auto offsets = entry.find("data_offsets");
  if (offsets == entry.end() || !offsets->is_array() || offsets->size() != 2) {
    return Invalid(fmt::format("tensor '{}': data_offsets is not a pair", name));
  }
  const auto begin = AsCount((*offsets)[0]);
  const auto end = AsCount((*offsets)[1]);
  if (!begin || !end || *begin > *end || *end > data_bytes) {
    return Invalid(fmt::format("tensor '{}': data_offsets {} outside the file's {} bytes of data",
                               name, offsets->dump(), data_bytes));
  }
  REFITD_ASSIGN_OR_RETURN(const int64_t elements, ElementCount(stored.spec.shape));
  stored.bytes = elements * ElementBytes(stored.spec.dtype);
  if (stored.bytes != *end - *begin) {
    return Invalid(fmt::format("tensor '{}': {} has {} bytes, but data_offsets {} span {}", name,
                               ToString(stored.spec.dtype, stored.spec.shape), stored.bytes,
                               offsets->dump(), *end - *begin));
  }
  stored.file_offset = *begin;
  return stored;
}

// OK: the data is covered from start to end, each byte by one tensor.
absl::Status CheckCover(const std::vector<StoredTensor>& tensors, int64_t data_bytes) {
  int64_t covered = 0;
  for (const StoredTensor& tensor : tensors) {
    if (tensor.file_offset < covered) {
      return Invalid(fmt::format("tensor '{}': begins at {}, inside the tensor before it",
                                 tensor.spec.name, tensor.file_offset));
    }
    if (tensor.file_offset > covered) {
      return Invalid(fmt::format("tensor '{}': begins at {}, leaving a hole from {}",
                                 tensor.spec.name, tensor.file_offset, covered));
    }
    covered += tensor.bytes;
  }
  if (covered == data_bytes) return absl::OkStatus();
  return Invalid(fmt::format("{} bytes of data, but the tensors have {}", data_bytes, covered));
}

struct OpenFile {
  UniqueFd fd;
  int64_t bytes = 0;
};

absl::StatusOr<OpenFile> OpenRegular(const std::string& path) {
  // O_NONBLOCK: a named pipe in the folder must not hang the open.
  UniqueFd fd(::open(path.c_str(), O_RDONLY | O_CLOEXEC | O_NONBLOCK));
  if (!fd.valid()) return FileError(errno, path);
  struct stat info;
  if (::fstat(fd.get(), &info) != 0) return FileError(errno, path);
  if (!S_ISREG(info.st_mode)) return Invalid(fmt::format("{}: not a regular file", path));
  return OpenFile{std::move(fd), info.st_size};
}

absl::Status ReadAt(int fd, int64_t offset, std::span<char> to, const std::string& path) {
  while (!to.empty()) {
    const ssize_t got = ::pread(fd, to.data(), to.size(), offset);
    if (got < 0 && errno == EINTR) continue;
    if (got < 0) return FileError(errno, path);
    if (got == 0) {
      return Error(absl::StatusCode::kDataLoss, "{}: ends at byte {}, it was longer when opened",
                   path, offset);
    }
    to = to.subspan(static_cast<size_t>(got));
    offset += got;
  }
  return absl::OkStatus();
}

// The file's first bytes: length word and JSON.
absl::StatusOr<std::string> ReadHead(const OpenFile& file, const std::string& path) {
  if (file.bytes < kLengthBytes) {
    return Invalid(fmt::format("{}: {} bytes are no safetensors file", path, file.bytes));
  }
  uint64_t length = 0;
  REFITD_RETURN_IF_ERROR(
      ReadAt(file.fd.get(), 0, {reinterpret_cast<char*>(&length), sizeof(length)}, path));
  const auto available = static_cast<uint64_t>(file.bytes - kLengthBytes);
  if (length > available || length > static_cast<uint64_t>(kMaxSafetensorsHeaderBytes)) {
    return Invalid(fmt::format("{}: header length {} (the file has {} bytes, the limit is {})",
                               path, length, file.bytes, kMaxSafetensorsHeaderBytes));
  }
  std::string head(static_cast<size_t>(length) + kLengthBytes, '\0');
  REFITD_RETURN_IF_ERROR(ReadAt(file.fd.get(), 0, head, path));
  return head;
}

absl::StatusOr<std::string> ReadText(const std::string& path, int64_t limit) {
  REFITD_ASSIGN_OR_RETURN(const OpenFile file, OpenRegular(path));
  if (file.bytes > limit) {
    return Invalid(fmt::format("{}: {} bytes, at most {}", path, file.bytes, limit));
  }
  std::string text(static_cast<size_t>(file.bytes), '\0');
  REFITD_RETURN_IF_ERROR(ReadAt(file.fd.get(), 0, text, path));
  return text;
}

bool Exists(const std::string& path) { return ::access(path.c_str(), F_OK) == 0; }

absl::Status Prefixed(const std::string& path, const absl::Status& status) {
  return absl::Status(status.code(), fmt::format("{}: {}", path, Message(status)));
}

bool IsPlainFileName(std::string_view name) {
  return !name.empty() && name != "." && name != ".." && name.size() <= 255 &&
         name.find('/') == std::string_view::npos && name.find('\0') == std::string_view::npos;
}

}  // namespace

std::optional<DType> DTypeOfSafetensors(std::string_view word) {
  for (const DTypeWord& entry : kWords) {
    if (entry.word == word) return entry.dtype;
  }
  return std::nullopt;
}

absl::StatusOr<std::vector<StoredTensor>> ParseSafetensorsHeader(std::string_view head,
                                                                 int64_t file_bytes) {
  static_assert(std::endian::native == std::endian::little);
  if (head.size() < kLengthBytes) return Invalid("no room for the header's length");
  uint64_t length = 0;
  std::memcpy(&length, head.data(), sizeof(length));
  if (length != head.size() - kLengthBytes || file_bytes < static_cast<int64_t>(head.size())) {
    return Invalid(fmt::format("header length {} in a file of {} bytes", length, file_bytes));
  }
  const int64_t data_bytes = file_bytes - static_cast<int64_t>(head.size());
  auto json = ParseObject(head.substr(kLengthBytes));
  if (!json.ok()) return Prefixed("header", json.status());
  std::vector<StoredTensor> tensors;
  tensors.reserve(json->size());
  for (const auto& [name, entry] : json->items()) {
    if (name == "__metadata__") continue;
    if (tensors.size() == static_cast<size_t>(kMaxTensorsPerLayout)) {
      return Invalid(fmt::format("more than {} tensors", kMaxTensorsPerLayout));
    }
    REFITD_ASSIGN_OR_RETURN(StoredTensor stored, ParseEntry(name, entry, data_bytes));
    tensors.push_back(std::move(stored));
  }
  // An empty tensor shares its offset with the tensor after it, and must come first.
  std::sort(tensors.begin(), tensors.end(), [](const StoredTensor& a, const StoredTensor& b) {
    return std::tie(a.file_offset, a.bytes, a.spec.name) <
           std::tie(b.file_offset, b.bytes, b.spec.name);
  });
  REFITD_RETURN_IF_ERROR(CheckCover(tensors, data_bytes));
  for (StoredTensor& tensor : tensors) tensor.file_offset += static_cast<int64_t>(head.size());
  return tensors;
}

absl::StatusOr<std::map<std::string, std::string>> ParseSafetensorsIndex(std::string_view text) {
  REFITD_ASSIGN_OR_RETURN(const Json json, ParseObject(text));
  const auto weight_map = json.find("weight_map");
  if (weight_map == json.end() || !weight_map->is_object()) return Invalid("no weight_map");
  if (weight_map->size() > static_cast<size_t>(kMaxTensorsPerLayout)) {
    return Invalid(fmt::format("more than {} tensors", kMaxTensorsPerLayout));
  }
  std::map<std::string, std::string> shard_of;
  std::set<std::string> shards;
  for (const auto& [name, shard] : weight_map->items()) {
    if (!shard.is_string() || !IsPlainFileName(shard.get_ref<const std::string&>())) {
      return Invalid(fmt::format("tensor '{}': shard {} is not a file name", name, shard.dump()));
    }
    const auto& file = shard.get_ref<const std::string&>();
    shards.insert(file);
    shard_of.emplace(name, file);
  }
  if (shards.size() > kMaxShards) return Invalid(fmt::format("more than {} shards", kMaxShards));
  return shard_of;
}

absl::Status Checkpoint::AddFile(const std::string& name) {
  const std::string path = fmt::format("{}/{}", folder_, name);
  REFITD_ASSIGN_OR_RETURN(OpenFile file, OpenRegular(path));
  REFITD_ASSIGN_OR_RETURN(const std::string head, ReadHead(file, path));
  auto tensors = ParseSafetensorsHeader(head, file.bytes);
  if (!tensors.ok()) return Prefixed(path, tensors.status());
  for (StoredTensor& tensor : *tensors) {
    const auto [at, added] = by_name_.emplace(tensor.spec.name, specs_.size());
    if (!added) {
      return Invalid(fmt::format("{}: tensor '{}' is in {} already", path, tensor.spec.name,
                                 file_names_[places_[at->second].file]));
    }
    places_.push_back({files_.size(), tensor.file_offset, tensor.bytes});
    bytes_ += tensor.bytes;
    specs_.push_back(std::move(tensor.spec));
  }
  files_.push_back(std::move(file.fd));
  file_names_.push_back(name);
  return absl::OkStatus();
}

absl::StatusOr<Checkpoint> Checkpoint::Open(const std::string& folder) {
  Checkpoint checkpoint;
  checkpoint.folder_ = folder;
  if (Exists(fmt::format("{}/{}", folder, kSingleFile))) {
    REFITD_RETURN_IF_ERROR(checkpoint.AddFile(kSingleFile));
    return checkpoint;
  }
  const std::string index_path = fmt::format("{}/{}", folder, kIndexFile);
  if (!Exists(index_path)) {
    return Error(absl::StatusCode::kNotFound, "{}: neither {} nor {} there", folder, kSingleFile,
                 kIndexFile);
  }
  REFITD_ASSIGN_OR_RETURN(const std::string text, ReadText(index_path, kMaxIndexBytes));
  auto shard_of = ParseSafetensorsIndex(text);
  if (!shard_of.ok()) return Prefixed(index_path, shard_of.status());
  std::set<std::string> shards;
  for (const auto& [name, shard] : *shard_of) shards.insert(shard);
  for (const std::string& shard : shards) REFITD_RETURN_IF_ERROR(checkpoint.AddFile(shard));
  for (const auto& [name, shard] : *shard_of) {
    const auto found = checkpoint.Find(name);
    if (!found || checkpoint.file_names_[checkpoint.places_[*found].file] != shard) {
      return Invalid(fmt::format("{}: tensor '{}' is not in {}", index_path, name, shard));
    }
  }
  for (const TensorSpec& spec : checkpoint.specs_) {
    if (shard_of->count(spec.name) == 0) {
      return Invalid(fmt::format(
          "{}: tensor '{}' is in {} but not in the index", index_path, spec.name,
          checkpoint.file_names_[checkpoint.places_[*checkpoint.Find(spec.name)].file]));
    }
  }
  return checkpoint;
}

std::optional<size_t> Checkpoint::Find(std::string_view name) const {
  const auto found = by_name_.find(name);
  if (found == by_name_.end()) return std::nullopt;
  return found->second;
}

absl::Status Checkpoint::Read(size_t tensor, int64_t byte_offset, std::span<char> to) const {
  const Place& place = places_[tensor];
  const auto bytes = static_cast<int64_t>(to.size());
  if (byte_offset < 0 || bytes > place.bytes || byte_offset > place.bytes - bytes) {
    return Invalid(fmt::format("tensor '{}': bytes {}+{} of {}", specs_[tensor].name, byte_offset,
                               bytes, place.bytes));
  }
  return ReadAt(files_[place.file].get(), place.offset + byte_offset, to,
                fmt::format("{}/{}", folder_, file_names_[place.file]));
}

}  // namespace refitd
