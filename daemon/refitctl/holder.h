// The memory of a reference engine rank: its part of every tensor, and how that compares with a
// checkpoint's files.
//
// Not thread-safe.
#ifndef REFITD_DAEMON_REFITCTL_HOLDER_H_
#define REFITD_DAEMON_REFITCTL_HOLDER_H_

#include <cstdint>
#include <span>
#include <string>
#include <vector>

#include "absl/status/status.h"
#include "daemon/refitctl/safetensors.h"
#include "daemon/refitctl/slicing.h"

namespace refitd {

class Holder {
 public:
  Holder(std::vector<TensorSpec> tensors, std::optional<int> slice_dim, int rank, int world_size)
      : tensors_(std::move(tensors)), holding_(PlanHolding(tensors_, slice_dim, rank, world_size)) {
    for (size_t i = 0; i < tensors_.size(); ++i) by_name_.emplace(tensors_[i].name, i);
  }

  const std::vector<TensorSpec>& tensors() const { return tensors_; }
  const Holding& holding() const { return holding_; }

  // The memory of the parts: holding().memory_bytes bytes, owned by the caller.
  void SetMemory(char* memory) { memory_ = memory; }

  // Copies the rank's part of elements [start, start + count) of a global tensor. INVALID_ARGUMENT:
  // the rank does not hold that tensor, or holds it with another dtype or shape.
  absl::Status Store(const TensorSpec& tensor, int64_t start, int64_t count, const char* data);

  // Compares every byte held with the checkpoint's files. DATA_LOSS names the first tensor and byte
  // that differ. FAILED_PRECONDITION: the checkpoint has other tensors.
  absl::Status Verify(const Checkpoint& checkpoint) const;

 private:
  absl::Status VerifyTensor(const Checkpoint& checkpoint, size_t tensor, size_t stored,
                            std::span<char> buffer) const;

  const std::vector<TensorSpec> tensors_;
  const Holding holding_;
  std::map<std::string, size_t, std::less<>> by_name_;
  char* memory_ = nullptr;
};

}  // namespace refitd

#endif  // REFITD_DAEMON_REFITCTL_HOLDER_H_
