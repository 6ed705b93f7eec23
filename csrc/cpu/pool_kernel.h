// Copyright © 2026 the mlx_paged authors. Apache-2.0.
//
// Converts one head of a token between numbers and codes. Scales are rounded up, so no code
// overflows however small the numbers are. A NaN or infinity turns everything that shares its scale
// into NaN, so that it cannot become a plausible number. Compiled once per instruction set; see
// simd.h.

#pragma once

#include "layer_kernel.h"
#include "pool_types.h"

namespace mlx_paged::cpu::MLX_PAGED_ISA {

constexpr uint16_t kHalfNan = 0x7e00;
constexpr float kLargestHalf = 65504.0f;

// Smallest half not below x >= 0, or the largest half.
inline uint16_t half_above(float x) {
  Half half;
  store_as(&half, x < kLargestHalf ? x : kLargestHalf);
  return half_to_float(half.bits) < x && half.bits < 0x7bff ? half.bits + 1 : half.bits;
}

// Largest half not above x, or the smallest half.
inline uint16_t half_below(float x) {
  Half half;
  float clamped = x < -kLargestHalf ? -kLargestHalf : x > kLargestHalf ? kLargestHalf : x;
  store_as(&half, clamped);
  if (half_to_float(half.bits) <= clamped) {
    return half.bits;
  }
  // The next smaller half: away from zero if negative; zero becomes the smallest negative.
  return half.bits & 0x8000 ? half.bits + 1 : half.bits == 0 ? 0x8001 : half.bits - 1;
}

inline void put_half(char* p, int index, uint16_t bits) {
  __builtin_memcpy(p + 2 * index, &bits, 2);
}

// Rounds to nearest integers, ties to even, which are then in the low bits.
inline VecU nearest(VecF x) {
  return as_uint(x + 0x1.8p23f);
}

inline bool all_finite(const float* x, int count) {
  VecF check = {};
  for (int d = 0; d < count; d += kWidth) {
    check += load(x + d) * 0.0f;
  }
  return sum(check) == 0.0f;
}

// In all encoders `x` is padded with zeros to whole vectors.
inline void encode_int8(const float* x, int dim, char* codes, char* scales) {
  VecF largest = {};
  for (int d = 0; d < dim; d += kWidth) {
    VecF v = load(x + d);
    largest = max(largest, max(v, -v));
  }
  if (!all_finite(x, dim)) {
    put_half(scales, 0, kHalfNan);
    __builtin_memset(codes, 0, dim);
    return;
  }
  uint16_t scale = half_above(max(largest) / 127.0f);
  put_half(scales, 0, scale);
  float step = half_to_float(scale);
  float inverse = step > 0 ? 1.0f / step : 0.0f;
  for (int d = 0; d < dim; d += kWidth) {
    // Clamping matters only if the scale is the largest half.
    VecF v = max(splat(-127.0f), load(x + d) * inverse);
    VecU bits = nearest(-max(splat(-127.0f), -v));
    for (int i = 0; i < kWidth && d + i < dim; i++) {
      codes[d + i] = char(bits[i]);
    }
  }
}

inline void encode_int4(const float* x, int dim, char* codes, char* scales) {
  for (int begin = 0; begin < dim; begin += kGroup) {
    int end = begin + kGroup < dim ? begin + kGroup : dim;
    float smallest = x[begin], largest = x[begin], check = 0;
    for (int d = begin; d < end; d++) {
      smallest = x[d] < smallest ? x[d] : smallest;
      largest = x[d] > largest ? x[d] : largest;
      check += x[d] * 0.0f;
    }
    int group = begin / kGroup;
    if (check != 0.0f) {  // true for NaN as well
      put_half(scales, 2 * group, kHalfNan);
      put_half(scales, 2 * group + 1, kHalfNan);
      __builtin_memset(codes + begin / 2, 0, (end - begin) / 2);
      continue;
    }
    uint16_t minimum = half_below(smallest);
    float base = half_to_float(minimum);
    uint16_t scale = half_above((largest - base) / 15.0f);
    put_half(scales, 2 * group, scale);
    put_half(scales, 2 * group + 1, minimum);
    float step = half_to_float(scale);
    float inverse = step > 0 ? 1.0f / step : 0.0f;
    for (int d = begin; d < end; d += 2) {
      uint32_t pair[2];
      for (int i = 0; i < 2; i++) {
        float code = (x[d + i] - base) * inverse;
        code = code < 0 ? 0 : code > 15 ? 15 : code;
        pair[i] = uint32_t(nearest(splat(code))[0]) & 15;
      }
      codes[d / 2] = char(pair[0] | pair[1] << 4);
    }
  }
}

// Numbers beyond 448 become 448; infinities become NaN.
inline uint8_t to_fp8(float x) {
  uint32_t u;
  __builtin_memcpy(&u, &x, 4);
  uint32_t sign = (u >> 24) & 0x80;
  uint32_t magnitude = u & 0x7fffffff;
  if (magnitude >= 0x7f800000) {
    return uint8_t(sign | 0x7f);
  }
  if (magnitude >= 0x43e00000) {  // 448
    return uint8_t(sign | 0x7e);
  }
  if (magnitude < 0x3c800000) {  // below 2^-6: adding 2^14 rounds at a subnormal's last bit
    float shifted;
    __builtin_memcpy(&shifted, &magnitude, 4);
    shifted += 0x1p14f;
    uint32_t bits;
    __builtin_memcpy(&bits, &shifted, 4);
    return uint8_t(sign | (bits - 0x46800000));
  }
  uint32_t rounded = magnitude + 0x7ffff + ((magnitude >> 20) & 1);
  return uint8_t(sign | ((rounded >> 20) - (120u << 3)));
}

inline void encode_fp8(const float* x, int dim, char* codes) {
  for (int d = 0; d < dim; d++) {
    codes[d] = char(to_fp8(x[d]));
  }
}

inline void quantize(
    const PoolArgs& args, const void* rows, const int32_t* slots, int64_t begin, int64_t end) {
  const PoolView& pool = args.pool;
  int dim = pool.head_dim;
  with_type(args.dtype, [&](auto type) {
    using T = decltype(type);
    float x[kMaxHeadDim + kWidth];
    for (int64_t i = begin; i < end; i++) {
      if (slots[i] < 0) {
        continue;
      }
      for (int head = 0; head < pool.num_kv_heads; head++) {
        const T* row = static_cast<const T*>(rows) + (i * pool.num_kv_heads + head) * dim;
        for (int d = 0; d < dim; d += kWidth) {
          store(x + d, d + kWidth <= dim ? load(row + d) : load_tail(row + d, dim - d));
        }
        if (args.rotated) {
          rotate(x, dim);
        }
        char* codes = pool.data + pool.codes_at(slots[i]) + head * pool.head_bytes();
        int in_block = slots[i] % pool.block_size;
        char* scales = pool.data + pool.scales_at(slots[i] / pool.block_size, head, in_block);
        switch (pool.format) {
          case PoolFormat::int8:
            encode_int8(x, dim, codes, scales);
            break;
          case PoolFormat::int4:
            encode_int4(x, dim, codes, scales);
            break;
          default:
            encode_fp8(x, dim, codes);
        }
      }
    }
  });
}

inline void dequantize(const PoolArgs& args, int64_t slot, int head, void* out) {
  const PoolView& pool = args.pool;
  int dim = pool.head_dim;
  float x[kMaxHeadDim + kWidth];
  const char* codes = pool.data + pool.codes_at(slot) + head * pool.head_bytes();
  const char* scales =
      pool.data + pool.scales_at(slot / pool.block_size, head, int(slot % pool.block_size));
  with_pool_type(args.dtype, pool.format, [&](auto type) {
    convert_row(pool, reinterpret_cast<const decltype(type)*>(codes), scales, dim, x);
  });
  if (pool.format == PoolFormat::int4) {
    dims_in_order(x, dim);
  }
  if (args.rotated) {
    rotate_back(x, dim);
  }
  with_type(args.dtype, [&](auto type) {
    using T = decltype(type);
    for (int d = 0; d < dim; d++) {
      store_as(static_cast<T*>(out) + d, x[d]);
    }
  });
}

}  // namespace mlx_paged::cpu::MLX_PAGED_ISA
