// Copyright © 2026 the mlx_paged authors. Apache-2.0.
//
// One warp's attention of sixteen queries: logits[query][token] = Q K^T, results[query][dim] = P V.
// A lane holds parts of rows lane / 4 and lane / 4 + 8 of both, and the first product's result is
// the second one's left operand as it is. The warp multiplies alone or as part of a warpgroup
// (prefill_together.h), with the same bits.

#pragma once

#include "../tensor_shape.h"
#include "block_table.h"
#include "kernel_table.h"
#include "softmax_state.h"
#include "tensor_core.h"

namespace paged {

template <typename T, int DIM>
struct PrefillState {
  static constexpr int TOKENS = PREFILL_TENSOR_TOKENS;
  static constexpr int SLICES = DIM / 16;  // slices of 16 dims
  static constexpr int ROW_CHUNKS = DIM / 8;

  FragmentA query[SLICES];
  FragmentD result[DIM / 8];
  SoftmaxState state[2];
  KeyRange keys[2];
  KeyRange any;     // keys that any of the warp's queries sees
  KeyRange common;  // keys that all of its queries see, including those past the last

  // `query_of(q)` returns the elements of query q, or null past the last; `keys_of(q)` the keys
  // that it sees.
  template <typename Query, typename Keys>
  __device__ __forceinline__ PrefillState(Query query_of, Keys keys_of, int lane) {
    any = {0x7fffffff, 0};
    common = {0, 0x7fffffff};
#pragma unroll
    for (int e = 0; e < 2; e++) {
      const T* from = query_of(lane / 4 + 8 * e);
#pragma unroll
      for (int c = 0; c < SLICES; c++) {
        const unsigned int* pairs =
            reinterpret_cast<const unsigned int*>(from + c * 16 + lane % 4 * 2);
        query[c][e] = from ? pairs[0] : 0;
        query[c][2 + e] = from ? pairs[4] : 0;
      }
      state[e].clear();
      keys[e] = keys_of(lane / 4 + 8 * e);
      if (keys[e].begin < keys[e].end) {
        any = {min(any.begin, keys[e].begin), max(any.end, keys[e].end)};
      }
      common = {max(common.begin, keys[e].begin), min(common.end, keys[e].end)};
    }
#pragma unroll
    for (int c = 0; c < DIM / 8; c++) {
#pragma unroll
      for (int i = 0; i < 4; i++) {
        result[c][i] = 0.0f;
      }
    }
#pragma unroll
    for (int mask = 4; mask < 32; mask *= 2) {
      any.begin = min(any.begin, __shfl_xor_sync(0xffffffffu, any.begin, mask));
      any.end = max(any.end, __shfl_xor_sync(0xffffffffu, any.end, mask));
      common.begin = max(common.begin, __shfl_xor_sync(0xffffffffu, common.begin, mask));
      common.end = min(common.end, __shfl_xor_sync(0xffffffffu, common.end, mask));
    }
  }

  // True if any query can see the tile at `first`. Uniform across the warp.
  __device__ __forceinline__ bool sees(int first) const {
    return first < any.end && first + TOKENS > any.begin;
  }

  // Adds the tile of tokens [first, first + 64): keys at shared address `tile`, then values.
  __device__ __forceinline__ void attend(
      unsigned int tile, int first, const AttentionParams& params, int lane) {
    FragmentD logits[TOKENS / 8] = {};
    // Four matrices make one left operand, or right operands of two 8-column tiles.
    int token = lane / 16 * 8 + lane % 8;
    int half = lane / 8 % 2;
#pragma unroll
    for (int c = 0; c < SLICES; c++) {
#pragma unroll
      for (int n = 0; n < TOKENS / 16; n++) {
        FragmentA key;  // 16 tokens x 16 dims
        load_matrices(key, tile + tile_offset<ROW_CHUNKS>(16 * n + token, 2 * c + half));
        multiply_accumulate(logits[2 * n], query[c], {key[0], key[1]}, T(0.0f));
        multiply_accumulate(logits[2 * n + 1], query[c], {key[2], key[3]}, T(0.0f));
      }
    }
    float factors[2];
    softmax(logits, factors, first, params, lane);
    scale_results(factors);
    unsigned int values = tile + TOKENS * DIM * 2;
    int value_token = lane % 16;
    int value_half = lane / 16;
#pragma unroll
    for (int n = 0; n < TOKENS / 16; n++) {
      FragmentA weights;
      pack_weights(weights, logits, n);
#pragma unroll
      for (int c = 0; c < SLICES; c++) {
        FragmentA value;  // 16 tokens x 16 dims
        load_matrices_transposed(
            value, values + tile_offset<ROW_CHUNKS>(16 * n + value_token, 2 * c + value_half));
        multiply_accumulate(result[2 * c], weights, {value[0], value[1]}, T(0.0f));
        multiply_accumulate(result[2 * c + 1], weights, {value[2], value[3]}, T(0.0f));
      }
    }
  }

