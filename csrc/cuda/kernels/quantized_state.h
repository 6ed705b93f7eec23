// Copyright © 2026 the mlx_paged authors. Apache-2.0.
//
// One warp's attention over its tokens of quantized pools, on tensor cores; decode_state.h is the
// 16-bit version. All products are fp16 whatever the queries' dtype: converting codes to fp16 takes
// the fewest instructions and is exact.
//   - A power of two scales each query so that its largest element is near 2^14. Elements of
//     bfloat16 are then exact too unless they are 2^28 times smaller.
//   - The scale of an int8 key multiplies the logit. The scale and minimum of an int4 group apply
//     to that group's contribution.
//   - Values are scaled in fp16 before the product, like their scales.
//   - Weights are relative to a maximum that is 2^12 smaller, to keep small weights precise.

#pragma once

#include "code_fragments.h"
#include "code_ring.h"
#include "decode_state.h"
#include "shared_words.h"
#include "softmax_state.h"

namespace paged {

// COLUMNS: tiles of 8 queries, rotated as keys are. KEYS, VALUES: formats.
template <typename T, int DIM, int COLUMNS, int KEYS, int VALUES>
struct QuantizedState {
  typedef CodeRing<KEYS, VALUES, DIM> Ring;
  typedef KeyCodes<KEYS> Key;
  typedef ValueCodes<VALUES> Value;
  static constexpr int SLICES = DIM / 16;
  static constexpr int TILES = QUANTIZED_TOKENS / 16;
  static constexpr int GROUPS = DIM / 32;      // int4 groups
  static constexpr int WEIGHTS_EXPONENT = 12;  // weights reach 2^12

  FragmentB query[COLUMNS][SLICES];
  float query_unit[COLUMNS][2];                                    // the value of a 1 in `query`
  float query_sums[COLUMNS][KEYS == FORMAT_INT4 ? GROUPS : 1][2];  // over the dims of a group
  FragmentD result[COLUMNS][SLICES];
  SoftmaxState state[COLUMNS][2];
  KeyRange keys[COLUMNS][2];

  template <typename Query, typename Keys>
  __device__ __forceinline__ QuantizedState(Query query_of, Keys keys_of, int lane) {
#pragma unroll
    for (int n = 0; n < COLUMNS; n++) {
      load_query(n, query_of(n * TENSOR_QUERIES + lane / 4), lane);
#pragma unroll
      for (int s = 0; s < SLICES; s++) {
#pragma unroll
        for (int i = 0; i < 4; i++) {
          result[n][s][i] = 0.0f;
        }
      }
#pragma unroll
      for (int e = 0; e < 2; e++) {
        state[n][e].clear();
        keys[n][e] = keys_of(n * TENSOR_QUERIES + 2 * (lane % 4) + e);
      }
    }
  }

  // Adds the visible tokens `seen` of the tile [first, first + 32).
  __device__ __forceinline__ void attend(
      unsigned int tile, int first, KeyRange seen, const AttentionParams& params, int lane) {
    unsigned int values = tile + Ring::Keys::BYTES;
    if (Ring::Values::TAIL > 0 && (first < seen.begin || first + QUANTIZED_TOKENS > seen.end)) {
      hide_scales(values + Ring::Values::SCALES, first + lane, seen, lane);
    }
    FragmentD logits[COLUMNS][TILES];
    multiply_keys(logits, tile, lane);

#pragma unroll
    for (int n = 0; n < COLUMNS; n++) {
      float factor[2];
#pragma unroll
      for (int e = 0; e < 2; e++) {
        factor[e] = softmax_of_column<WEIGHTS_EXPONENT>(
            state[n][e], keys[n][e], e, logits[n], first + lane / 4, params);
      }
#pragma unroll
      for (int s = 0; s < SLICES; s++) {
#pragma unroll
        for (int i = 0; i < 4; i++) {
          result[n][s][i] *= factor[i % 2];
        }
      }
    }
    multiply_values(logits, values, lane);
  }

  // The dim of result[n][s][0 or 1]; [2 or 3] hold the next dim.
  __device__ __forceinline__ static int dim_of(int s, int lane) {
    return s / Value::SLICES * Value::SLICES * 16 + Value::dim(s % Value::SLICES, lane / 4);
  }

