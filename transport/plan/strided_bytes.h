// Whether strided storage shares bytes with other storage, or with itself: decided by arithmetic on
// the strides, not by listing addresses, so that the elements of a piece may lie apart one by one.
//
// Pure and private to transport/. Thread-safe because nothing is shared.
#ifndef REFITD_TRANSPORT_PLAN_STRIDED_BYTES_H_
#define REFITD_TRANSPORT_PLAN_STRIDED_BYTES_H_

#include <cstdint>
#include <optional>

#include "absl/container/inlined_vector.h"

namespace refitd {

// One dimension along which runs lie apart.
struct Axis {
  int64_t stride = 0;  // bytes, at least 0
  int64_t count = 0;   // at least 2
};

// `run` contiguous bytes, at `begin` plus any sum of multiples 0 to count - 1 of the axes' strides.
struct StridedBytes {
  int64_t begin = 0;                   // bytes
  int64_t end = 0;                     // end of the last run
  int64_t run = 0;                     // bytes, at least 1
  absl::InlinedVector<Axis, 4> outer;  // by descending strides

  int64_t runs() const {
    int64_t count = 1;
    for (const Axis& axis : outer) count *= axis.count;
    return count;
  }
};

// Spans up to here are decided, so that no sum overflows.
inline constexpr int64_t kMaxStridedSpan = int64_t{1} << 61;

// Whether some byte is in both. Exact. Adds the steps that it takes to `steps`, and gives up where
// they come to more than `most_steps`, or where a span is longer than kMaxStridedSpan: nullopt.
// Strides where each steps over all that lies inside it, as those of sliced and transposed tensors
// do, take a few steps for each dimension.
std::optional<bool> ShareBytes(const StridedBytes& a, const StridedBytes& b, int64_t most_steps,
                               int64_t* steps);

// Whether some byte is in several runs of `a`. Otherwise the same.
std::optional<bool> RepeatsBytes(const StridedBytes& a, int64_t most_steps, int64_t* steps);

}  // namespace refitd

#endif  // REFITD_TRANSPORT_PLAN_STRIDED_BYTES_H_
