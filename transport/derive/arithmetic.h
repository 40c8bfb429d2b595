// The arithmetic of derived tensors, bit for bit: the same code for the host and for GPUs. The
// results are those of the code that is named at each kind, as PyTorch 2.11 to 2.15 runs it:
// float32 throughout, each operation rounded to nearest, ties to even.
//
// No product here is added to anything but in Quotient, so there is nothing for a compiler to fuse.
// Denormal numbers must not be flushed.
#ifndef REFITD_TRANSPORT_DERIVE_ARITHMETIC_H_
#define REFITD_TRANSPORT_DERIVE_ARITHMETIC_H_

#include <cstdint>

#include "transport/plan/derived_kind.h"

// What every function here is declared with. Who compiles this for a device defines it before.
#if !defined(REFITD_DERIVE_CODE)
// `static`, so that files that are compiled for different instruction sets don't share the code.
#define REFITD_DERIVE_CODE [[gnu::always_inline]] static inline
#endif

namespace refitd::derive {

REFITD_DERIVE_CODE float FloatOf(uint32_t bits) { return __builtin_bit_cast(float, bits); }
REFITD_DERIVE_CODE uint32_t BitsOf(float x) { return __builtin_bit_cast(uint32_t, x); }

// ---- to float32, exact ----

REFITD_DERIVE_CODE float FromBFloat16(uint16_t x) { return FloatOf(uint32_t{x} << 16); }

REFITD_DERIVE_CODE float FromFloat16(uint16_t x) {
  const uint32_t sign = static_cast<uint32_t>(x & 0x8000) << 16;
  const uint32_t rest = static_cast<uint32_t>(x & 0x7fff) << 13;
  // Numbers, denormal ones too, lack 112 in the exponent; infinities and NaN take the largest one.
  const uint32_t number = BitsOf(FloatOf(rest) * 0x1p112F);
  const uint32_t special = rest | 0x7f800000;
  return FloatOf(sign | ((x & 0x7c00) == 0x7c00 ? special : number));
}

// ---- from float32, to nearest, ties to even ----

// NaN becomes 0x7fc0. Torch's NaN differ by device and by the CPU's instructions.
REFITD_DERIVE_CODE uint16_t ToBFloat16(float x) {
  const uint32_t bits = BitsOf(x);
  const uint32_t rounded = (bits + 0x7fff + (bits >> 16 & 1)) >> 16;
  return static_cast<uint16_t>((bits & 0x7fffffff) > 0x7f800000 ? 0x7fc0 : rounded);
}

// From 65,520 on the result is infinite. NaN keeps its sign and becomes 0x7e00 or 0xfe00.
REFITD_DERIVE_CODE uint16_t ToFloat16(float x) {
  const uint32_t bits = BitsOf(x);
  const uint32_t sign = bits >> 16 & 0x8000;
  const uint32_t rest = bits & 0x7fffffff;
  // Below 2^-14: 0.5 has the unit in which denormal numbers count, 2^-24, as its last bit.
  const uint32_t small = BitsOf(FloatOf(rest) + 0.5F) - BitsOf(0.5F);
  const uint32_t normal = (rest + 0xfff + (rest >> 13 & 1) - (112U << 23)) >> 13;
  uint32_t value = rest < 0x38800000 ? small : normal;
  value = rest >= 0x477ff000 ? 0x7c00 : value;
  value = rest > 0x7f800000 ? 0x7e00 : value;
  return static_cast<uint16_t>(sign | value);
}

// The largest number of E4M3: 0x7e.
inline constexpr float kE4M3Max = 448.0F;

// E4M3 without infinities (float8_e4m3fn). Larger magnitudes become kE4M3Max; `x` must not be NaN.
REFITD_DERIVE_CODE uint8_t ToE4M3(float x) {
  const uint32_t bits = BitsOf(x);
  const uint32_t most = BitsOf(kE4M3Max);
  const uint32_t magnitude = bits & 0x7fffffff;
  const uint32_t rest = magnitude < most ? magnitude : most;
  // Below 2^-6: 16,384 has the unit in which denormal numbers count, 2^-9, as its last bit.
  const uint32_t small = BitsOf(FloatOf(rest) + 16384.0F) - BitsOf(16384.0F);
  const uint32_t normal = (rest + 0x7ffff + (rest >> 20 & 1) - (120U << 23)) >> 20;
  const uint32_t value = rest < 0x3c800000 ? small : normal;
  return static_cast<uint8_t>((bits >> 24 & 0x80) | value);
}

// ---- scales ----

// What a block is quantised by: its values are ToE4M3 of `x * factor`, or of `x / factor`.
struct BlockScale {
  float
      stored;  // the block's element of the tensor of scales, or 2 to the power that it stands for
  float factor;
  bool divides;
};

// The bits of a block's element of the tensor of scales: a float32, or an exponent in a byte.
REFITD_DERIVE_CODE uint32_t StoredBits(DerivedKind kind, const BlockScale& scale) {
  return kind == DerivedKind::kMxFp8 ? BitsOf(scale.stored) >> 23 : BitsOf(scale.stored);
}

// 1 / x as the GPU's instruction has it, which is not the nearest number for 13% of all x.
REFITD_DERIVE_CODE float ApproximateReciprocal(float x) {
#if defined(__CUDA_ARCH__)
  float reciprocal;
  asm("rcp.approx.f32 %0, %1;" : "=f"(reciprocal) : "f"(x));
  return reciprocal;
#else
  return 1.0F / x;  // Only tests on fake GPUs come here: hosts refuse the kind (NeedsGpu).
#endif
}

// ceil(log2(x)), where the logarithm is rounded to float32 before it is rounded up. x > 0.
REFITD_DERIVE_CODE int CeilOfLog2(float x) {
  const bool denormal = BitsOf(x) < 0x00800000;
  const uint32_t bits = BitsOf(denormal ? x * 0x1p32F : x);
  const int exponent = static_cast<int>(bits >> 23) - (denormal ? 127 + 32 : 127);
  const uint32_t mantissa = bits & 0x7fffff;
  // Above a power of two the logarithm rounds down to the exponent, as long as log2(1 + mantissa /
  // 2^23) is less than half of the distance to the next float32.
  uint32_t most = 0;
  const int magnitude = exponent < 0 ? -exponent : exponent;
  if (magnitude > 1) {
    int power = 31 - __builtin_clz(static_cast<unsigned>(magnitude));
    if (exponent < 0 && magnitude == 1 << power) --power;  // floats are closer below a power of two
    if (power > 0) most = static_cast<uint32_t>(0.69314718F * static_cast<float>(1 << (power - 1)));
  }
  return mantissa > most ? exponent + 1 : exponent;
}

// 2^(biased - 127); 0 <= biased <= 254.
REFITD_DERIVE_CODE float PowerOfTwo(int biased) {
  return FloatOf(biased == 0 ? 0x00400000 : static_cast<uint32_t>(biased) << 23);
}

// The scale of a block whose largest magnitude is `amax`, which must be finite.
REFITD_DERIVE_CODE BlockScale ScaleOf(DerivedKind kind, float amax) {
  // Torch on CUDA multiplies a tensor by this number where Python code divides it by 448.
  constexpr float kPerMax = 1.0F / kE4M3Max;
  const float at_least = amax < 1e-4F ? 1e-4F : amax;
  BlockScale scale = {1.0F, 1.0F, false};
  switch (kind) {
    case DerivedKind::kFp8Block:
      // vLLM 0.32, vllm/utils/deep_gemm.py, per_block_cast_to_fp8 without use_ue8m0, on a CPU.
      scale.stored = at_least / kE4M3Max;
      scale.factor = 1.0F / scale.stored;
      break;
    case DerivedKind::kFp8BlockCuda:
      // The same on CUDA, not compiled; DeepGEMM, deep_gemm/utils/math.py.
      scale.stored = at_least * kPerMax;
      scale.factor = 1.0F / scale.stored;
      break;
    case DerivedKind::kFp8BlockInductor:
      // The same on CUDA, compiled by Inductor.
      scale.stored = at_least * kPerMax;
      scale.factor = ApproximateReciprocal(scale.stored);
      break;
    case DerivedKind::kFp8BlockReciprocal:
      // NeMo-RL, nemo_rl/models/generation/vllm/quantization/fp8.py, cast_tensor_to_fp8_blockwise.
      // Torch computes 448 / amax as a product with the reciprocal.
      scale.factor = amax == 0 ? 1.0F : 1.0F / amax * kE4M3Max;
      scale.stored = 1.0F / scale.factor;
      break;
    case DerivedKind::kFp8BlockPow2: {
      // The same with use_weight_pow2_scale, on CUDA.
      const float ratio = amax * kPerMax;
      const int exponent = ratio == 0 ? -127 : CeilOfLog2(ratio);
      if (exponent <= -127) break;
      scale.stored = PowerOfTwo(exponent + 127);
      scale.factor = PowerOfTwo(127 - exponent);
      break;
    }
    case DerivedKind::kMxFp8: {
      // vLLM 0.32, vllm/model_executor/layers/quantization/utils/mxfp8_utils.py,
      // _mxfp8_e4m3_quantize_torch, on CUDA.
      const int exponent = CeilOfLog2((amax < 0x1p-126F ? 0x1p-126F : amax) * kPerMax);
      const int biased = exponent < -127 ? 0 : exponent + 127;
      scale.stored = PowerOfTwo(biased);
      scale.factor = PowerOfTwo(254 - biased);
      break;
    }
    case DerivedKind::kFp8Channel: {
      // vLLM 0.32, vllm/model_executor/layers/quantization/online/fp8.py, _fp8_channel_scale and
      // _fp8_quant_per_channel.
      constexpr float kLeast = 1.0F / (kE4M3Max * 512);
      scale.stored = amax / kE4M3Max;
      scale.stored = scale.stored < kLeast ? kLeast : scale.stored;
      scale.factor = scale.stored;
      scale.divides = true;
      break;
    }
    case DerivedKind::kCast:
      break;
  }
  return scale;
}

// x / y, rounded to nearest; results below 2^-11 may be wrong in their last bit, and E4M3 makes
// zeros of them. `y`: at least 2^-20; `reciprocal`: 1 / y. This takes a third of a division's
// instructions: by Markstein's theorem one step with an exact remainder gives the nearest number.
REFITD_DERIVE_CODE float Quotient(float x, float y, float reciprocal) {
  const float near = x * reciprocal;
  const float remainder = __builtin_fmaf(-near, y, x);
  const float quotient = __builtin_fmaf(remainder, reciprocal, near);
  // A zero has the sign of x, which the step above loses.
  return FloatOf(BitsOf(quotient) | (BitsOf(x) & 0x80000000));
}

// Finds the scale of a block; `amax`: the bits of its largest magnitude. False: the kind has no
// result for the block, which has an infinity, NaN, or numbers too small for a finite factor.
REFITD_DERIVE_CODE bool FindScale(DerivedKind kind, uint32_t amax, BlockScale* scale) {
  constexpr uint32_t kInfinity = 0x7f800000;
  *scale = {1.0F, 1.0F, false};
  if (kind == DerivedKind::kCast) return true;
  if (amax >= kInfinity) return false;
  *scale = ScaleOf(kind, FloatOf(amax));
  return (BitsOf(scale->factor) & 0x7fffffff) < kInfinity;
}

}  // namespace refitd::derive

#endif  // REFITD_TRANSPORT_DERIVE_ARITHMETIC_H_
