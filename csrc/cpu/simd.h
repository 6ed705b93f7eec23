// Copyright © 2026 the mlx_paged authors. Apache-2.0.
//
// Vectors of floats in the compiler's vector types. This file and the kernels that use it are
// compiled once per instruction set, each in its own namespace (MLX_PAGED_ISA). They include no
// standard header with inline functions: the linker could keep a std:: template compiled with
// AVX-512 for the whole program.

#pragma once

#include <stddef.h>
#include <stdint.h>

#if defined(__AVX2__)
#include <immintrin.h>
#endif

#include "../dtype.h"

namespace mlx_paged::cpu::MLX_PAGED_ISA {

#if defined(__AVX512F__)
constexpr int kWidth = 16;
#elif defined(__AVX2__)
constexpr int kWidth = 8;
#else
constexpr int kWidth = 4;
#endif

typedef float VecF __attribute__((vector_size(4 * kWidth)));
typedef int32_t VecI __attribute__((vector_size(4 * kWidth)));
typedef uint32_t VecU __attribute__((vector_size(4 * kWidth)));
typedef uint16_t VecH __attribute__((vector_size(2 * kWidth)));

constexpr float kInf = __builtin_inff();

struct Half {
  uint16_t bits;
};
struct BFloat {
  uint16_t bits;
};

// Calls body(T{}) with the element type.
template <typename Body>
inline void with_type(DType dtype, const Body& body) {
  switch (dtype) {
    case DType::float32:
      return body(float{});
    case DType::float16:
      return body(Half{});
    case DType::bfloat16:
      return body(BFloat{});
  }
}

template <typename V>
inline V load_as(const void* p) {
  V v;
  __builtin_memcpy(&v, p, sizeof(V));
  return v;
}

inline VecF splat(float x) {
  return x - VecF{};
}

inline VecF load(const float* p) {
  return load_as<VecF>(p);
}

inline void store(float* p, VecF v) {
  __builtin_memcpy(p, &v, sizeof(v));
}

inline VecF select(VecI mask, VecF a, VecF b) {
  return mask ? a : b;
}

inline VecF max(VecF a, VecF b) {
  return select(a > b, a, b);
}

inline VecF as_float(VecU v) {
  return load_as<VecF>(&v);
}

inline VecU as_uint(VecF v) {
  return load_as<VecU>(&v);
}

#if defined(__AVX512F__)
inline VecF widened(__m256i bits, BFloat) {
  return (VecF)_mm512_slli_epi32(_mm512_cvtepu16_epi32(bits), 16);
}

inline VecF widened(__m256i bits, Half) {
  return (VecF)_mm512_cvtph_ps(bits);
}
#endif

inline VecF load(const BFloat* p) {
#if defined(__AVX512F__)
  return widened(load_as<__m256i>(p), BFloat{});
#else
  return as_float(__builtin_convertvector(load_as<VecH>(p), VecU) << 16);
#endif
}

inline VecF load(const Half* p) {
#if defined(__AVX512F__)
  return widened(load_as<__m256i>(p), Half{});
#elif defined(__AVX2__)
  return (VecF)_mm256_cvtph_ps(load_as<__m128i>(p));
#else
  // Moves exponent and mantissa into place; multiplying by 2^112 fixes the bias and normalizes
  // subnormals; infinities and NaNs keep their exponent.
  VecU h = __builtin_convertvector(load_as<VecH>(p), VecU);
  VecU magnitude = h & 0x7fff;
  VecF scaled = as_float(magnitude << 13) * 0x1p112f;
  VecU special = (VecU)(magnitude >= 0x7c00) & 0x7f800000u;
  return as_float(as_uint(scaled) | special | ((h & 0x8000) << 16));
#endif
}

// Loads `count` < kWidth elements, followed by zeros.
template <typename T>
inline VecF load_tail(const T* p, int count) {
#if defined(__AVX512F__)
  // A vector stored in pieces cannot be forwarded to a full load before it reaches the cache.
  const __mmask16 mask = (1u << count) - 1;
  if constexpr (sizeof(T) == 4) {
    return (VecF)_mm512_maskz_loadu_ps(mask, p);
  } else if constexpr (sizeof(T) == 2) {
    return widened(_mm256_maskz_loadu_epi16(mask, p), T{});
  }
#elif defined(__AVX2__)
  if constexpr (sizeof(T) == 4) {
    const VecI index = {0, 1, 2, 3, 4, 5, 6, 7};
    return (VecF)_mm256_maskload_ps(p, (__m256i)(index < count));
  } else if constexpr (sizeof(T) == 2) {
    auto up_to_four = [](const T* p, int count) -> uint64_t {
      const int pairs = count / 2;
      const uint64_t last = count % 2 ? load_as<uint16_t>(p + 2 * pairs) : 0;
      return count == 4 ? load_as<uint64_t>(p)
                        : (pairs ? load_as<uint32_t>(p) : 0) | last << 32 * pairs;
    };
    const uint64_t both[2] = {
        up_to_four(p, count < 4 ? count : 4), count > 4 ? up_to_four(p + 4, count - 4) : 0};
    const __m128i padded = _mm_set_epi64x(int64_t(both[1]), int64_t(both[0]));
    return load(reinterpret_cast<const T*>(&padded));
  }
#endif
  T padded[kWidth] = {};
  __builtin_memcpy(padded, p, count * sizeof(T));
  return load(padded);
}

// Copies `count` bytes and pads with zeros up to `size`.
inline void copy_tail(void* to, const void* from, int count, int size) {
#if defined(__AVX512F__)
  for (int i = 0; i < size; i += 64) {
    const int left = count - i;
    const __mmask64 mask = left >= 64 ? ~uint64_t(0) : left <= 0 ? 0 : (uint64_t(1) << left) - 1;
    _mm512_storeu_si512(
        static_cast<char*>(to) + i,
        _mm512_maskz_loadu_epi8(mask, static_cast<const char*>(from) + i));
  }
#else
  __builtin_memset(to, 0, size);
  __builtin_memcpy(to, from, count);
#endif
}

inline void store_as(float* p, float x) {
  *p = x;
}

inline void store_as(BFloat* p, float x) {
  uint32_t u;
  __builtin_memcpy(&u, &x, 4);
  // Round to nearest even; a NaN keeps its top bits and stays a NaN.
  p->bits = x != x ? uint16_t((u >> 16) | 0x40) : uint16_t((u + 0x7fff + ((u >> 16) & 1)) >> 16);
}

inline void store_as(Half* p, float x) {
#if defined(__AVX2__)
  p->bits = _cvtss_sh(x, _MM_FROUND_TO_NEAREST_INT);
#else
  // Rounds to nearest even. Not every compiler has _Float16 on its baseline target.
  uint32_t u;
  __builtin_memcpy(&u, &x, 4);
  uint32_t sign = (u >> 16) & 0x8000;
  uint32_t magnitude = u & 0x7fffffff;
  uint32_t bits;
  if (magnitude >= 0x47800000) {  // 2^16 and more, infinity, NaN
    bits = magnitude > 0x7f800000 ? 0x7e00 : 0x7c00;
  } else if (magnitude < 0x38800000) {  // below 2^-14: adding 0.5 rounds at a subnormal's last bit
    float shifted;
    __builtin_memcpy(&shifted, &magnitude, 4);
    shifted += 0.5f;
    __builtin_memcpy(&bits, &shifted, 4);
    bits -= 0x3f000000;
  } else {
    bits = (magnitude + 0xfff + ((magnitude >> 13) & 1) - 0x38000000) >> 13;
  }
  p->bits = uint16_t(sign | bits);
#endif
}

inline float sum(VecF v) {
#if defined(__AVX512F__)
  return _mm512_reduce_add_ps((__m512)v);
#else
  typedef float Vec4 __attribute__((vector_size(16)));
  Vec4 s = load_as<Vec4>(&v);
  if constexpr (kWidth == 8) {
    s += load_as<Vec4>(reinterpret_cast<const char*>(&v) + 16);
  }
  return (s[0] + s[2]) + (s[1] + s[3]);
#endif
}

inline float max(VecF v) {
#if defined(__AVX512F__)
  return _mm512_reduce_max_ps((__m512)v);
#else
  float m = v[0];
  for (int i = 1; i < kWidth; i++) {
    m = v[i] > m ? v[i] : m;
  }
  return m;
#endif
}

inline bool any(VecI mask) {
#if defined(__AVX512F__)
  return _mm512_test_epi32_mask((__m512i)mask, (__m512i)mask) != 0;
#else
  uint64_t words[kWidth / 2];
  __builtin_memcpy(words, &mask, sizeof(mask));
  uint64_t joined = 0;
  for (uint64_t word : words) {
    joined |= word;
  }
  return joined != 0;
#endif
}

inline int sum(VecI v) {
#if defined(__AVX512F__)
  return _mm512_reduce_add_epi32((__m512i)v);
#else
  int s = 0;
  for (int i = 0; i < kWidth; i++) {
    s += v[i];
  }
  return s;
#endif
}

inline uint32_t max(VecU v) {
#if defined(__AVX512F__)
  return _mm512_reduce_max_epu32((__m512i)v);
#else
  uint32_t m = 0;
  for (int i = 0; i < kWidth; i++) {
    m = v[i] > m ? v[i] : m;
  }
  return m;
#endif
}

// 2^x for x <= 126, to about 1e-7 relative; 0 below -126 (and for -inf); NaN stays NaN.
inline VecF exp2(VecF x) {
  VecF clamped = select(x < -127.0f, splat(-127.0f), x);
  // Adding 1.5 * 2^23 rounds to the nearest integer, which is then in the low mantissa bits.
  VecF shifted = clamped + 0x1.8p23f;
  VecF f = clamped - (shifted - 0x1.8p23f);
  // Taylor series of 2^f on [-0.5, 0.5]: ln2^n / n!.
  VecF p = f * 1.5403530e-4f + 1.3333558e-3f;
  p = p * f + 9.6181291e-3f;
  p = p * f + 5.5504109e-2f;
  p = p * f + 2.4022651e-1f;
  p = p * f + 6.9314718e-1f;
  p = p * f + 1.0f;
  VecF result = as_float(as_uint(p) + (as_uint(shifted) << 23));
  return select(x >= -126.0f, result, select(x < -126.0f, VecF{}, x));
}

inline float exp2(float x) {
  return exp2(splat(x))[0];
}

inline VecF tanh(VecF x) {
  VecF a = max(x, -x);
  // Near zero 1 - 2 / (e^2a + 1) loses its leading digits; the series does not.
  VecF x2 = x * x;
  VecF series = x2 * -8.8632355e-3f + 2.1869489e-2f;
  series = series * x2 - 5.3968254e-2f;
  series = series * x2 + 1.3333333e-1f;
  series = series * x2 - 3.3333333e-1f;
  series = x + x * x2 * series;
  VecF capped = select(a > 20.0f, splat(20.0f), a);  // NaN stays NaN
  VecF t = 1.0f - 2.0f / (exp2(capped * 2.8853901f) + 1.0f);
  return select(a < 0.35f, series, select(x < 0.0f, -t, t));
}

}  // namespace mlx_paged::cpu::MLX_PAGED_ISA
