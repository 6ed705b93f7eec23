// Copyright © 2026 the mlx_paged authors. Apache-2.0.
//
// Epilogue of the linear kernels: adds biases, applies gates, rotates and writes heads, adds a
// residual, and stores the next product's input in code order.
//
// In gated launches a block interleaves UNIT / 2 rows of gate with UNIT / 2 rows of up; with heads,
// head_row maps rows of a block to rows of the weight.

#pragma once

#include "linear_math.h"

namespace mlx_paged::cuda {

// Maps row `row` of block `tile` to a row of a weight. is_up: the row belongs to up, not gate.
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

constexpr int log2_of(int power) {
  return power > 1 ? 1 + log2_of(power / 2) : 0;
}

// Sums of a row of x with four rows of a weight from `column` on.
struct FourSums {
  float4 sums;
  int weight;
  int column;
};

// The update of finish_rows that adds nothing.
struct NoUpdate {
  __device__ __forceinline__ void begin(int, bool, const FourSums&, const FourSums&, bool) {}
  __device__ __forceinline__ void add(int, FourSums&, FourSums&, bool) const {}
  __device__ __forceinline__ bool begins() const { return false; }
};

// Finishes groups of four adjacent outputs, from number `begin` in steps of `stride`. `sums_of(at,
// row)` returns the sums of row `at` of x with rows `row` to `row` + 3 of the tile; x has
// `num_rows` rows, and `row_of(at)` is the output row of row `at`.
//
// `update.add(at, first, mates, has_mates)` adds to sums. Before them, `update.begin(at, exists,
// first, mates, has_mates)` may load what that needs. While `update.begins()`, it is called at
// least once, even by threads that have nothing to finish.
//
// One loop with few divisions serves every kind of product: each launch starts with a cold
// instruction cache, so short code beats fast code here.
template <typename T, int ROWS, int UNIT, typename RowOf, typename Sums, typename Update = NoUpdate>
__device__ __forceinline__ void finish_rows(
    const LinearParams& params, const LinearPart<T> (&parts)[kLinearMaxWeights], int which,
    int tile, const T* residual, const float* rotations, const int* slots, RowOf row_of,
    int num_rows, int begin, int stride, Sums sums_of, Update update = {}) {
  const LinearPart<T> ours = part_of(parts, which);
  const bool has_heads = params.head_dim > 0;
  const int half_head = params.head_dim / 2;
  // A thread finishes four outputs of one row of x, or four pairs: gate and up, or two halves of a
  // head.
  const bool has_pairs = params.is_gated || has_heads;
  constexpr int kShift = log2_of(ROWS / 8);
  const int shift = has_pairs ? kShift : kShift + 1;
  const int fours = 1 << shift;  // per row of x
  const T* bias_of_mates = has_heads ? ours.bias : parts[1].bias;
  const bool has_bias_of_mates = has_heads ? ours.has_bias : parts[1].has_bias;
  auto with_bias = [&](float4 sum, const T* bias, bool has_bias, int column, T(&four)[4]) {
    const float values[4] = {sum.x, sum.y, sum.z, sum.w};
#pragma unroll
    for (int e = 0; e < 4; e++) {
      four[e] = rounded<T>(values[e]);
    }
    if (has_bias) {
#pragma unroll
      for (int e = 0; e < 4; e++) {
        four[e] = plus(four[e], bias + column + e, column + e < ours.n);
      }
    }
  };
#pragma unroll 1
  for (int i = begin; i < num_rows << shift || update.begins(); i += stride) {
    const int at = i >> shift;
    const int output = (i & (fours - 1)) * 4;  // in the tile, or among its first-of-pair elements
    int row = output;                          // within the tile
    int mate = 0;                              // the row of the other element of a pair
    int column = tile * (4 * fours) + output;
    if (has_heads) {
      const int half_unit = min(ROWS, params.head_dim) / 2;
      row = output + output / half_unit * half_unit;
      mate = row + half_unit;
      column = head_row(tile, ROWS, params.head_dim, row).first;
    } else if (params.is_gated) {
      constexpr int kHalf = UNIT / 2;
      row = output / kHalf * UNIT + output % kHalf;
      mate = row + kHalf;
    }
    const bool exists = i < num_rows << shift && column < ours.n;
    FourSums first{{}, which, column};
    FourSums mates{{}, has_heads ? which : 1, has_heads ? column + half_head : column};
    update.begin(at, exists, first, mates, has_pairs);
    if (!exists) {
      continue;
    }
    __align__(8) T four[4];
    __align__(8) T others[4];
    first.sums = sums_of(at, row);
    if (has_pairs) {
      mates.sums = sums_of(at, mate);
    }
    update.add(at, first, mates, has_pairs);
    with_bias(first.sums, ours.bias, ours.has_bias, column, four);
    if (has_pairs) {
      with_bias(mates.sums, bias_of_mates, has_bias_of_mates, mates.column, others);
    }
    const int out_row = row_of(at);
    if (has_heads) {
      write_rotated(
          params, rotations, slots, ours.out, ours.n, which, out_row, column, four, others);
      continue;
    }
    if (params.is_gated) {
#pragma unroll
      for (int e = 0; e < 4; e++) {
        four[e] = gated(four[e], others[e]);
      }
    }
    const size_t to = size_t(out_row) * ours.n + column;
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
      if (params.out_order.run > 0) {
#pragma unroll
        for (int e = 0; e < 4; e++) {
          ours.out[to - column + ordered_column(params.out_order, column + e)] = four[e];
        }
        continue;
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
