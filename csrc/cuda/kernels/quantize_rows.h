// Copyright © 2026 the mlx_paged authors. Apache-2.0.
//
// Writes quantized pools and rotates queries for power-of-two head dims, with the same bits as
// metal/quantized_pool.h. A lane holds eight adjacent dims (16 bytes of 16-bit elements), so a few
// lanes share a row and most of a rotation stays in registers.
//
// Rows of all heads and tokens form one sequence; keys and values use separate blocks of the grid.

#pragma once

#include "../tensor_shape.h"
#include "dependent_launch.h"
#include "quantized_pool.h"

namespace paged {

constexpr unsigned int turned_signs(int word) {  // for dims [32 word, 32 word + 32)
  unsigned int bits = 0;
  for (int i = 0; i < 32; i++) {
    bits |= (unsigned int)(changes_sign(32 * word + i)) << i;
  }
  return bits;
}

template <int WORD>
struct TurnedSigns {
  static constexpr unsigned int BITS = turned_signs(WORD);
};

// Selects the bits of `word` from the constants of words 0 to LAST.
template <int LAST>
__device__ __forceinline__ unsigned int turned_signs_of(int word) {
  unsigned int bits = TurnedSigns<LAST>::BITS;
  if constexpr (LAST > 0) {
    bits = word == LAST ? bits : turned_signs_of<LAST - 1>(word);
  }
  return bits;
}

template <int DIM>
struct RowPart {
  static constexpr int LANES = DIM / ROW_PART;  // lanes that share a row
  static_assert(LANES <= 32 && (LANES & (LANES - 1)) == 0);

  float x[ROW_PART];  // dims [ROW_PART * part(), ROW_PART * (part() + 1))

  __device__ __forceinline__ static int part() { return threadIdx.x % LANES; }

  template <typename T>
  __device__ __forceinline__ void load(const T* row, bool exists) {
    constexpr int VECTORS = ROW_PART * sizeof(T) / 16;
    constexpr int EACH = 16 / sizeof(T);
#pragma unroll
    for (int v = 0; v < VECTORS; v++) {
      uint4 vector(0);
      if (exists) {
        vector = reinterpret_cast<const uint4*>(row)[part() * VECTORS + v];
      }
#pragma unroll
      for (int i = 0; i < EACH; i++) {
        x[v * EACH + i] = float(reinterpret_cast<const T*>(&vector)[i]);
      }
    }
  }

  template <typename T>
  __device__ __forceinline__ void store(T* row) const {
    constexpr int VECTORS = ROW_PART * sizeof(T) / 16;
    constexpr int EACH = 16 / sizeof(T);
#pragma unroll
    for (int v = 0; v < VECTORS; v++) {
      uint4 vector;
#pragma unroll
      for (int i = 0; i < EACH; i++) {
        reinterpret_cast<T*>(&vector)[i] = T(x[v * EACH + i]);
      }
      reinterpret_cast<uint4*>(row)[part() * VECTORS + v] = vector;
    }
  }

  // Same order of additions as HeadRow::rotate, so that every sum rounds the same.
  __device__ __forceinline__ void rotate() {
    unsigned int turned = turned_signs_of<DIM / 32 - 1>(part() * ROW_PART / 32);
    turned >>= part() * ROW_PART % 32;
#pragma unroll
    for (int i = 0; i < ROW_PART; i++) {
      x[i] = __uint_as_float(__float_as_uint(x[i]) ^ (turned << (31 - i) & 0x80000000u));
    }
#pragma unroll
    for (int stride = 1; stride < ROW_PART; stride *= 2) {
#pragma unroll
      for (int i = 0; i < ROW_PART; i++) {
        if ((i & stride) == 0) {
          float a = x[i];
          float b = x[i + stride];
          x[i] = a + b;
          x[i + stride] = a - b;
        }
      }
    }
#pragma unroll
    for (int stride = 1; stride < LANES; stride *= 2) {
      float sign = part() & stride ? -1.0f : 1.0f;
#pragma unroll
      for (int i = 0; i < ROW_PART; i++) {
        x[i] = fmaf(x[i], sign, __shfl_xor_sync(0xffffffffu, x[i], stride));
      }
    }
    float norm = 1.0f / sqrtf(float(DIM));
#pragma unroll
    for (int i = 0; i < ROW_PART; i++) {
      x[i] *= norm;
    }
  }