  // Adds the sums of the lanes; each lane has summed its own tokens only.
  __device__ __forceinline__ void join_lanes() {
#pragma unroll
    for (int e = 0; e < 2; e++) {
      state[e].sum += __shfl_xor_sync(0xffffffffu, state[e].sum, 1);
      state[e].sum += __shfl_xor_sync(0xffffffffu, state[e].sum, 2);
    }
  }

  // Turns logits of tokens [first, first + 64) into weights. Sets `factors`, which rescale earlier
  // results of both rows to the new maxima.
  __device__ __forceinline__ void softmax(
      FragmentD (&logits)[TOKENS / 8], float (&factors)[2], int first,
      const AttentionParams& params, int lane) {
    // One branch for all of them, because a tanh behind its own branch would not be overlapped.
    if (PAGED_HAS_SOFTCAP(params.options)) {
#pragma unroll
      for (int n = 0; n < TOKENS / 8; n++) {
#pragma unroll
        for (int i = 0; i < 4; i++) {
          logits[n][i] = capped<DeviceMath>(logits[n][i] * params.options.scale, params.options);
        }
      }
    } else {
#pragma unroll
      for (int n = 0; n < TOKENS / 8; n++) {
#pragma unroll
        for (int i = 0; i < 4; i++) {
          logits[n][i] *= params.options.scale;
        }
      }
    }
    if (first < common.begin || first + TOKENS > common.end) {
      int token = first + lane % 4 * 2;  // the lane's first column
#pragma unroll
      for (int n = 0; n < TOKENS / 8; n++) {
#pragma unroll
        for (int i = 0; i < 4; i++) {
          int at = token + 8 * n + i % 2;
          if (at < keys[i / 2].begin || at >= keys[i / 2].end) {
            logits[n][i] = -INFINITY;
          }
        }
      }
    }
#pragma unroll
    for (int e = 0; e < 2; e++) {
      SoftmaxState& s = state[e];
      float maximum = s.maximum;
#pragma unroll
      for (int n = 0; n < TOKENS / 8; n++) {
        maximum = fmaxf(maximum, fmaxf(logits[n][2 * e], logits[n][2 * e + 1]));
      }
      maximum = fmaxf(maximum, __shfl_xor_sync(0xffffffffu, maximum, 1));
      maximum = fmaxf(maximum, __shfl_xor_sync(0xffffffffu, maximum, 2));
      factors[e] = rescale(s.maximum, maximum);
      float base = maximum == -INFINITY ? 0.0f : maximum;
      float sum = 0.0f;
#pragma unroll
      for (int n = 0; n < TOKENS / 8; n++) {
#pragma unroll
        for (int i = 2 * e; i < 2 * e + 2; i++) {
          logits[n][i] = weight(logits[n][i], base);
          sum += logits[n][i];
        }
      }
      s.maximum = maximum;
      s.sum = s.sum * factors[e] + sum;
    }
  }

  __device__ __forceinline__ void scale_results(const float (&factors)[2]) {
#pragma unroll
    for (int c = 0; c < DIM / 8; c++) {
#pragma unroll
      for (int i = 0; i < 4; i++) {
        result[c][i] *= factors[i / 2];
      }
    }
  }

  // Packs the weights of tokens [16 n, 16 n + 16) of the tile as a left operand.
  __device__ __forceinline__ static void pack_weights(
      FragmentA& to, const FragmentD (&weights)[TOKENS / 8], int n) {
#pragma unroll
    for (int i = 0; i < 4; i++) {
      const FragmentD& from = weights[2 * n + i / 2];
      to[i] = pack(from[i % 2 * 2], from[i % 2 * 2 + 1], T(0.0f));
    }
  }
};

}  // namespace paged
