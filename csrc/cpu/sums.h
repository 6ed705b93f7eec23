// Copyright © 2026 the mlx_paged authors. Apache-2.0.
//
// Sums the elements of several vectors. Compiled once per instruction set; see simd.h.

#pragma once

#include "simd.h"

namespace mlx_paged::cpu::MLX_PAGED_ISA {

// Sums each vector into c (row stride ldc). Rows and Columns are at most 4; the order of summation
// is the same for all of them, and with AVX-512 that of dot_transposed in matmul.h.
template <int Rows, int Columns>
inline void store_sums(const VecF (&sums)[Rows][Columns], float* c, int64_t ldc) {
#if defined(__AVX512F__)
  // All sixteen at once: one addition combines halves, quarters or eighths of several vectors.
  __m512 v[16];
  for (int i = 0; i < 16; i++) {
    bool used = i / 4 < Rows && i % 4 < Columns;
    v[i] = used ? (__m512)sums[i / 4][i % 4] : _mm512_setzero_ps();
  }
  for (int i = 0; i < 8; i++) {
    v[i] = _mm512_add_ps(
        _mm512_unpacklo_ps(v[2 * i], v[2 * i + 1]), _mm512_unpackhi_ps(v[2 * i], v[2 * i + 1]));
  }
  for (int i = 0; i < 4; i++) {
    __m512d even = (__m512d)v[2 * i];
    __m512d odd = (__m512d)v[2 * i + 1];
    v[i] =
        _mm512_add_ps((__m512)_mm512_unpacklo_pd(even, odd), (__m512)_mm512_unpackhi_pd(even, odd));
  }
  for (int i = 0; i < 2; i++) {
    v[i] = _mm512_add_ps(
        _mm512_shuffle_f32x4(v[2 * i], v[2 * i + 1], 0x88),
        _mm512_shuffle_f32x4(v[2 * i], v[2 * i + 1], 0xdd));
  }
  v[0] =
      _mm512_add_ps(_mm512_shuffle_f32x4(v[0], v[1], 0x88), _mm512_shuffle_f32x4(v[0], v[1], 0xdd));
  for (int i = 0; i < Rows; i++) {
    __builtin_memcpy(c + i * ldc, reinterpret_cast<const float*>(v) + 4 * i, Columns * 4);
  }
#else
  for (int i = 0; i < Rows; i++) {
    for (int j = 0; j < Columns; j++) {
      c[i * ldc + j] = sum(sums[i][j]);
    }
  }
#endif
}

}  // namespace mlx_paged::cpu::MLX_PAGED_ISA
