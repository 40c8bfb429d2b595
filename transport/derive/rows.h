// The loops over elements of derive.cc, for one instruction set. Private to transport/derive.
#ifndef REFITD_TRANSPORT_DERIVE_ROWS_H_
#define REFITD_TRANSPORT_DERIVE_ROWS_H_

#include <cstdint>
#include <string_view>

#include "transport/derive/arithmetic.h"
#include "transport/plan/layout.h"

namespace refitd::derive {

// `row` has `count` elements of `dtype` (float32, bfloat16 or float16), aligned to their size.
struct RowKernels {
  std::string_view name;  // "scalar", "avx2", "avx512"
  // The bits of the largest magnitude, as float32. Those of infinity and NaN are larger than those
  // of any number. 0: no element.
  uint32_t (*amax)(const void* row, DType dtype, int64_t count);
  // Writes E4M3 values. The row must be of finite numbers.
  void (*quantise)(const void* row, DType dtype, int64_t count, const BlockScale& scale, char* to);
  // Writes elements of `to_dtype`.
  void (*cast)(const void* row, DType dtype, int64_t count, DType to_dtype, char* to);
};

extern const RowKernels kScalarRows;
extern const RowKernels kAvx2Rows;
extern const RowKernels kAvx512Rows;

}  // namespace refitd::derive

#endif  // REFITD_TRANSPORT_DERIVE_ROWS_H_
