// The parts of DLPack 1.x that this library reads: a tensor of host or device memory, and the table
// of functions by which a framework shows its own tensors in that form. Sizes and order of the
// fields are those of the specification, https://dmlc.github.io/dlpack/latest/c_api.html; the major
// version says that they have not changed.
#ifndef REFITD_CLIENT_DLPACK_H_
#define REFITD_CLIENT_DLPACK_H_

#include <cstddef>
#include <cstdint>

#include "transport/plan/layout.h"

namespace refitd::client {

inline constexpr uint32_t kDlpackMajor = 1;
// The minor version that brought the table of functions.
inline constexpr uint32_t kDlpackFirstMinor = 2;
inline constexpr int32_t kDlpackHost = 1;      // device type of memory that the CPU reads
inline constexpr int32_t kDlpackCuda = 2;      // of memory of a GPU
inline constexpr int32_t kDlpackCudaHost = 3;  // of pinned memory, which the CPU reads as well

inline constexpr bool ReadableByHost(int32_t device_type) {
  return device_type == kDlpackHost || device_type == kDlpackCudaHost;
}

struct DlpackType {
  uint8_t code = 0;
  uint8_t bits = 0;
  uint16_t lanes = 0;
  bool operator==(const DlpackType&) const = default;
};

struct DlpackTensor {
  void* data = nullptr;
  int32_t device_type = 0;
  int32_t device_id = 0;
  int32_t dim_count = 0;
  DlpackType type;
  const int64_t* shape = nullptr;    // elements
  const int64_t* strides = nullptr;  // elements
  uint64_t byte_offset = 0;          // from `data` to the first element
};
static_assert(sizeof(DlpackTensor) == 48 && offsetof(DlpackTensor, shape) == 24);

// The table of a framework. Its functions take a PyObject* of the framework's tensor type, with the
// interpreter lock held.
struct DlpackExchange {
  uint32_t major = 0;
  uint32_t minor = 0;
  const DlpackExchange* previous = nullptr;
  void* unused[3] = {};
  // Shows a tensor whose shape, strides and memory stay the framework's. Returns 0, or -1 with a
  // Python exception set.
  int (*show)(void* object, DlpackTensor* out) = nullptr;
};
static_assert(offsetof(DlpackExchange, show) == 40);

// Returns DLPack's description of an element type.
inline DlpackType DlpackTypeOf(DType dtype) {
  switch (dtype) {
    case DType::kFloat64:
      return {2, 64, 1};
    case DType::kFloat32:
      return {2, 32, 1};
    case DType::kFloat16:
      return {2, 16, 1};
    case DType::kBFloat16:
      return {4, 16, 1};
    case DType::kFloat8E4M3FN:
      return {10, 8, 1};
    case DType::kFloat8E5M2:
      return {12, 8, 1};
    case DType::kInt64:
      return {0, 64, 1};
    case DType::kInt32:
      return {0, 32, 1};
    case DType::kInt16:
      return {0, 16, 1};
    case DType::kInt8:
      return {0, 8, 1};
    case DType::kUint8:
      return {1, 8, 1};
    case DType::kBool:
      return {6, 8, 1};
  }
  return {};
}

}  // namespace refitd::client

#endif  // REFITD_CLIENT_DLPACK_H_
