// Copyright © 2026 the mlx_paged authors. Apache-2.0.
//
// Interleaving and transposing of words. Compiled once per instruction set; see simd.h.

#pragma once

#if defined(__SSE2__)
#include <immintrin.h>
#endif

#include "simd.h"

namespace mlx_paged::cpu::MLX_PAGED_ISA {

// Interleave the first or last two words, or pairs of words, of each 16 bytes of a and b.
#if defined(__AVX512F__)
inline VecU unpack_low_words(VecU a, VecU b) {
  return (VecU)_mm512_unpacklo_epi32((__m512i)a, (__m512i)b);
}

inline VecU unpack_high_words(VecU a, VecU b) {
  return (VecU)_mm512_unpackhi_epi32((__m512i)a, (__m512i)b);
}

inline VecU unpack_low_pairs(VecU a, VecU b) {
  return (VecU)_mm512_unpacklo_epi64((__m512i)a, (__m512i)b);
}

inline VecU unpack_high_pairs(VecU a, VecU b) {
  return (VecU)_mm512_unpackhi_epi64((__m512i)a, (__m512i)b);
}
#elif defined(__AVX2__)
inline VecU unpack_low_words(VecU a, VecU b) {
  return (VecU)_mm256_unpacklo_epi32((__m256i)a, (__m256i)b);
}

inline VecU unpack_high_words(VecU a, VecU b) {
  return (VecU)_mm256_unpackhi_epi32((__m256i)a, (__m256i)b);
}

inline VecU unpack_low_pairs(VecU a, VecU b) {
  return (VecU)_mm256_unpacklo_epi64((__m256i)a, (__m256i)b);
}

inline VecU unpack_high_pairs(VecU a, VecU b) {
  return (VecU)_mm256_unpackhi_epi64((__m256i)a, (__m256i)b);
}
#elif defined(__SSE2__)
inline VecU unpack_low_words(VecU a, VecU b) {
  return (VecU)_mm_unpacklo_epi32((__m128i)a, (__m128i)b);
}

inline VecU unpack_high_words(VecU a, VecU b) {
  return (VecU)_mm_unpackhi_epi32((__m128i)a, (__m128i)b);
}

inline VecU unpack_low_pairs(VecU a, VecU b) {
  return (VecU)_mm_unpacklo_epi64((__m128i)a, (__m128i)b);
}

inline VecU unpack_high_pairs(VecU a, VecU b) {
  return (VecU)_mm_unpackhi_epi64((__m128i)a, (__m128i)b);
}
#endif

#if defined(__SSE2__)
// Transposes the four words of each 16 bytes: those of to[i] are word i of v[0] to v[3].
inline void transpose_quarters(const VecU (&v)[4], VecU (&to)[4]) {
  const VecU low01 = unpack_low_words(v[0], v[1]);
  const VecU low23 = unpack_low_words(v[2], v[3]);
  const VecU high01 = unpack_high_words(v[0], v[1]);
  const VecU high23 = unpack_high_words(v[2], v[3]);
  to[0] = unpack_low_pairs(low01, low23);
  to[1] = unpack_high_pairs(low01, low23);
  to[2] = unpack_low_pairs(high01, high23);
  to[3] = unpack_high_pairs(high01, high23);
}
#endif

#if defined(__AVX512F__)
// Transposes 16 rows of 16 words.
inline void transpose(__m512i (&v)[16]) {
  __m512i t[16];
  for (int i = 0; i < 16; i += 4) {
    const VecU rows[4] = {(VecU)v[i], (VecU)v[i + 1], (VecU)v[i + 2], (VecU)v[i + 3]};
    VecU quarters[4];
    transpose_quarters(rows, quarters);
    for (int j = 0; j < 4; j++) {
      t[i + j] = (__m512i)quarters[j];
    }
  }
  // Quarter q of t[4 * b + i]: column 4 * q + i of rows 4 * b to 4 * b + 3.
  for (int i = 0; i < 4; i++) {
    __m512i low01 = _mm512_shuffle_i32x4(t[i], t[4 + i], 0x88);  // quarters 0 and 2
    __m512i low23 = _mm512_shuffle_i32x4(t[8 + i], t[12 + i], 0x88);
    __m512i high01 = _mm512_shuffle_i32x4(t[i], t[4 + i], 0xdd);  // quarters 1 and 3
    __m512i high23 = _mm512_shuffle_i32x4(t[8 + i], t[12 + i], 0xdd);
    v[i] = _mm512_shuffle_i32x4(low01, low23, 0x88);
    v[4 + i] = _mm512_shuffle_i32x4(high01, high23, 0x88);
    v[8 + i] = _mm512_shuffle_i32x4(low01, low23, 0xdd);
    v[12 + i] = _mm512_shuffle_i32x4(high01, high23, 0xdd);
  }
}
#endif

}  // namespace mlx_paged::cpu::MLX_PAGED_ISA
