// Checkpoint folders in the safetensors format: a strict reader.
//
// A folder holds `model.safetensors`, or `model.safetensors.index.json` and the shards it names. A
// file is an 8-byte little-endian header length, a JSON header {"NAME": {"dtype": "BF16", "shape":
// [..], "data_offsets": [BEGIN, END]}, "__metadata__": {..}} and the data; offsets count from the
// end of the header (format: https://huggingface.co/docs/safetensors).
//
// Invariants
//  - Nothing in a file is trusted (P10): the header's length has a limit and lies inside the file;
//    sizes agree with shapes; tensors lie inside the data, without overlap or hole, as the format
//    demands; names are unique in the folder; index and shards name the same tensors.
//  - Bytes are read with pread, not mapped: a file that shrinks meanwhile is an error, not SIGBUS.
//
// Threads: a Checkpoint is immutable after Open and thread-safe.
#ifndef REFITD_DAEMON_REFITCTL_SAFETENSORS_H_
#define REFITD_DAEMON_REFITCTL_SAFETENSORS_H_

#include <cstdint>
#include <map>
#include <optional>
#include <span>
#include <string>
#include <string_view>
#include <vector>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "transport/base/unique_fd.h"
#include "transport/plan/layout.h"

namespace refitd {

inline constexpr int64_t kMaxSafetensorsHeaderBytes = 100 << 20;  // the format's own limit
inline constexpr int64_t kMaxIndexBytes = 100 << 20;
inline constexpr size_t kMaxShards = 4'096;  // DeepSeek-V3 has 163

// "BF16", "F8_E4M3", ...; nullopt: a type that refitd does not carry.
std::optional<DType> DTypeOfSafetensors(std::string_view word);

// A tensor's type, shape and place in its file.
struct StoredTensor {
  TensorSpec spec;
  int64_t file_offset = 0;  // bytes, from the file's start
  int64_t bytes = 0;
};

// Parses the header of one file of `file_bytes` bytes that begins with `head` (length word and
// JSON). The tensors are ordered by file_offset. This is the pure part of the reader.
absl::StatusOr<std::vector<StoredTensor>> ParseSafetensorsHeader(std::string_view head,
                                                                 int64_t file_bytes);
// Parses an index: tensor name to shard file name.
absl::StatusOr<std::map<std::string, std::string>> ParseSafetensorsIndex(std::string_view text);

class Checkpoint {
 public:
  // NOT_FOUND: there is no checkpoint, or a shard is missing. INVALID_ARGUMENT: it is malformed.
  // Messages name file and tensor.
  static absl::StatusOr<Checkpoint> Open(const std::string& folder);

  // Ordered by shard name, then by place in the shard, so that reading in this order is sequential.
  const std::vector<TensorSpec>& tensors() const { return specs_; }
  std::optional<size_t> Find(std::string_view name) const;
  int64_t bytes() const { return bytes_; }  // of all tensors
  int64_t bytes(size_t tensor) const { return places_[tensor].bytes; }
  const std::string& folder() const { return folder_; }

  // Reads bytes [byte_offset, byte_offset + to.size()) of a tensor. INVALID_ARGUMENT: the range is
  // outside of the tensor. UNAVAILABLE or DATA_LOSS: the file failed or shrank.
  absl::Status Read(size_t tensor, int64_t byte_offset, std::span<char> to) const;

 private:
  struct Place {
    size_t file = 0;
    int64_t offset = 0;
    int64_t bytes = 0;
  };

  Checkpoint() = default;
  absl::Status AddFile(const std::string& name);

  // Constant after Open.
  std::string folder_;
  std::vector<UniqueFd> files_;
  std::vector<std::string> file_names_;
  std::vector<TensorSpec> specs_;
  std::vector<Place> places_;
  std::map<std::string, size_t, std::less<>> by_name_;
  int64_t bytes_ = 0;
};

}  // namespace refitd

#endif  // REFITD_DAEMON_REFITCTL_SAFETENSORS_H_
