// Copyright © 2026 the mlx_paged authors. Apache-2.0.
//
// One warp's attention over its tokens of quantised pools, on tensor cores. Codes come straight to
// the registers of the lanes that multiply them, without shared memory: which dims are which rows
// and columns of a product is free, as long as both sides agree. So a lane reads 16 bytes side by
// side, and has in them a part of each of its fragments. Integers of 8 bits are exact in bfloat16;
// the scale of an int8 key multiplies the logit, that of a value the weight. The next tile is under
// way while one is computed.
//
// Lane 4 r + c has of a tile of 16 tokens (logits = K q, results = V^T p, as in decode_state.h)
//   keys    tokens r and r + 8, dims 64 h + 16 c + [0, 16) for each h: of slice 4 h + w four dims
//   values  tokens 2c, 2c + 1, 2c + 8, 2c + 9, dims DIM / 8 * r + [0, DIM / 8): two of each slice.

#pragma once

#include "../tensor_shape.h"
#include "block_table.h"
#include "decode_state.h"
#include "kernel_table.h"
#include "pool_codes.h"
#include "softmax_state.h"
#include "tensor_core.h"

namespace paged {

// Integers 0 to 127 less 0 or 128, at the bottom of each half of a word: 128 + n is 0x4300 | n.
__device__ __forceinline__ unsigned int difference(unsigned int a, unsigned int b, __nv_bfloat16) {
  __nv_bfloat162 d =
      __hsub2(*reinterpret_cast<__nv_bfloat162*>(&a), *reinterpret_cast<__nv_bfloat162*>(&b));
  return *reinterpret_cast<unsigned int*>(&d);
}

__device__ __forceinline__ unsigned int difference(unsigned int a, unsigned int b, __half) {
  __half2 d = __hsub2(*reinterpret_cast<__half2*>(&a), *reinterpret_cast<__half2*>(&b));
  return *reinterpret_cast<unsigned int*>(&d);
}

// Signed bytes in the lower half of each half of a word; the upper halves are not looked at.
__device__ __forceinline__ unsigned int from_bytes(unsigned int pair, __nv_bfloat16 type) {
  unsigned int magnitude = (pair & 0x007f007fu) | 0x43004300u;
  unsigned int offset = (pair & 0x00800080u) | 0x43004300u;  // 128, or 256 of a negative number
  return difference(magnitude, offset, type);
}

__device__ __forceinline__ unsigned int from_bytes(unsigned int pair, __half type) {
  return difference((pair & 0x00ff00ffu) ^ 0x64806480u, 0x64806480u, type);  // 1024 + 128 + n
}

// Nibbles 0 to 15, likewise.
__device__ __forceinline__ unsigned int from_nibbles(unsigned int pair, __nv_bfloat16 type) {
  return difference((pair & 0x000f000fu) | 0x43004300u, 0x43004300u, type);
}

__device__ __forceinline__ unsigned int from_nibbles(unsigned int pair, __half type) {
  return difference((pair & 0x000f000fu) | 0x64006400u, 0x64006400u, type);
}

// code * scale + minimum, of two tokens.
__device__ __forceinline__ unsigned int scaled(
    unsigned int codes, unsigned int scales, unsigned int minima, __nv_bfloat16) {
  __nv_bfloat162 x = __hfma2(
      *reinterpret_cast<__nv_bfloat162*>(&codes), *reinterpret_cast<__nv_bfloat162*>(&scales),
      *reinterpret_cast<__nv_bfloat162*>(&minima));
  return *reinterpret_cast<unsigned int*>(&x);
}

__device__ __forceinline__ unsigned int scaled(
    unsigned int codes, unsigned int scales, unsigned int minima, __half) {
  __half2 x = __hfma2(
      *reinterpret_cast<__half2*>(&codes), *reinterpret_cast<__half2*>(&scales),
      *reinterpret_cast<__half2*>(&minima));
  return *reinterpret_cast<unsigned int*>(&x);
}

__device__ __forceinline__ float half_value(unsigned int bits) {
  return __half2float(__ushort_as_half(static_cast<unsigned short>(bits)));
}

// Byte j of two words, at the bottom of each half of a word.
__device__ __forceinline__ unsigned int bytes_of(unsigned int a, unsigned int b, int j) {
  return __byte_perm(a, b, j | j << 4 | (4 + j) << 8 | (4 + j) << 12);
}

// Words side by side, which are read once. (In the order of the program: ahead of what is
// computed.)
__device__ __forceinline__ void read_words(
    const unsigned char* from, unsigned int (&to)[4], CachePolicy policy) {
  asm volatile("ld.global.L1::no_allocate.L2::cache_hint.v4.u32 {%0, %1, %2, %3}, [%4], %5;"
               : "=r"(to[0]), "=r"(to[1]), "=r"(to[2]), "=r"(to[3])
               : "l"(from), "l"(policy.bits));
}

__device__ __forceinline__ void read_words(
    const unsigned char* from, unsigned int (&to)[2], CachePolicy policy) {
  asm volatile("ld.global.L1::no_allocate.L2::cache_hint.v2.u32 {%0, %1}, [%2], %3;"
               : "=r"(to[0]), "=r"(to[1])
               : "l"(from), "l"(policy.bits));
}

__device__ __forceinline__ void read_words(
    const unsigned char* from, unsigned int (&to)[1], CachePolicy policy) {
  asm volatile("ld.global.L1::no_allocate.L2::cache_hint.u32 %0, [%1], %2;"
               : "=r"(to[0])
               : "l"(from), "l"(policy.bits));
}

// A lane's codes of a tile, and their scales. VALUES: FORMAT_INT8 or FORMAT_INT4; keys are int8.
template <int DIM, int VALUES>
struct QuantisedTile {
  static constexpr int KEY_PARTS = DIM / 64;
  static constexpr int VALUE_WORDS = DIM / (VALUES == FORMAT_INT4 ? 64 : 32);