 private:
  __device__ __forceinline__ void load_query(int n, const T* from, int lane) {
    constexpr int CHUNKS = SLICES / Key::SLICES;
    float x[CHUNKS][Key::NUMBERS];
    float largest = 0.0f;
#pragma unroll
    for (int i = 0; i < CHUNKS; i++) {
      const unsigned int* pairs =
          reinterpret_cast<const unsigned int*>(from + (i * 4 + lane % 4) * Key::NUMBERS);
#pragma unroll
      for (int j = 0; j < Key::NUMBERS; j += 2) {
        unsigned int pair = from ? pairs[j / 2] : 0;
        x[i][j] = float(reinterpret_cast<const T*>(&pair)[0]);
        x[i][j + 1] = float(reinterpret_cast<const T*>(&pair)[1]);
        largest = fmaxf(largest, fmaxf(fabsf(x[i][j]), fabsf(x[i][j + 1])));
      }
    }
    largest = fmaxf(largest, __shfl_xor_sync(0xffffffffu, largest, 1));
    largest = fmaxf(largest, __shfl_xor_sync(0xffffffffu, largest, 2));
    // Biased exponent of the power of two, and of its inverse below.
    unsigned int exponent = min(127 + 14 + 127 - (__float_as_uint(largest) >> 23), 253u);
    float multiplier = __uint_as_float(exponent << 23);
    float unit = __uint_as_float((254 - exponent) << 23);
#pragma unroll
    for (int e = 0; e < 2; e++) {
      query_unit[n][e] = __shfl_sync(0xffffffffu, unit, 4 * (2 * (lane % 4) + e));
    }
#pragma unroll
    for (int i = 0; i < CHUNKS; i++) {
      FragmentD sums = {};
#pragma unroll
      for (int s = 0; s < Key::SLICES; s++) {
        FragmentB& to = query[n][i * Key::SLICES + s];
#pragma unroll
        for (int j = 0; j < 2; j++) {
          to[j] = pack(
              x[i][Key::number(s, 2 * j)] * multiplier,
              x[i][Key::number(s, 2 * j + 1)] * multiplier, __half(0.0f));
        }
        if (KEYS == FORMAT_INT4) {
          constexpr unsigned int ONES = 0x3c003c00u;
          FragmentA ones = {ONES, ONES, ONES, ONES};
          multiply_accumulate(sums, ones, to, __half(0.0f));
        }
      }
      if (KEYS == FORMAT_INT4) {
        query_sums[n][i][0] = sums[0];
        query_sums[n][i][1] = sums[1];
      }
    }
  }

  // Zeros the scales of hidden tokens: they may be NaN, and 0 x NaN would reach the results.
  __device__ __forceinline__ static void hide_scales(
      unsigned int scales, int token, KeyRange seen, int lane) {
    if (token < seen.begin || token >= seen.end) {
      unsigned int at = scales + lane * Ring::Values::TAIL;
      if (VALUES == FORMAT_INT8) {
        write_shared_half(at, 0);
      } else {
#pragma unroll
        for (int i = 0; i < Ring::Values::TAIL; i += 4) {
          write_shared(at + i, 0);
        }
      }
    }
    __syncwarp();
  }

