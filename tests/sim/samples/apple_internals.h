// The compiler internals that MLX's bf16_math.h uses, in terms of Metal's library.
#pragma once
#include <metal_stdlib>

#define __METAL_MAYBE_FAST_MATH__ 0
#define __METAL_FAST_MATH__ 1
#define __METAL_PRECISE_MATH__ 2

#define INTERNAL_1(name)                      \
  inline float __metal_##name(float x, int) { \
    return metal::name(x);                    \
  }
#define INTERNAL_2(name)                               \
  inline float __metal_##name(float x, float y, int) { \
    return metal::name(x, y);                          \
  }
#define INTERNAL_3(name)                                        \
  inline float __metal_##name(float x, float y, float z, int) { \
    return metal::name(x, y, z);                                \
  }

INTERNAL_1(acos)
INTERNAL_1(acosh)
INTERNAL_1(asin)
INTERNAL_1(asinh)
INTERNAL_1(atan)
INTERNAL_1(atanh)
INTERNAL_1(ceil)
INTERNAL_1(cos)
INTERNAL_1(cosh)
INTERNAL_1(cospi)
INTERNAL_1(exp)
INTERNAL_1(exp10)
INTERNAL_1(exp2)
INTERNAL_1(fabs)
INTERNAL_1(floor)
INTERNAL_1(fract)
INTERNAL_1(log)
INTERNAL_1(log10)
INTERNAL_1(log2)
INTERNAL_1(rint)
INTERNAL_1(round)
INTERNAL_1(rsqrt)
INTERNAL_1(sin)
INTERNAL_1(sinh)
INTERNAL_1(sinpi)
INTERNAL_1(sqrt)
INTERNAL_1(tan)
INTERNAL_1(tanh)
INTERNAL_1(tanpi)
INTERNAL_1(trunc)
INTERNAL_2(atan2)
INTERNAL_2(divide)
INTERNAL_2(fmax)
INTERNAL_2(fmin)
INTERNAL_2(fmod)
INTERNAL_2(pow)
INTERNAL_2(powr)
INTERNAL_3(fmax3)
INTERNAL_3(fmedian3)
INTERNAL_3(fmin3)
inline float __metal_fma(float x, float y, float z) {
  return metal::fma(x, y, z);
}
inline float __metal_nextafter(float x, float y) {
  return metal::nextafter(x, y);
}
inline float __metal_ldexp(float x, int k, int) {
  return metal::ldexp(x, k);
}
inline float __metal_frexp(float x, thread int* exponent) {
  return metal::frexp(x, *exponent);
}

inline ushort __metal_get_simdgroup_size(ushort) {
  return 32;
}

#define SIMD_REDUCTION(name)                  \
  inline float __metal_simd_##name(float x) { \
    return metal::simd_##name(x);             \
  }
#define SIMD_SHUFFLE(name)                                 \
  inline ushort __metal_simd_##name(ushort x, ushort by) { \
    return metal::simd_##name(x, by);                      \
  }
#define SIMD_FILL(name)                                                                      \
  inline ushort __metal_simd_##name(ushort x, ushort filling, ushort delta, ushort modulo) { \
    return metal::simd_##name(x, filling, delta, modulo);                                    \
  }

SIMD_REDUCTION(max)
SIMD_REDUCTION(min)
SIMD_REDUCTION(prefix_exclusive_product)
SIMD_REDUCTION(prefix_exclusive_sum)
SIMD_REDUCTION(prefix_inclusive_product)
SIMD_REDUCTION(prefix_inclusive_sum)
SIMD_REDUCTION(product)
SIMD_REDUCTION(sum)
inline uint __metal_simd_xor(uint x) {
  return metal::simd_xor(x);
}
SIMD_SHUFFLE(broadcast)
SIMD_SHUFFLE(shuffle)
SIMD_SHUFFLE(shuffle_down)
SIMD_SHUFFLE(shuffle_rotate_down)
SIMD_SHUFFLE(shuffle_rotate_up)
SIMD_SHUFFLE(shuffle_up)
SIMD_SHUFFLE(shuffle_xor)
SIMD_FILL(shuffle_and_fill_down)
SIMD_FILL(shuffle_and_fill_up)
