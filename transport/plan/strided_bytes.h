// Decides whether strided storage shares bytes with other storage, or with itself. It calculates
// with the strides instead of listing addresses, so it is fast even if all elements of a piece lie
// apart.
//
// Pure and private to transport/. Thread-safe because nothing is shared.
#ifndef REFITD_TRANSPORT_PLAN_STRIDED_BYTES_H_
#define REFITD_TRANSPORT_PLAN_STRIDED_BYTES_H_

#include <cstdint>
#include <optional>

#include "absl/container/inlined_vector.h"
#include "absl/types/span.h"

namespace refitd {

// One dimension of strided storage.
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

// The storage of a box of `extent` elements of `element_bytes` with `strides` in elements, whose
// first element is at `begin` and which spans `span_bytes`, more than 0.
StridedBytes MakeStridedBytes(int64_t begin, int64_t span_bytes, int64_t element_bytes,
                              absl::Span<const int64_t> extent, absl::Span<const int64_t> strides);

// The longest span for which the question is decided: up to this length no sum overflows.
inline constexpr int64_t kMaxStridedSpan = int64_t{1} << 61;

// Whether some byte is in both; exact. Adds its steps to `steps`, and gives up (nullopt) if `steps`
// exceeds `most_steps` or a span is longer than kMaxStridedSpan. It takes a few steps for each
// dimension if each stride is at least as long as all that the smaller strides span, as in sliced
// and transposed tensors.
std::optional<bool> ShareBytes(const StridedBytes& a, const StridedBytes& b, int64_t most_steps,
                               int64_t* steps);

// Whether some byte is in several runs of `a`. Steps and limits are as for ShareBytes.
std::optional<bool> RepeatsBytes(const StridedBytes& a, int64_t most_steps, int64_t* steps);

}  // namespace refitd

#endif  // REFITD_TRANSPORT_PLAN_STRIDED_BYTES_H_
