// The row kernels, which the compiler vectorises for the instruction set of the file that includes
// this.
#ifndef REFITD_TRANSPORT_DERIVE_ROW_LOOPS_H_
#define REFITD_TRANSPORT_DERIVE_ROW_LOOPS_H_

#include <cstring>

#include "transport/derive/rows.h"

namespace refitd::derive {
namespace {

// An element as it is stored.
template <DType kDType>
struct Stored {
  using Bits = uint16_t;
};
template <>
struct Stored<DType::kFloat32> {
  using Bits = uint32_t;
};

template <DType kDType>
[[gnu::always_inline]] inline float Number(typename Stored<kDType>::Bits bits) {
  if constexpr (kDType == DType::kFloat32) return FloatOf(bits);
  if constexpr (kDType == DType::kBFloat16) return FromBFloat16(bits);
  if constexpr (kDType == DType::kFloat16) return FromFloat16(bits);
}

// Calls f with the dtype as a constant.
template <typename F>
[[gnu::always_inline]] inline auto WithDType(DType dtype, F f) {
  switch (dtype) {
    case DType::kFloat32:
      return f.template operator()<DType::kFloat32>();
    case DType::kFloat16:
      return f.template operator()<DType::kFloat16>();
    default:
      return f.template operator()<DType::kBFloat16>();
  }
}

template <DType kDType>
using Bits = typename Stored<kDType>::Bits;

template <DType kDType>
uint32_t AmaxOf(const Bits<kDType>* __restrict from, int64_t count) {
  constexpr auto kMagnitude = static_cast<Bits<kDType>>(static_cast<Bits<kDType>>(~0U) >> 1);
  Bits<kDType> amax = 0;  // magnitudes are in the order of their bits
  for (int64_t i = 0; i < count; ++i) {
    const auto magnitude = static_cast<Bits<kDType>>(from[i] & kMagnitude);
    amax = magnitude > amax ? magnitude : amax;
  }
  return BitsOf(Number<kDType>(amax));
}

template <DType kDType, bool kDivides>
void QuantiseTo(const Bits<kDType>* __restrict from, int64_t count, float factor,
                uint8_t* __restrict to) {
  for (int64_t i = 0; i < count; ++i) {
    const float number = Number<kDType>(from[i]);
    to[i] = ToE4M3(kDivides ? number / factor : number * factor);
  }
}

template <DType kFrom, DType kTo>
void CastTo(const Bits<kFrom>* __restrict from, int64_t count, Bits<kTo>* __restrict to) {
  for (int64_t i = 0; i < count; ++i) {
    const float number = Number<kFrom>(from[i]);
    if constexpr (kTo == DType::kFloat32) to[i] = BitsOf(number);
    if constexpr (kTo == DType::kBFloat16) to[i] = ToBFloat16(number);
    if constexpr (kTo == DType::kFloat16) to[i] = ToFloat16(number);
  }
}

inline uint32_t Amax(const void* row, DType dtype, int64_t count) {
  return WithDType(dtype, [&]<DType kDType>() {
    return AmaxOf<kDType>(static_cast<const Bits<kDType>*>(row), count);
  });
}

inline void Quantise(const void* row, DType dtype, int64_t count, const BlockScale& scale,
                     char* to) {
  WithDType(dtype, [&]<DType kDType>() {
    const auto* const from = static_cast<const Bits<kDType>*>(row);
    auto* const values = reinterpret_cast<uint8_t*>(to);
    return scale.divides ? QuantiseTo<kDType, true>(from, count, scale.factor, values)
                         : QuantiseTo<kDType, false>(from, count, scale.factor, values);
  });
}

inline void Cast(const void* row, DType dtype, int64_t count, DType to_dtype, char* to) {
  WithDType(dtype, [&]<DType kFrom>() {
    WithDType(to_dtype, [&]<DType kTo>() {
      CastTo<kFrom, kTo>(static_cast<const Bits<kFrom>*>(row), count,
                         reinterpret_cast<Bits<kTo>*>(to));
    });
  });
}

}  // namespace
}  // namespace refitd::derive

#endif  // REFITD_TRANSPORT_DERIVE_ROW_LOOPS_H_
