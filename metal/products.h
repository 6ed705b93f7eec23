// Copyright © 2026 the mlx_paged authors. Apache-2.0.
//
// Linear layers and embeddings in steps of few rows, with dense and quantized weights.

#pragma once

#include <metal_stdlib>

#include "few_rows.h"
#include "kernel_table.h"
#include "language.h"
#include "quantized_weights.h"
#include "vector_load.h"

using namespace metal;

// Computes x @ weight.T + bias + residual; a threadgroup reads its rows of the weight once for ROWS
// rows of x. Dense weights have no scales, and only affine ones have `biases`.
// grid: (rows of the weight / those of a threadgroup rounded up, rows of x / ROWS likewise).
template <typename T, typename Weight, int ROWS>
PAGED_KERNEL(32 * paged::PRODUCT_SIMD_GROUPS)
product_rows(
    device const T* x [[buffer(0)]], device const uchar* weight [[buffer(1)]],
    device const uchar* scales [[buffer(2)]], device const uchar* biases [[buffer(3)]],
    device const T* bias [[buffer(4)]], device const T* residual [[buffer(5)]],
    device T* out [[buffer(6)]], constant paged::ProductParams& params [[buffer(7)]],
    uint3 group_id [[threadgroup_position_in_grid]], PAGED_SIMD_POSITION) {
  using namespace paged;
  constexpr int COLUMNS = product_columns(ROWS);
  int column = (int(group_id.x) * PRODUCT_SIMD_GROUPS + int(simd_id)) * COLUMNS;
  int first = int(group_id.y) * ROWS;
  if (column >= params.n) {
    return;
  }
  int rows[ROWS];
  PAGED_UNROLL
  for (int i = 0; i < ROWS; i++) {
    rows[i] = min(first + i, params.num_rows - 1);
  }
  WeightRows weights = {
      weight, scales, biases, ulong(column), params.k / Weight::unit_size(), params.group_shift};
  int num_columns = min(COLUMNS, params.n - column);
  float sums[ROWS][COLUMNS];
  multiply_rows<T, Weight, ROWS>(
      weights, num_columns, x, params.x_stride, rows, params.num_rows - first, int(lane), sums);
  PAGED_UNROLL
  for (int i = 0; i < ROWS; i++) {
    PAGED_UNROLL
    for (int c = 0; c < COLUMNS; c++) {
      float sum = simd_sum(sums[i][c]);
      if (lane == 0 && first + i < params.num_rows && c < num_columns) {
        ulong at = ulong(first + i) * params.n + column + c;
        if (params.has_bias) {
          sum = rounded<T>(sum) + float(bias[column + c]);
        }
        if (params.has_residual) {
          sum = rounded<T>(sum) + float(residual[at]);
        }
        out[at] = T(sum);
      }
    }
  }
}

// Gathers rows of a quantized table, such as token embeddings. Negative indices count from the end;
// rows out of range become NaN.
// grid: (rows, units of a row / DATA_THREADS rounded up).
template <typename T, typename Weight>
PAGED_KERNEL(paged::DATA_THREADS)
lookup_rows(
    device const int* rows [[buffer(0)]], device const uchar* weight [[buffer(1)]],
    device const uchar* scales [[buffer(2)]], device const uchar* biases [[buffer(3)]],
    device T* out [[buffer(4)]], constant paged::LookupParams& params [[buffer(5)]],
    PAGED_THREAD_POSITION) {
  using namespace paged;
  constexpr int CHUNK = chunk_size<T>();
  constexpr int CHUNKS = Weight::unit_size() / CHUNK;
  int unit = int(group_id.y * group_size.x + thread_id);
  int row = rows[group_id.x];
  row += row < 0 ? params.num_rows : 0;
  bool exists = row >= 0 && row < params.num_rows;
  WeightRows table = {weight, scales, biases, ulong(row), params.row_units, params.group_shift};
  Weight weights = {};
  weights.load(table, uint(unit), exists && unit < params.row_units, int(thread_id % 32));
  if (unit >= params.row_units) {
    return;
  }
  device uint4* to = (device uint4*)out + (ulong(group_id.x) * params.row_units + unit) * CHUNKS;
  PAGED_UNROLL
  for (int chunk = 0; chunk < CHUNKS; chunk++) {
    float values[CHUNK];
    weights.unpack_chunk(chunk, values);
    to[chunk] = exists ? pack(values, T(0.0f)) : uint4(0x7fc07fc0u);  // NaN in every dtype
  }
}