  unsigned int keys[2][KEY_PARTS][4];
  unsigned int values[4][VALUE_WORDS];
  float key_scales[2];
  float value_scales[2];   // int8: of the tokens of the keys
  unsigned int groups[4];  // int4: scale and minimum of the tokens of the values

  // Tokens that are not seen are zeros with scales of zero: 0 x NaN would reach the results. The
  // tile lies in one block.
  __device__ __forceinline__ void load(
      const unsigned char* key_pool, const unsigned char* value_pool, int block, int shift,
      int heads, int head, int first, KeyRange seen, CachePolicy policy, int lane) {
    int begin = first & ((1 << shift) - 1);
    int r = lane / 4;
    int c = lane % 4;
    CodePlace key = code_place(ulong(block), begin, shift, heads, head, FORMAT_INT8, DIM);
    CodePlace value = code_place(ulong(block), begin, shift, heads, head, VALUES, DIM);
    const unsigned char* key_codes = key_pool + key.codes + c * 16;
    const unsigned char* value_codes = value_pool + value.codes + r * (VALUE_WORDS * 4);
    int key_pitch = heads * DIM;
    int value_pitch = heads * code_bytes(VALUES, DIM);
    auto exists = [&](int token) {
      return first + token >= seen.begin && first + token < seen.end;
    };
#pragma unroll
    for (int i = 0; i < 2; i++) {
      int token = r + 8 * i;
      bool is_seen = exists(token);
#pragma unroll
      for (int h = 0; h < KEY_PARTS; h++) {
        read_words(key_codes + size_t(token) * key_pitch + 64 * h, keys[i][h], policy);
      }
      key_scales[i] = is_seen ? scale_at(key_pool, key, token) : 0.0f;
      if (VALUES == FORMAT_INT8) {
        value_scales[i] = is_seen ? scale_at(value_pool, value, token) : 0.0f;
      }
    }
#pragma unroll
    for (int i = 0; i < 4; i++) {
      int token = 2 * c + i % 2 + i / 2 * 8;
      read_words(value_codes + size_t(token) * value_pitch, values[i], policy);
      if (VALUES == FORMAT_INT4) {
        int at = token * tail_bytes(VALUES, DIM) + r * (DIM / 8) / CODE_GROUP * 4;
        const unsigned char* from = value_pool + value.scales + at;
        groups[i] = exists(token) ? *reinterpret_cast<const unsigned int*>(from) : 0;
      }
    }
  }

 private:
  __device__ __forceinline__ static float scale_at(
      const unsigned char* pool, CodePlace place, int token) {
    return __half2float(*reinterpret_cast<const __half*>(pool + place.scales + token * 2));
  }
};

// COLUMNS: tiles of 8 queries, which were rotated as keys are.
template <typename T, int DIM, int COLUMNS, int VALUES>
struct QuantisedState {
  typedef QuantisedTile<DIM, VALUES> Tile;
  static constexpr int SLICES = DIM / 16;

  FragmentB query[COLUMNS][SLICES];
  FragmentD result[COLUMNS][SLICES];
  SoftmaxState state[COLUMNS][2];
  KeyRange keys[COLUMNS][2];

