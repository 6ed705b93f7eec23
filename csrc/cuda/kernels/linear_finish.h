// Copyright © 2026 the mlx_paged authors. Apache-2.0.
//
// What becomes of the sums of a block's rows of the weight: biases are added, gates applied, heads
// rotated and written, a residual added.
//
// Of gate and up a block has UNIT / 2 rows of each, in turn; of heads it has what head_row says.

#pragma once

#include "linear_math.h"

namespace mlx_paged::cuda {

// The row of a weight that row `row` of block `tile` is, and whether it is of up (gated ones).
struct TileRow {
  int of_weight;
  bool is_up;
};

template <int ROWS, int UNIT>
__device__ __forceinline__ TileRow row_of_tile(const LinearParams& params, int tile, int row) {
  if (params.head_dim > 0) {
    const HeadRow at = head_row(tile, ROWS, params.head_dim, row);
    return {at.first + at.is_second * (params.head_dim / 2), false};
  }
  if (params.is_gated) {
    constexpr int kHalf = UNIT / 2;
    const int of_weight = tile * (ROWS / 2) + row / UNIT * kHalf + row % kHalf;
    return {of_weight, row % UNIT >= kHalf};
  }
  return {tile * ROWS + row, false};
}

// write_rotated of four elements side by side, and those half a head behind them, which it changes.
template <typename T>
__device__ __forceinline__ void write_rotated_four(
    const LinearParams& params, const float* rotations, const int* slots, T* out, int n, int weight,
    int at, int column, T (&lows)[4], T (&highs)[4]) {
  const int half = params.head_dim / 2;
  const int row = row_of_head(slots, weight, at);
  if (row < 0) {
    return;
  }
  if (weight < 2) {
    const float* angles = rotations + size_t(at) * params.head_dim + column % params.head_dim;
    const float4 cosines = *reinterpret_cast<const float4*>(angles);
    const float4 sines = *reinterpret_cast<const float4*>(angles + half);
    rotate(lows[0], highs[0], cosines.x, sines.x);
    rotate(lows[1], highs[1], cosines.y, sines.y);
    rotate(lows[2], highs[2], cosines.z, sines.z);
    rotate(lows[3], highs[3], cosines.w, sines.w);
  }
  T* to = out + size_t(row) * n + column;
  *reinterpret_cast<unsigned long long*>(to) = *reinterpret_cast<unsigned long long*>(lows);
  *reinterpret_cast<unsigned long long*>(to + half) = *reinterpret_cast<unsigned long long*>(highs);
}

// Finishes every `stride`-th four outputs side by side, from number `begin` on. `sums_of(at, row)`:
// those of row `at` of x and rows `row` to `row` + 3 of the tile. x has `num_rows`; `row_of(at)`:
// which of the outputs' it is.
template <typename T, int ROWS, int UNIT, typename RowOf, typename Sums>
__device__ __forceinline__ void finish_rows(
    const LinearParams& params, const LinearPart<T> (&parts)[kLinearMostWeights], int which,
    int tile, const T* residual, const float* rotations, const int* slots, RowOf row_of,
    int num_rows, int begin, int stride, Sums sums_of) {
  const LinearPart<T> ours = part_of(parts, which);
  const bool has_heads = params.head_dim > 0;
  const int outputs = params.is_gated ? ROWS / 2 : ROWS;
  // A thread finishes four outputs of a row of x; of gate and up, and of a head's halves, of both.
  const bool has_pairs = params.is_gated || has_heads;
  const int mates = has_pairs ? ROWS / 8 : ROWS / 4;
  auto with_bias = [&](float4 sum, const LinearPart<T>& part, int column, T(&four)[4]) {
    const float values[4] = {sum.x, sum.y, sum.z, sum.w};
#pragma unroll
    for (int e = 0; e < 4; e++) {
      const bool has_bias = part.has_bias && column + e < part.n;
      four[e] = plus(rounded<T>(values[e]), part.bias + column + e, has_bias);
    }
  };
  for (int i = begin; i < num_rows * mates; i += stride) {
    const int at = has_pairs ? i / (ROWS / 8) : i / (ROWS / 4);
    const int mate = has_pairs ? i % (ROWS / 8) : i % (ROWS / 4);
    if (has_heads) {
      const int unit = min(ROWS, params.head_dim);
      const int of_half = mate * 4;  // among the block's first halves
      const int output = of_half / (unit / 2) * unit + of_half % (unit / 2);
      const int low = head_row(tile, ROWS, params.head_dim, output).first;
      if (low >= ours.n) {
        continue;
      }
      __align__(8) T lows[4];
      __align__(8) T highs[4];
      with_bias(sums_of(at, output), ours, low, lows);
      with_bias(sums_of(at, output + unit / 2), ours, low + params.head_dim / 2, highs);
      write_rotated_four<T>(
          params, rotations, slots, ours.out, ours.n, which, row_of(at), low, lows, highs);
      continue;
    }
    const int output = mate * 4;
    const int column = tile * outputs + output;
    if (column >= ours.n) {
      continue;
    }
    __align__(8) T four[4];
    if (params.is_gated) {
      constexpr int kHalf = UNIT / 2;
      const int gate = output / kHalf * UNIT + output % kHalf;
      T up[4];
      with_bias(sums_of(at, gate), ours, column, four);
      with_bias(sums_of(at, gate + kHalf), parts[1], column, up);
#pragma unroll
      for (int e = 0; e < 4; e++) {
        four[e] = gated(four[e], up[e]);
      }
    } else {
      with_bias(sums_of(at, output), ours, column, four);
    }
    const size_t to = size_t(row_of(at)) * ours.n + column;
    if (ours.n % 4 == 0) {
      if (params.has_residual) {
        __align__(8) T added[4];
        *reinterpret_cast<unsigned long long*>(added) =
            *reinterpret_cast<const unsigned long long*>(residual + to);
#pragma unroll
        for (int e = 0; e < 4; e++) {
          four[e] = plus(four[e], added + e, true);
        }
      }
      *reinterpret_cast<unsigned long long*>(ours.out + to) =
          *reinterpret_cast<unsigned long long*>(four);
      continue;
    }
#pragma unroll
    for (int e = 0; e < 4; e++) {
      if (column + e < ours.n) {
        ours.out[to + e] = plus(four[e], residual + to + e, params.has_residual);
      }
    }
  }
}

}  // namespace mlx_paged::cuda
