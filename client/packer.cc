#include "client/packer.h"

#include <algorithm>
#include <cstring>
#include <utility>

#include "transport/base/errors.h"
#include "transport/base/failure.h"
#include "transport/base/status.h"

namespace refitd::client {

bool PackedTensor::Matches(const DlpackTensor& shown) const {
  if (!(shown.type == type) || !ReadableByHost(shown.device_type) ||
      shown.dim_count != static_cast<int32_t>(spec.shape.size()) ||
      (shown.data == nullptr && bytes != 0)) {
    return false;
  }
  int64_t contiguous = 1;
  for (size_t d = spec.shape.size(); d-- > 0;) {
    if (shown.shape[d] != spec.shape[d]) return false;
    // In a dimension of one element the stride says nothing; in a tensor without elements no stride
    // does.
    if (shown.shape[d] != 1 && shown.strides[d] != contiguous && bytes != 0) return false;
    contiguous *= shown.shape[d];
  }
  return true;
}

absl::StatusOr<int64_t> TensorTable::Learn(TensorSpec spec) {
  REFITD_RETURN_IF_ERROR(AboutField(ValidateTensor(spec), "tensor"));
  REFITD_ASSIGN_OR_RETURN(const int64_t elements, ElementCount(spec.shape));
  auto known = std::make_unique<PackedTensor>();
  known->elements = elements;
  known->bytes = elements * ElementBytes(spec.dtype);
  known->type = DlpackTypeOf(spec.dtype);
  known->spec = std::move(spec);
  const auto [found, inserted] =
      numbers_.try_emplace(known->spec.name, static_cast<int64_t>(tensors_.size()));
  if (inserted) {
    tensors_.push_back(std::move(known));
  } else {
    if (holders_ > 0) replaced_.push_back(std::move(tensors_[found->second]));
    tensors_[found->second] = std::move(known);
  }
  return found->second;
}

int64_t TensorTable::Find(std::string_view name) {
  // Exporters name tensors in the same order in every update, so try the tensor after the last one.
  int64_t number = next_ < static_cast<int64_t>(tensors_.size()) ? next_ : 0;
  if (tensors_.empty() || tensors_[number]->spec.name != name) {
    const auto found = numbers_.find(absl::string_view(name.data(), name.size()));
    if (found == numbers_.end()) return -1;
    number = found->second;
  }
  next_ = number + 1;
  return number;
}

void TensorTable::Release() {
  if (--holders_ == 0) replaced_.clear();
}

Packer::~Packer() {
  if (holds_) known_->Release();
}

void Packer::Begin(char* data, int64_t bytes) {
  if (holds_) known_->Release();
  known_->Hold();
  holds_ = true;
  open_ = true;
  data_ = data;
  bytes_ = bytes;
  end_ = 0;
  used_ = 0;
  ++bucket_;
  entries_.clear();
  entries_.reserve(known_->count());
}

int64_t Packer::room() const {
  if (!open_) return -1;
  return bytes_ > end_ ? bytes_ - end_ : 0;
}

int64_t Packer::RoomFor(int64_t number) const {
  if (number < static_cast<int64_t>(listed_.size()) && listed_[number] == bucket_) return -1;
  return room();
}

std::optional<int64_t> Packer::Reserve(int64_t number, int64_t bytes) {
  if (bytes > RoomFor(number)) return std::nullopt;
  const int64_t offset = end_ < bytes_ ? end_ : bytes_;  // end_ may lie beyond a full bucket
  end_ = (offset + bytes + kAlignment - 1) / kAlignment * kAlignment;
  return offset;
}

absl::Status Packer::Add(int64_t number, int64_t start, int64_t count, int64_t offset) {
  const PackedTensor* tensor = &known_->At(number);
  if (start < 0 || count < 0 || start > tensor->elements || count > tensor->elements - start) {
    return AboutTensor(InvalidField("tensor", "tensor '{}': elements from {}, {} of them, of {}",
                                    tensor->spec.name, start, count, tensor->elements),
                       tensor->spec.name);
  }
  const int64_t bytes = count * ElementBytes(tensor->spec.dtype);
  if (RoomFor(number) < 0 || offset < 0 || offset > bytes_ || bytes > bytes_ - offset) {
    return AboutTensor(
        Error(absl::StatusCode::kFailedPrecondition, "tensor '{}': {} bytes at {} are not reserved",
              tensor->spec.name, bytes, offset),
        tensor->spec.name);
  }
  if (number >= static_cast<int64_t>(listed_.size())) listed_.resize(number + 1);
  entries_.push_back({tensor, start, count, offset});
  used_ = std::max(used_, offset + bytes);
  listed_[number] = bucket_;
  return absl::OkStatus();
}

bool Packer::Put(int64_t number, const void* source) {
  if (data_ == nullptr) return false;
  const PackedTensor& tensor = known_->At(number);
  const std::optional<int64_t> offset = Reserve(number, tensor.bytes);
  if (!offset.has_value()) return false;
  if (tensor.bytes > 0) std::memcpy(data_ + *offset, source, static_cast<size_t>(tensor.bytes));
  return Add(number, 0, tensor.elements, *offset).ok();
}

}  // namespace refitd::client
