#include "daemon/refitctl/holder.h"

#include <algorithm>
#include <cstring>

#include "transport/base/status.h"

namespace refitd {
namespace {

constexpr int64_t kCompareBytes = 4 << 20;  // of a file at a time; a multiple of every element size

}  // namespace

absl::Status Holder::Store(const TensorSpec& tensor, int64_t start, int64_t count,
                           const char* data) {
  const auto found = by_name_.find(tensor.name);
  if (found == by_name_.end() || tensors_[found->second] != tensor) {
    return Error(absl::StatusCode::kInvalidArgument, "tensor '{}' as {} is not held here",
                 tensor.name, ToString(tensor.dtype, tensor.shape));
  }
  const HeldTensor& held = holding_.held[found->second];
  const int64_t element = ElementBytes(tensor.dtype);
  ForEachRun(held.strips, start, count, [&](int64_t global, int64_t local, int64_t elements) {
    std::memcpy(memory_ + held.byte_offset + local * element, data + (global - start) * element,
                static_cast<size_t>(elements * element));
  });
  return absl::OkStatus();
}

absl::Status Holder::VerifyTensor(const Checkpoint& checkpoint, size_t tensor, size_t stored,
                                  std::span<char> buffer) const {
  const TensorSpec& spec = tensors_[tensor];
  const HeldTensor& held = holding_.held[tensor];
  const int64_t element = ElementBytes(spec.dtype);
  const Strips& strips = held.strips;
  if (strips.run == 0 || strips.count == 0) return absl::OkStatus();
  const int64_t step = static_cast<int64_t>(buffer.size()) / element;
  const int64_t end = strips.first + (strips.count - 1) * strips.stride + strips.run;
  for (int64_t start = strips.first; start < end; start += step) {
    const int64_t count = std::min(step, end - start);
    const std::span<char> bytes = buffer.first(static_cast<size_t>(count * element));
    REFITD_RETURN_IF_ERROR(checkpoint.Read(stored, start * element, bytes));
    int64_t wrong = -1;
    ForEachRun(strips, start, count, [&](int64_t global, int64_t local, int64_t elements) {
      const char* mine = memory_ + held.byte_offset + local * element;
      const char* theirs = bytes.data() + (global - start) * element;
      const auto size = static_cast<size_t>(elements * element);
      if (wrong >= 0 || std::memcmp(mine, theirs, size) == 0) return;
      const char* at = std::mismatch(mine, mine + size, theirs).first;
      wrong = global + (at - mine) / element;
    });
    if (wrong >= 0) {
      return Error(absl::StatusCode::kDataLoss, "tensor '{}': element {} in memory differs from {}",
                   spec.name, wrong, checkpoint.folder());
    }
  }
  return absl::OkStatus();
}

absl::Status Holder::Verify(const Checkpoint& checkpoint) const {
  if (checkpoint.tensors().size() != tensors_.size()) {
    return Error(absl::StatusCode::kFailedPrecondition, "{} has {} tensors, held are {}",
                 checkpoint.folder(), checkpoint.tensors().size(), tensors_.size());
  }
  std::vector<char> buffer(static_cast<size_t>(kCompareBytes));
  for (size_t i = 0; i < tensors_.size(); ++i) {
    const auto stored = checkpoint.Find(tensors_[i].name);
    if (!stored || checkpoint.tensors()[*stored] != tensors_[i]) {
      return Error(absl::StatusCode::kFailedPrecondition, "{}: tensor '{}' is not there as {}",
                   checkpoint.folder(), tensors_[i].name,
                   ToString(tensors_[i].dtype, tensors_[i].shape));
    }
    REFITD_RETURN_IF_ERROR(VerifyTensor(checkpoint, i, *stored, buffer));
  }
  return absl::OkStatus();
}

}  // namespace refitd
