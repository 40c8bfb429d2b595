// Writes checkpoint folders in the safetensors format, which daemon/refitctl/safetensors.h
// describes and reads.
//
// A writer belongs to one thread.
#ifndef REFITD_TESTS_WORKLOADS_SAFETENSORS_WRITER_H_
#define REFITD_TESTS_WORKLOADS_SAFETENSORS_WRITER_H_

#include <cstdint>
#include <map>
#include <memory>
#include <span>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "transport/base/unique_fd.h"
#include "transport/plan/layout.h"

namespace refitd::workloads {

// "BF16", "F8_E4M3", ...
std::string_view SafetensorsWord(DType dtype);

// Writes one file. The tensors' bytes are appended in the order of `tensors`.
class SafetensorsWriter {
 public:
  // Creates or truncates `path` and writes the header.
  static absl::StatusOr<std::unique_ptr<SafetensorsWriter>> Create(
      const std::string& path, const std::vector<TensorSpec>& tensors);

  absl::Status Append(std::span<const char> bytes);
  // FAILED_PRECONDITION: more or fewer bytes were appended than the tensors have.
  absl::Status Finish();

 private:
  SafetensorsWriter(std::string path, UniqueFd fd, int64_t data_bytes)
      : path_(std::move(path)), fd_(std::move(fd)), data_bytes_(data_bytes) {}

  const std::string path_;
  UniqueFd fd_;
  const int64_t data_bytes_;
  int64_t appended_ = 0;
};

// Writes model.safetensors.index.json: tensor name to shard file name.
absl::Status WriteSafetensorsIndex(const std::string& folder,
                                   const std::map<std::string, std::string>& shard_of,
                                   int64_t total_bytes);

}  // namespace refitd::workloads

#endif  // REFITD_TESTS_WORKLOADS_SAFETENSORS_WRITER_H_
