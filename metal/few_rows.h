// Copyright © 2026 the mlx_paged authors. Apache-2.0.
//
// Products of a few rows with one row of a weight, which is read once for all of them.

#pragma once

#include <metal_stdlib>

#include "kernel_table.h"
#include "language.h"
#include "vector_load.h"

using namespace metal;

namespace paged {

// Multiplies `count` rows of x, listed in `rows`, by the row `weight`. Each lane of a SIMD-group
// returns a partial sum per row; their totals are the products.
template <typename T>
METAL_FUNC void multiply_rows(
    device const T* weight, int k, device const T* x, int x_stride,
    thread const int (&rows)[PRODUCT_ROWS], int count, int lane,
    thread float (&sums)[PRODUCT_ROWS]) {
  constexpr int CHUNK = chunk_size<T>();
  PAGED_UNROLL
  for (int i = 0; i < PRODUCT_ROWS; i++) {
    sums[i] = 0.0f;
  }
  for (int chunk = lane; chunk < k / CHUNK; chunk += 32) {
    float w[CHUNK];
    unpack(((device const uint4*)weight)[chunk], w, T(0.0f));
    PAGED_UNROLL
    for (int i = 0; i < PRODUCT_ROWS; i++) {
      if (i < count) {
        float v[CHUNK];
        device const T* row = x + ulong(rows[i]) * x_stride;
        unpack(((device const uint4*)row)[chunk], v, T(0.0f));
        PAGED_UNROLL
        for (int e = 0; e < CHUNK; e++) {
          sums[i] += w[e] * v[e];
        }
      }
    }
  }
}

}  // namespace paged
