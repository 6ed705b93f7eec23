// Copyright © 2026 the mlx_paged authors. Apache-2.0.
//
// Converts pool contents to fp32: elements and rows of every format, and the rotation of keys.
// Compiled once per instruction set; see simd.h.

#pragma once

#include "attention.h"
#include "simd.h"

namespace mlx_paged::cpu::MLX_PAGED_ISA {

constexpr int kMaxHeadDim = paged::MAX_HEAD_DIM;

struct Int8 {
  int8_t code;
};
struct Fp8 {
  uint8_t bits;
};
// Two codes, the lower nibble first. fp32 rows hold a group's even dims before its odd ones, as
// vectors of nibbles do: queries are converted to this order, and results back.
struct Int4 {
  uint8_t codes;
};

template <typename T>
constexpr bool kIsInt8 = false;
template <>
constexpr bool kIsInt8<Int8> = true;
template <typename T>
constexpr bool kIsInt4 = false;
template <>
constexpr bool kIsInt4<Int4> = true;

// Calls body(T{}) with the pool's element type.
template <typename Body>
inline void with_pool_type(DType dtype, PoolFormat format, const Body& body) {
  switch (format) {
    case PoolFormat::plain:
      return with_type(dtype, body);
    case PoolFormat::int8:
      return body(Int8{});
    case PoolFormat::int4:
      return body(Int4{});
    case PoolFormat::fp8:
      return body(Fp8{});
  }
}

typedef int8_t VecB __attribute__((vector_size(kWidth)));
typedef uint8_t VecUB __attribute__((vector_size(kWidth)));

inline VecF load(const Int8* p) {
#if defined(__AVX512F__)
  return (VecF)_mm512_cvtepi32_ps(_mm512_cvtepi8_epi32(load_as<__m128i>(p)));
#elif defined(__AVX2__)
  return (VecF)_mm256_cvtepi32_ps(_mm256_cvtepi8_epi32(_mm_loadl_epi64((const __m128i*)p)));
#else
  return __builtin_convertvector(__builtin_convertvector(load_as<VecB>(p), VecI), VecF);
#endif
}

inline VecI load_bytes(const void* p) {
#if defined(__AVX512F__)
  return (VecI)_mm512_cvtepu8_epi32(load_as<__m128i>(p));
#elif defined(__AVX2__)
  return (VecI)_mm256_cvtepu8_epi32(_mm_loadl_epi64((const __m128i*)p));
#else
  return __builtin_convertvector(load_as<VecUB>(p), VecI);
#endif
}

// e4m3: the largest number is 448, and all ones is NaN.
inline VecF load(const Fp8* p) {
  VecU b = (VecU)load_bytes(p);
  VecU magnitude = b & 0x7f;
  // Below 2^-6, the smallest normal number, subtracts the implicit leading one of the float.
  VecI subnormal = (VecI)(magnitude < 8);
  VecF normal = as_float((magnitude << 20) + (120u << 23));
  VecF small = as_float((magnitude << 20) + (121u << 23)) - 0x1p-6f;
  VecF value = select(subnormal, small, normal);
  value = select((VecI)(magnitude == 0x7f), splat(__builtin_nanf("")), value);
  return as_float(as_uint(value) | ((b & 0x80) << 24));
}

inline float half_to_float(uint16_t bits) {
#if defined(__AVX2__)
  return _cvtsh_ss(bits);
#else
  uint32_t magnitude = uint32_t(bits & 0x7fff) << 13;  // as in load(const Half*)
  float scaled;
  __builtin_memcpy(&scaled, &magnitude, 4);
  scaled *= 0x1p112f;
  uint32_t word;
  __builtin_memcpy(&word, &scaled, 4);
  word |= ((bits & 0x7fff) >= 0x7c00 ? 0x7f800000u : 0u) | uint32_t(bits & 0x8000) << 16;
  __builtin_memcpy(&scaled, &word, 4);
  return scaled;
#endif
}

inline uint16_t half_at(const char* p, int index) {
  uint16_t bits;
  __builtin_memcpy(&bits, p + 2 * index, 2);
  return bits;
}

// Converts a group of int4 codes to fp32, even dims first.
inline void convert_group(const Int4* codes, float scale, float minimum, int size, float* out) {
  if (size < kGroup) {
    for (int j = 0; j < size / 2; j++) {
      out[j] = float(codes[j].codes & 15) * scale + minimum;
      out[j + size / 2] = float(codes[j].codes >> 4) * scale + minimum;
    }
    return;
  }
  for (int j = 0; j < kGroup / 2; j += kWidth) {
    VecI bytes = load_bytes(codes + j);
#if defined(__AVX512F__)
    // All possible values, indexed by code; the permutation uses only the low four bits of each
    // index.
    const VecF all = {0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15};
    __m512 values = (__m512)(all * scale + minimum);
    store(out + j, (VecF)_mm512_permutexvar_ps((__m512i)bytes, values));
    store(
        out + j + kGroup / 2,
        (VecF)_mm512_permutexvar_ps(_mm512_srli_epi32((__m512i)bytes, 4), values));
#else
    store(out + j, __builtin_convertvector(bytes & 15, VecF) * scale + minimum);
    store(out + j + kGroup / 2, __builtin_convertvector(bytes >> 4, VecF) * scale + minimum);
#endif
  }
}

template <typename Move>
inline void for_pairs(int dim, const Move& move) {
  for (int begin = 0; begin < dim; begin += kGroup) {
    int half = (begin + kGroup < dim ? kGroup : dim - begin) / 2;
    for (int j = 0; j < half; j++) {
      move(begin + j, begin + half + j, begin + 2 * j);
    }
  }
}

// Reorders dims to the order of int4 rows.
inline void evens_first(float* x, int dim) {
  float from[kMaxHeadDim];
  __builtin_memcpy(from, x, dim * sizeof(float));
  for_pairs(dim, [&](int even, int odd, int pair) {
    x[even] = from[pair];
    x[odd] = from[pair + 1];
  });
}

// Reorders dims back.
inline void dims_in_order(float* x, int dim) {
  float from[kMaxHeadDim];
  __builtin_memcpy(from, x, dim * sizeof(float));
  for_pairs(dim, [&](int even, int odd, int pair) {
    x[pair] = from[even];
    x[pair + 1] = from[odd];
  });
}

// Converts one head of a token to fp32, padded with zeros to whole vectors. `scales` is the head's
// tail; without Scaled, int8 codes stay unscaled.
template <bool Scaled = true, typename T>
inline void convert_row(
    const PoolView& pool, const T* row, const char* scales, int padded_dim, float* out) {
  int dim = pool.head_dim;
  if constexpr (kIsInt4<T>) {
    for (int begin = 0; begin < dim; begin += kGroup) {
      float scale = half_to_float(half_at(scales, begin / kGroup * 2));
      float minimum = half_to_float(half_at(scales, begin / kGroup * 2 + 1));
      int size = begin + kGroup < dim ? kGroup : dim - begin;
      convert_group(row + begin / 2, scale, minimum, size, out + begin);
    }
  } else {
    constexpr bool kScaled = Scaled && kIsInt8<T>;
    float scale = kScaled ? half_to_float(half_at(scales, 0)) : 1.0f;
    auto put = [&](int d, VecF x) {
      if constexpr (kScaled) {
        x = x * scale;
      }
      store(out + d, x);
    };
    int d = 0;
    for (; d + kWidth <= dim; d += kWidth) {
      put(d, load(row + d));
    }
    if (d < dim) {
      put(d, load_tail(row + d, dim - d));
    }
  }
  for (int d = dim; d < padded_dim; d++) {
    out[d] = 0;
  }
}

// --- Rotation of keys and of the queries they meet

struct Signs {
  float of[kMaxHeadDim];

