// Copyright © 2026 the mlx_paged authors. Apache-2.0.
//
// One warp's attention over its tokens, on tensor cores. Keys take the 16-row side of a product and
// queries the 8-column side, so groups of up to 8 query heads waste little: logits[token][query] =
// K q, results[dim][query] = V^T p. A lane's columns are the same two queries in both products, and
// it keeps their softmax.

#pragma once

#include "../tensor_shape.h"
#include "block_table.h"
#include "kernel_table.h"
#include "kv_ring.h"
#include "softmax_state.h"
#include "tensor_core.h"

namespace paged {

// Turns logits into weights and returns the factor to apply to earlier results. Tile i holds the
// logits of tokens `token` + 16 i and `token` + 16 i + 8; e selects one of the lane's two queries,
// which sees `keys`. Weights are relative to a maximum that is SMALLER less, in base 2, than that
// of the logits.
template <int SMALLER = 0, int TILES>
__device__ __forceinline__ float softmax_of_column(
    SoftmaxState& state, KeyRange keys, int e, FragmentD (&logits)[TILES], int token,
    const AttentionParams& params) {
  float maximum = state.maximum;
#pragma unroll
  for (int i = 0; i < 2 * TILES; i++) {
    float& value = logits[i / 2][i % 2 * 2 + e];
    int at = token + 8 * i;
    bool seen = at >= keys.begin && at < keys.end;
    value = seen ? capped<DeviceMath>(value * params.options.scale, params.options) : -INFINITY;
    maximum = fmaxf(maximum, value - SMALLER);
  }
#pragma unroll
  for (int mask = 4; mask < 32; mask *= 2) {
    maximum = fmaxf(maximum, __shfl_xor_sync(0xffffffffu, maximum, mask));
  }
  float factor = rescale(state.maximum, maximum);
  state.maximum = maximum;
  // Not left to the compiler, which could fuse them in one kernel and not in another: all kernels
  // must give a row the same bits.
  state.sum = __fmul_rn(state.sum, factor);
#pragma unroll
  for (int i = 0; i < 2 * TILES; i++) {
    float& value = logits[i / 2][i % 2 * 2 + e];
    value = weight(value, maximum);
    state.sum = __fadd_rn(state.sum, value);
  }
  return factor;
}

// Adds the sums of all lanes; each lane has summed its own tokens only.
template <int COLUMNS>
__device__ __forceinline__ void join_sums(SoftmaxState (&state)[COLUMNS][2]) {
#pragma unroll
  for (int n = 0; n < COLUMNS; n++) {
#pragma unroll
    for (int e = 0; e < 2; e++) {
#pragma unroll
      for (int mask = 4; mask < 32; mask *= 2) {
        state[n][e].sum += __shfl_xor_sync(0xffffffffu, state[n][e].sum, mask);
      }
    }
  }
}

// COLUMNS: tiles of 8 queries.
template <typename T, int DIM, int COLUMNS>
struct DecodeState {
  typedef KVRing<T, DIM> Ring;
  static constexpr int SLICES = DIM / 16;  // slices of 16 dims

  FragmentB query[COLUMNS][SLICES];
  FragmentD result[COLUMNS][SLICES];
  SoftmaxState state[COLUMNS][2];
  KeyRange keys[COLUMNS][2];

  // `query_of(q)` returns the elements of query q, or null past the last; `keys_of(q)` the keys
  // that it sees.
  template <typename Query, typename Keys>
  __device__ __forceinline__ DecodeState(Query query_of, Keys keys_of, int lane) {
#pragma unroll
    for (int n = 0; n < COLUMNS; n++) {
      const T* from = query_of(n * TENSOR_QUERIES + lane / 4);
#pragma unroll
      for (int c = 0; c < SLICES; c++) {
        const unsigned int* pairs =
            reinterpret_cast<const unsigned int*>(from + c * 16 + 2 * (lane % 4));
        query[n][c][0] = from ? pairs[0] : 0;
        query[n][c][1] = from ? pairs[4] : 0;
#pragma unroll
        for (int i = 0; i < 4; i++) {
          result[n][c][i] = 0.0f;
        }
      }
#pragma unroll
      for (int e = 0; e < 2; e++) {
        state[n][e].clear();
        keys[n][e] = keys_of(n * TENSOR_QUERIES + 2 * (lane % 4) + e);
      }
    }
  }

  // Adds the tile of tokens [first, first + 16): keys at shared address `tile`, then values.
  __device__ __forceinline__ void attend(
      unsigned int tile, int first, const AttentionParams& params, int lane) {
    FragmentD logits[COLUMNS][1] = {};
#pragma unroll
    for (int c = 0; c < SLICES; c++) {
      FragmentA key;  // 16 tokens x 16 dims
      load_matrices(key, tile + Ring::offset(lane % 16, 2 * c + lane / 16));
#pragma unroll
      for (int n = 0; n < COLUMNS; n++) {
        multiply_accumulate(logits[n][0], key, query[n][c], T(0.0f));
      }
    }

    FragmentB weights[COLUMNS];
#pragma unroll
    for (int n = 0; n < COLUMNS; n++) {
      float factor[2];
#pragma unroll
      for (int e = 0; e < 2; e++) {
        factor[e] =
            softmax_of_column(state[n][e], keys[n][e], e, logits[n], first + lane / 4, params);
      }
      transpose<T>(weights[n], logits[n][0]);
#pragma unroll
      for (int c = 0; c < SLICES; c++) {
#pragma unroll
        for (int i = 0; i < 4; i++) {
          result[n][c][i] *= factor[i % 2];
        }
      }
    }

#pragma unroll
    for (int c = 0; c < SLICES; c++) {
      FragmentA value;  // 16 dims x 16 tokens
      load_matrices_transposed(
          value, tile + Ring::TILE + Ring::offset(lane / 16 * 8 + lane % 8, 2 * c + lane / 8 % 2));
#pragma unroll
      for (int n = 0; n < COLUMNS; n++) {
        multiply_accumulate(result[n][c], value, weights[n], T(0.0f));
      }
    }
  }
};

}  // namespace paged