  template <typename Query, typename Keys>
  __device__ __forceinline__ QuantisedState(Query query_of, Keys keys_of, int lane) {
#pragma unroll
    for (int n = 0; n < COLUMNS; n++) {
      const T* from = query_of(n * TENSOR_QUERIES + lane / 4);
#pragma unroll
      for (int s = 0; s < SLICES; s++) {
        const unsigned int* pairs =
            reinterpret_cast<const unsigned int*>(from + s / 4 * 64 + lane % 4 * 16 + s % 4 * 4);
        query[n][s][0] = from ? pairs[0] : 0;
        query[n][s][1] = from ? pairs[1] : 0;
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

  // Adds the tile of tokens [first, first + 16).
  __device__ __forceinline__ void attend(
      const Tile& tile, int first, const AttentionParams& params, int lane) {
    FragmentD logits[COLUMNS] = {};
#pragma unroll
    for (int s = 0; s < SLICES; s++) {
      unsigned int upper = tile.keys[0][s / 4][s % 4];
      unsigned int lower = tile.keys[1][s / 4][s % 4];
      FragmentA key = {
          from_bytes(__byte_perm(upper, 0, 0x1100), T(0.0f)),
          from_bytes(__byte_perm(lower, 0, 0x1100), T(0.0f)),
          from_bytes(__byte_perm(upper, 0, 0x3322), T(0.0f)),
          from_bytes(__byte_perm(lower, 0, 0x3322), T(0.0f))};
#pragma unroll
      for (int n = 0; n < COLUMNS; n++) {
        multiply_accumulate(logits[n], key, query[n][s], T(0.0f));
      }
    }

    FragmentB weights[COLUMNS];
#pragma unroll
    for (int n = 0; n < COLUMNS; n++) {
      float factor[2];
#pragma unroll
      for (int i = 0; i < 4; i++) {
        logits[n][i] *= tile.key_scales[i / 2];
      }
#pragma unroll
      for (int e = 0; e < 2; e++) {
        factor[e] =
            softmax_of_column(state[n][e], keys[n][e], e, logits[n], first + lane / 4, params);
      }
      if (VALUES == FORMAT_INT8) {
#pragma unroll
        for (int i = 0; i < 4; i++) {
          logits[n][i] *= tile.value_scales[i / 2];
        }
      }
      transpose<T>(weights[n], logits[n]);
#pragma unroll
      for (int s = 0; s < SLICES; s++) {
#pragma unroll
        for (int i = 0; i < 4; i++) {
          result[n][s][i] *= factor[i % 2];
        }
      }
    }

    unsigned int scales[2];  // int4: of tokens 2c and 2c + 1, and of 2c + 8 and 2c + 9
    unsigned int minima[2];
    if (VALUES == FORMAT_INT4) {
#pragma unroll
      for (int i = 0; i < 2; i++) {
        unsigned int a = tile.groups[2 * i];
        unsigned int b = tile.groups[2 * i + 1];
        scales[i] = pack(half_value(a & 0xffff), half_value(b & 0xffff), T(0.0f));
        minima[i] = pack(half_value(a >> 16), half_value(b >> 16), T(0.0f));
      }
    }
#pragma unroll
    for (int s = 0; s < SLICES; s++) {
      FragmentA value;  // rows r: dim 2 s of the lane's, and r + 8: the next
#pragma unroll
      for (int i = 0; i < 2; i++) {
        if (VALUES == FORMAT_INT8) {
          unsigned int a = tile.values[2 * i][s / 2];
          unsigned int b = tile.values[2 * i + 1][s / 2];
          value[2 * i] = from_bytes(bytes_of(a, b, s % 2 * 2), T(0.0f));
          value[2 * i + 1] = from_bytes(bytes_of(a, b, s % 2 * 2 + 1), T(0.0f));
        } else {
          unsigned int pair =
              bytes_of(tile.values[2 * i][s / 4], tile.values[2 * i + 1][s / 4], s % 4);
          value[2 * i] = scaled(from_nibbles(pair, T(0.0f)), scales[i], minima[i], T(0.0f));
          value[2 * i + 1] =
              scaled(from_nibbles(pair >> 4, T(0.0f)), scales[i], minima[i], T(0.0f));
        }
      }
#pragma unroll
      for (int n = 0; n < COLUMNS; n++) {
        multiply_accumulate(result[n][s], value, weights[n], T(0.0f));
      }
    }
  }

  // The dim of result[n][s][0 or 1]; [2 or 3] are of the next.
  __device__ __forceinline__ static int dim_of(int s, int lane) {
    return DIM / 8 * (lane / 4) + 2 * s;
  }
};

}  // namespace paged