  __device__ __forceinline__ void multiply_keys(
      FragmentD (&logits)[COLUMNS][TILES], unsigned int tile, int lane) const {
    typedef typename Ring::Keys Rows;
#pragma unroll
    for (int t = 0; t < TILES; t++) {
      unsigned int groups[2][GROUPS];  // int4: for tokens r and r + 8
      if (KEYS == FORMAT_INT4) {
#pragma unroll
        for (int i = 0; i < 2; i++) {
          read_shared(groups[i], tile + Rows::SCALES + (16 * t + 8 * i + lane / 4) * Rows::TAIL);
        }
      }
#pragma unroll
      for (int n = 0; n < COLUMNS; n++) {
#pragma unroll
        for (int i = 0; i < 4; i++) {
          logits[n][t][i] = 0.0f;
        }
      }
#pragma unroll
      for (int chunk = 0; chunk < Rows::CHUNKS; chunk += 2) {
        FragmentA words;  // for tokens r and r + 8, in two chunks
        load_matrices(words, tile + Rows::offset(16 * t + lane % 16, chunk + lane / 16));
#pragma unroll
        for (int i = 0; i < 2; i++) {
          FragmentA key[Key::SLICES];
          Key::decode(key, words[2 * i], words[2 * i + 1]);
#pragma unroll
          for (int n = 0; n < COLUMNS; n++) {
            const FragmentB* with = query[n] + (chunk + i) * Key::SLICES;
            if constexpr (KEYS == FORMAT_INT4) {
              FragmentD sums = {};
#pragma unroll
              for (int s = 0; s < Key::SLICES; s++) {
                multiply_accumulate(sums, key[s], with[s], __half(0.0f));
              }
#pragma unroll
              for (int j = 0; j < 4; j++) {
                __half2 group = as_halves(groups[j / 2][chunk + i]);
                float& to = logits[n][t][j];
                to = fmaf(sums[j], __low2float(group), to);
                to = fmaf(query_sums[n][chunk + i][j % 2], __high2float(group), to);
              }
            } else {
              multiply_accumulate(logits[n][t], key[0], with[0], __half(0.0f));
            }
          }
        }
      }
#pragma unroll
      for (int i = 0; i < 4; i++) {
        float scale = 1.0f;
        if (KEYS == FORMAT_INT8) {
          scale =
              read_shared_half(tile + Rows::SCALES + (16 * t + i / 2 * 8 + lane / 4) * Rows::TAIL);
        }
#pragma unroll
        for (int n = 0; n < COLUMNS; n++) {
          logits[n][t][i] *= scale * query_unit[n][i % 2];
        }
      }
    }
  }

  __device__ __forceinline__ void multiply_values(
      const FragmentD (&weights)[COLUMNS][TILES], unsigned int tile, int lane) {
    typedef typename Ring::Values Rows;
#pragma unroll
    for (int t = 0; t < TILES; t++) {
      FragmentB by[COLUMNS];
#pragma unroll
      for (int n = 0; n < COLUMNS; n++) {
        transpose<__half>(by[n], weights[n][t]);
      }
      // Scales of tokens 2c and 2c + 1, and of 2c + 8 and 2c + 9.
      unsigned int scales[2] = {};
      unsigned int minima[2] = {};
      unsigned int groups[4][GROUPS];  // int4
      unsigned int tail = tile + Rows::SCALES + (16 * t + 2 * (lane % 4)) * Rows::TAIL;
#pragma unroll
      for (int i = 0; i < 2; i++) {
        if constexpr (VALUES == FORMAT_INT8) {
          scales[i] = read_shared(tail + 8 * i * Rows::TAIL);
        } else if constexpr (VALUES == FORMAT_INT4) {
          read_shared(groups[2 * i], tail + 8 * i * Rows::TAIL);
          read_shared(groups[2 * i + 1], tail + (8 * i + 1) * Rows::TAIL);
        }
      }
#pragma unroll
      for (int chunk = 0; chunk < Rows::CHUNKS; chunk += 2) {
        FragmentA words;
        load_matrices_transposed(words, tile + Rows::offset(16 * t + lane % 16, chunk + lane / 16));
#pragma unroll
        for (int j = 0; j < 2; j++) {
          if constexpr (VALUES == FORMAT_INT4) {
#pragma unroll
            for (int i = 0; i < 2; i++) {
              unsigned int a = groups[2 * i][chunk + j];
              unsigned int b = groups[2 * i + 1][chunk + j];
              scales[i] = __byte_perm(a, b, 0x5410);
              minima[i] = __byte_perm(a, b, 0x7632);
            }
          }
          FragmentA value[Value::SLICES];
          Value::decode(value, words[2 * j], words[2 * j + 1], scales, minima);
#pragma unroll
          for (int n = 0; n < COLUMNS; n++) {
#pragma unroll
            for (int s = 0; s < Value::SLICES; s++) {
              multiply_accumulate(
                  result[n][(chunk + j) * Value::SLICES + s], value[s], by[n], __half(0.0f));
            }
          }
        }
      }
    }
  }
};

}  // namespace paged
