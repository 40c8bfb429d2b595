#include "client/c_structures.h"

#include <utility>

#include "transport/base/errors.h"

namespace refitd::client {

absl::Status Null(const char* what) { return InvalidField(what, "{} is NULL", what); }

absl::Status CheckList(const void* list, int64_t count, const char* what) {
  if (count >= 0 && (count == 0 || list != nullptr)) return absl::OkStatus();
  return InvalidField(what, "{}: {} entries{}", what, count, list == nullptr ? " at NULL" : "");
}

Dims DimsOf(const int64_t* dims, int32_t count) { return Dims(dims, dims + count); }

absl::StatusOr<TensorSpec> SpecOf(const refit_tensor& tensor) {
  if (tensor.name == nullptr) return Null("tensor.name");
  TensorSpec spec;
  spec.name = tensor.name;
  const absl::StatusOr<DType> dtype = DTypeFromProto(tensor.dtype);
  if (!dtype.ok()) return AboutField(dtype.status(), "tensor.dtype");
  spec.dtype = *dtype;
  if (tensor.dim_count < 0 || tensor.dim_count > kMaxDims ||
      (tensor.dim_count > 0 && tensor.dims == nullptr)) {
    return InvalidField("tensor.dim_count", "\"{}\": dim_count is {}{}; 0 to {} are known",
                        spec.name, tensor.dim_count, tensor.dims == nullptr ? " at NULL" : "",
                        kMaxDims);
  }
  if (tensor.dim_count > 0) spec.shape = DimsOf(tensor.dims, tensor.dim_count);
  return spec;
}

absl::StatusOr<std::vector<TensorSpec>> SpecsOf(const refit_tensor* tensors, int64_t count) {
  REFITD_RETURN_IF_ERROR(CheckList(tensors, count, "tensors"));
  std::vector<TensorSpec> specs;
  specs.reserve(static_cast<size_t>(count));
  for (int64_t i = 0; i < count; ++i) {
    REFITD_ASSIGN_OR_RETURN(TensorSpec spec, SpecOf(tensors[i]));
    specs.push_back(std::move(spec));
  }
  return specs;
}

}  // namespace refitd::client