  constexpr Signs() : of() {
    for (int d = 0; d < kMaxHeadDim; d++) {
      of[d] = paged::changes_sign(d) ? -1.0f : 1.0f;
    }
  }
};
constexpr Signs kSigns;

template <int Stride>
inline void butterflies_within(float* x, int size) {
  for (int i = 0; i < size; i += 2 * Stride) {
    for (int j = i; j < i + Stride; j++) {
      float a = x[j], b = x[j + Stride];
      x[j] = a + b;
      x[j + Stride] = a - b;
    }
  }
}

// Orthonormal Walsh-Hadamard transform of each run.
inline void hadamard(float* x, int dim) {
  int run = paged::rotated_run(dim);  // at least 8
  butterflies_within<1>(x, dim);
  butterflies_within<2>(x, dim);
  butterflies_within<4>(x, dim);
  for (int stride = 8; stride < run; stride *= 2) {
    for (int i = 0; i < dim; i += 2 * stride) {
      for (int j = i; j < i + stride; j++) {
        float a = x[j], b = x[j + stride];
        x[j] = a + b;
        x[j + stride] = a - b;
      }
    }
  }
  float norm = 1.0f / __builtin_sqrtf(float(run));
  for (int d = 0; d < dim; d++) {
    x[d] *= norm;
  }
}

inline void rotate(float* x, int dim) {
  for (int d = 0; d < dim; d++) {
    x[d] *= kSigns.of[d];
  }
  hadamard(x, dim);
}

inline void rotate_back(float* x, int dim) {
  hadamard(x, dim);
  for (int d = 0; d < dim; d++) {
    x[d] *= kSigns.of[d];
  }
}

}  // namespace mlx_paged::cpu::MLX_PAGED_ISA