  // Reduces this lane's value with its neighbors', over `lanes` lanes, by `f`.
  template <typename V, typename F>
  __device__ __forceinline__ static V over_lanes(V value, int lanes, F f) {
#pragma unroll
    for (int stride = 1; stride < lanes; stride *= 2) {
      value = f(value, __shfl_xor_sync(0xffffffffu, value, stride));
    }
    return value;
  }

  // Bits of the largest magnitude. Non-finite values compare above all others.
  __device__ __forceinline__ unsigned int largest_magnitude(int lanes) const {
    unsigned int largest = 0;
#pragma unroll
    for (int i = 0; i < ROW_PART; i++) {
      largest = ::max(largest, __float_as_uint(x[i]) & 0x7fffffffu);
    }
    return over_lanes(largest, lanes, [](unsigned int a, unsigned int b) { return ::max(a, b); });
  }

  // Return codes in the low ROW_PART * 8 or ROW_PART * 4 bits, and set the scale.
  __device__ __forceinline__ uint2 to_int8(ushort& scale) const {
    unsigned int largest = largest_magnitude(LANES);
    bool finite = largest < 0x7f800000u;
    scale = finite ? half_above(__uint_as_float(largest) / 127.0f) : ushort(HALF_NAN);
    float size = float(as_type<half>(scale));
    float inverse = size > 0.0f ? 1.0f / size : 0.0f;
    unsigned int bytes[ROW_PART];
#pragma unroll
    for (int i = 0; i < ROW_PART; i++) {
      bytes[i] = rounded(fminf(fmaxf(x[i] * inverse, -127.0f), 127.0f));
    }
    uint2 codes = make_uint2(join_bytes(bytes), join_bytes(bytes + 4));
    return finite ? codes : make_uint2(0, 0);
  }

  __device__ __forceinline__ unsigned int to_int4(unsigned int& group) const {
    constexpr int GROUP_LANES = CODE_GROUP / ROW_PART;
    float less = -x[0];
    float largest = x[0];
    float zero = x[0] * 0.0f;  // NaN if the element is not finite
#pragma unroll
    for (int i = 1; i < ROW_PART; i++) {
      less = fmaxf(less, -x[i]);
      largest = fmaxf(largest, x[i]);
      zero = fmaf(x[i], 0.0f, zero);
    }
    unsigned int group_mask = ((1u << GROUP_LANES) - 1) << (threadIdx.x % 32 & -GROUP_LANES);
    bool finite = (__ballot_sync(0xffffffffu, zero != 0.0f) & group_mask) == 0;
    auto more = [](float a, float b) { return fmaxf(a, b); };
    float lowest = -over_lanes(less, GROUP_LANES, more);
    largest = over_lanes(largest, GROUP_LANES, more);
    ushort minimum = finite ? half_below(lowest) : ushort(HALF_NAN);
    float base = float(as_type<half>(minimum));
    ushort scale = finite ? half_above((largest - base) / 15.0f) : ushort(HALF_NAN);
    float size = float(as_type<half>(scale));
    float inverse = size > 0.0f ? 1.0f / size : 0.0f;
    group = scale | static_cast<unsigned int>(minimum) << 16;
    unsigned int codes = -ROUNDED_ZERO * 0x11111111u;  // cancels the bits above each code
#pragma unroll
    for (int i = 0; i < ROW_PART; i++) {
      float value = fminf(fmaxf((x[i] - base) * inverse, 0.0f), 15.0f);
      codes += rounded(value) << (4 * i);
    }
    return finite ? codes : 0;
  }

  __device__ __forceinline__ uint2 to_fp8() const {
    unsigned int bytes[ROW_PART];
#pragma unroll
    for (int i = 0; i < ROW_PART; i++) {
      bytes[i] = to_e4m3(x[i]);
    }
    return make_uint2(join_bytes(bytes), join_bytes(bytes + 4));
  }

