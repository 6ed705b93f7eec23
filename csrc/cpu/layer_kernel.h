// Copyright © 2026 the mlx_paged authors. Apache-2.0.
//
// What a layer does between its matrix products, one pass over memory each, in fp32; and greedy
// sampling. Compiled once for each instruction set, see simd.h.

#pragma once

#include "layer.h"
#include "simd.h"

namespace mlx_paged::cpu::MLX_PAGED_ISA {

template <typename T>
inline void store_vector(T* p, VecF v) {
  for (int i = 0; i < kWidth; i++) {
    store_as(p + i, v[i]);
  }
}

inline void store_vector(float* p, VecF v) {
  store(p, v);
}

inline float load_one(const float* p) {
  return *p;
}

template <typename T>
inline float load_one(const T* p) {
  return load_tail(p, 1)[0];
}

template <typename T>
inline void rope_head(const RopeArgs& args, const T* x, const float* cosines, T* out) {
  const float* sines = cosines + args.half_dims;
  int64_t step = args.dim_stride;
  // Distance between the two of a pair, and between pairs.
  int64_t apart = args.traditional ? 1 : args.half_dims;
  int64_t pairs = args.traditional ? 2 : 1;
  int i = 0;
  if (step == 1 && !args.traditional) {
    for (; i + kWidth <= args.half_dims; i += kWidth) {
      VecF c = load(cosines + i);
      VecF s = load(sines + i);
      VecF a = load(x + i);
      VecF b = load(x + apart + i);
      store_vector(out + i, a * c - b * s);
      store_vector(out + apart + i, a * s + b * c);
    }
  }
  for (; i < args.half_dims; i++) {
    float a = load_one(x + i * pairs * step);
    float b = load_one(x + (i * pairs + apart) * step);
    store_as(out + i * pairs, a * cosines[i] - b * sines[i]);
    store_as(out + i * pairs + apart, a * sines[i] + b * cosines[i]);
  }
  for (int d = 2 * args.half_dims; d < args.head_dim; d++) {
    out[d] = x[d * step];
  }
}

inline void rope(const RopeArgs& args, int64_t begin, int64_t end) {
  with_type(args.dtype, [&](auto type) {
    using T = decltype(type);
    for (int64_t row = begin; row < end; row++) {
      const float* cosines = args.rotations + row * 2 * args.half_dims;
      for (int head = 0; head < args.num_heads; head++) {
        const T* x =
            static_cast<const T*>(args.x) + row * args.row_stride + head * args.head_stride;
        T* out = static_cast<T*>(args.out) + (row * args.num_heads + head) * args.head_dim;
        rope_head(args, x, cosines, out);
      }
    }
  });
}

template <typename T>
inline void rms_norm_row(const RmsNormArgs& args, const T* x, const T* weight, T* out) {
  // Four sums: one addition would have to wait for the one before it.
  VecF sums[4] = {};
  int64_t i = 0;
  for (; i + 4 * kWidth <= args.size; i += 4 * kWidth) {
    for (int k = 0; k < 4; k++) {
      VecF v = load(x + i + k * kWidth);
      sums[k] += v * v;
    }
  }
  float total = sum((sums[0] + sums[1]) + (sums[2] + sums[3]));
  for (; i < args.size; i++) {
    float v = load_one(x + i);
    total += v * v;
  }
  float factor = 1.0f / __builtin_sqrtf(total / float(args.size) + args.eps);
  for (i = 0; i + kWidth <= args.size; i += kWidth) {
    VecF v = load(x + i) * factor;
    store_vector(out + i, weight ? v * load(weight + i) : v);
  }
  for (; i < args.size; i++) {
    float v = load_one(x + i) * factor;
    store_as(out + i, weight ? v * load_one(weight + i) : v);
  }
}

inline void rms_norm(const RmsNormArgs& args, int64_t begin, int64_t end) {
  with_type(args.dtype, [&](auto type) {
    using T = decltype(type);
    for (int64_t row = begin; row < end; row++) {
      rms_norm_row(
          args, static_cast<const T*>(args.x) + row * args.size, static_cast<const T*>(args.weight),
          static_cast<T*>(args.out) + row * args.size);
    }
  });
}

inline VecF silu_mul(VecF gate, VecF x) {
  // By e^-|gate|, which cannot overflow.
  VecF e = exp2(max(gate, -gate) * -1.44269504088896340736f);
  return gate * (select(gate < 0.0f, e, splat(1.0f)) / (1.0f + e)) * x;
}

inline void silu_mul(const SiluMulArgs& args, int64_t begin, int64_t end) {
  with_type(args.dtype, [&](auto type) {
    using T = decltype(type);
    auto* gate = static_cast<const T*>(args.gate);
    auto* x = static_cast<const T*>(args.x);
    auto* out = static_cast<T*>(args.out);
    int64_t i = begin;
    for (; i + kWidth <= end; i += kWidth) {
      store_vector(out + i, silu_mul(load(gate + i), load(x + i)));
    }
    for (; i < end; i++) {
      VecF result = silu_mul(splat(load_one(gate + i)), splat(load_one(x + i)));
      store_as(out + i, result[0]);
    }
  });
}

template <typename T>
inline void greedy_row(
    const GreedyArgs& args, const T* logits, int32_t* token, float* largest_logit) {
  // Each lane keeps the first largest of its own column.
  VecF best = splat(-kInf);
  VecI at = {};
  VecI best_at;
  VecI nans = {};
  for (int lane = 0; lane < kWidth; lane++) {
    at[lane] = lane;
  }
  best_at = at;
  int64_t i = 0;
  for (; i + kWidth <= args.size; i += kWidth) {
    VecF v = load(logits + i);
    VecI larger = v > best;
    nans |= v != v;
    best = larger ? v : best;
    best_at = larger ? at : best_at;
    at += kWidth;
  }
  float largest = -kInf;
  int32_t first = 0;
  bool found_nan = false;
  for (int lane = 0; lane < kWidth; lane++) {
    found_nan |= nans[lane] != 0;
    if (best[lane] > largest || (best[lane] == largest && best_at[lane] < first)) {
      largest = best[lane];
      first = best_at[lane];
    }
  }
  for (; i < args.size; i++) {
    float v = load_one(logits + i);
    found_nan |= v != v;
    if (v > largest) {
      largest = v;
      first = int32_t(i);
    }
  }
  *token = first;
  *largest_logit = found_nan ? __builtin_nanf("") : largest;
}

inline void greedy(const GreedyArgs& args, int64_t begin, int64_t end) {
  with_type(args.dtype, [&](auto type) {
    using T = decltype(type);
    for (int64_t row = begin; row < end; row++) {
      greedy_row(
          args, static_cast<const T*>(args.logits) + row * args.size, args.tokens + row,
          args.largest + row);
      float largest = args.largest[row];
      bool is_finite = largest - largest == 0;
      args.reported[row] = is_finite ? args.tokens[row] : -1;
    }
  });
}

}  // namespace mlx_paged::cpu::MLX_PAGED_ISA
