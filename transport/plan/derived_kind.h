// The kinds of derived tensors (derived.h). Plain enums, which nvcc compiles too.
#ifndef REFITD_TRANSPORT_PLAN_DERIVED_KIND_H_
#define REFITD_TRANSPORT_PLAN_DERIVED_KIND_H_

#include <cstdint>

namespace refitd {

// The arithmetic of a derived tensor, to the last bit (transport/derive/arithmetic.h has it). The
// values are those of refitd.v1.DerivedKind, which says whose code each is equal to.
enum class DerivedKind : uint8_t {
  kCast = 1,
  kFp8Block = 2,
  kFp8BlockReciprocal = 3,
  kFp8BlockPow2 = 4,
  kFp8Channel = 5,
  kFp8BlockCuda = 6,
  kFp8BlockInductor = 7,
  kMxFp8 = 8,
};

// Whether only GPUs have the arithmetic of a kind.
constexpr bool NeedsGpu(DerivedKind kind) { return kind == DerivedKind::kFp8BlockInductor; }

// What of its kind a tensor holds. The values are those of refitd.v1.DerivedRole.
enum class DerivedRole : uint8_t {
  kValues = 1,
  kScales = 2,  // a number for each block of the values
};

}  // namespace refitd

#endif  // REFITD_TRANSPORT_PLAN_DERIVED_KIND_H_