 private:
  // Rounds to the nearest integer and leaves it in the low bits: 2^23 + 2^22 has no fraction bits.
  static constexpr unsigned int ROUNDED_ZERO = 0x4b400000u;
  __device__ __forceinline__ static unsigned int rounded(float value) {
    return __float_as_uint(value + __uint_as_float(ROUNDED_ZERO));
  }

  __device__ __forceinline__ static unsigned int join_bytes(const unsigned int* bytes) {
    return __byte_perm(
        __byte_perm(bytes[0], bytes[1], 0x0040), __byte_perm(bytes[2], bytes[3], 0x0040), 0x5410);
  }
};

// Quantizes the thread's row of keys or values.
template <typename T, int DIM, int FORMAT, bool KEYS>
__device__ __forceinline__ void quantize_row(
    const T* rows, const int* slot_mapping, unsigned char* pool, const QuantizeParams& params) {
  typedef RowPart<DIM> Part;
  int index = (blockIdx.x * ROW_THREADS + threadIdx.x) / Part::LANES;  // token and head
  int token = index / params.num_kv_heads;
  int head = index - token * params.num_kv_heads;
  bool exists = token < params.num_tokens;
  Part part;
  part.load(rows + size_t(index) * DIM, exists);
  int slot = exists ? slot_mapping[token] : -1;
  if (KEYS && rotates_keys(FORMAT)) {
    part.rotate();
  }
  CodeOffsets offsets = code_offsets(
      ulong(slot >> params.block_shift), slot & ((1 << params.block_shift) - 1), params.block_shift,
      params.num_kv_heads, head, FORMAT, DIM);
  if constexpr (FORMAT == FORMAT_INT4) {
    unsigned int group;
    unsigned int codes = part.to_int4(group);
    if (slot >= 0) {
      reinterpret_cast<unsigned int*>(pool + offsets.codes)[Part::part()] = codes;
      if (Part::part() * ROW_PART % CODE_GROUP == 0) {
        reinterpret_cast<unsigned int*>(
            pool + offsets.scales)[Part::part() * ROW_PART / CODE_GROUP] = group;
      }
    }
  } else {
    ushort scale = 0;
    uint2 codes = FORMAT == FORMAT_INT8 ? part.to_int8(scale) : part.to_fp8();
    if (slot >= 0) {
      reinterpret_cast<uint2*>(pool + offsets.codes)[Part::part()] = codes;
      if (FORMAT == FORMAT_INT8 && Part::part() == 0) {
        *reinterpret_cast<ushort*>(pool + offsets.scales) = scale;
      }
    }
  }
}

}  // namespace paged

// Grid: (rows of all tokens and heads / rows per block, keys and values).
template <typename T, int DIM, int KEYS, int VALUES>
__global__ void __launch_bounds__(paged::ROW_THREADS) quantize_rows_entry(
    const T* keys, const T* values, const int* slot_mapping, unsigned char* key_pool,
    unsigned char* value_pool, const __grid_constant__ paged::QuantizeParams params) {
  using namespace paged;
  begin_after_kernel_before();
  if (blockIdx.y == 0) {
    quantize_row<T, DIM, KEYS, true>(keys, slot_mapping, key_pool, params);
  } else {
    quantize_row<T, DIM, VALUES, false>(values, slot_mapping, value_pool, params);
  }
}

// Grid: rows of all heads / rows per block.
template <typename T, int DIM>
__global__ void __launch_bounds__(paged::ROW_THREADS) rotate_rows_entry(
    const T* queries, T* rotated, const __grid_constant__ paged::RotateParams params) {
  using namespace paged;
  typedef RowPart<DIM> Part;
  begin_after_kernel_before();
  int index = (blockIdx.x * ROW_THREADS + threadIdx.x) / Part::LANES;
  bool exists = index < params.num_rows;
  Part part;
  part.load(queries + size_t(index) * DIM, exists);
  part.rotate();
  if (exists) {
    part.store(rotated + size_t(index) * DIM);
  }
}
