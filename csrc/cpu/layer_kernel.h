// Copyright © 2026 the mlx_paged authors. Apache-2.0.
//
// Fused fp32 kernels for everything between a layer's matrix products, and greedy sampling; each
// makes one pass over memory. Compiled once per instruction set; see simd.h.

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
  // Distance between the elements of a pair, and between pairs.
  int64_t pair_stride = args.traditional ? 1 : args.half_dims;
  int64_t pairs = args.traditional ? 2 : 1;
  int i = 0;
  if (step == 1 && !args.traditional) {
    for (; i + kWidth <= args.half_dims; i += kWidth) {
      VecF c = load(cosines + i);
      VecF s = load(sines + i);
      VecF a = load(x + i);
      VecF b = load(x + pair_stride + i);
      store_vector(out + i, a * c - b * s);
      store_vector(out + pair_stride + i, a * s + b * c);
    }
  }
  for (; i < args.half_dims; i++) {
    float a = load_one(x + i * pairs * step);
    float b = load_one(x + (i * pairs + pair_stride) * step);
    store_as(out + i * pairs, a * cosines[i] - b * sines[i]);
    store_as(out + i * pairs + pair_stride, a * sines[i] + b * cosines[i]);
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
  // Four sums, because each addition waits for the previous one.
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

template <typename T>
inline void layer_norm_row(
    const LayerNormArgs& args, const T* x, const T* weight, const T* bias, T* out) {
  // Sum of f(element), with four sums as in rms_norm_row.
  auto total = [&](auto f) {
    VecF sums[4] = {};
    int64_t i = 0;
    for (; i + 4 * kWidth <= args.size; i += 4 * kWidth) {
      for (int k = 0; k < 4; k++) {
        sums[k] += f(load(x + i + k * kWidth));
      }
    }
    float rest = 0;
    for (; i < args.size; i++) {
      rest += f(splat(load_one(x + i)))[0];
    }
    return sum((sums[0] + sums[1]) + (sums[2] + sums[3])) + rest;
  };
  const float mean = total([](VecF v) { return v; }) / float(args.size);
  float variance = total([mean](VecF v) { return (v - mean) * (v - mean); }) / float(args.size);
  const float factor = 1.0f / __builtin_sqrtf(variance + args.eps);
  auto normed = [&](VecF v, auto load_at) {
    v = (v - mean) * factor;
    v = weight ? v * load_at(weight) : v;
    return bias ? v + load_at(bias) : v;
  };
  int64_t i = 0;
  for (; i + kWidth <= args.size; i += kWidth) {
    store_vector(out + i, normed(load(x + i), [i](const T* p) { return load(p + i); }));
  }
  for (; i < args.size; i++) {
    auto one = [i](const T* p) { return splat(load_one(p + i)); };
    store_as(out + i, normed(one(x), one)[0]);
  }
}

inline void layer_norm(const LayerNormArgs& args, int64_t begin, int64_t end) {
  with_type(args.dtype, [&](auto type) {
    using T = decltype(type);
    for (int64_t row = begin; row < end; row++) {
      layer_norm_row(
          args, static_cast<const T*>(args.x) + row * args.size, static_cast<const T*>(args.weight),
          static_cast<const T*>(args.bias), static_cast<T*>(args.out) + row * args.size);
    }
  });
}

inline VecF sigmoid(VecF x) {
  // Uses e^-|x|, which cannot overflow.
  VecF e = exp2(max(x, -x) * -1.44269504088896340736f);
  return select(x < 0.0f, e, splat(1.0f)) / (1.0f + e);
}

inline VecF silu_mul(VecF gate, VecF x) {
  return gate * sigmoid(gate) * x;
}

// Accurate to 1e-7: a polynomial of x^2 near zero, 1 - e^p(|x|) elsewhere.
inline VecF erf(VecF x) {
  VecF a = max(x, -x);
  VecF x2 = x * x;
  VecF p = a * -1.72853470e-5f + 3.83197126e-4f;
  p = p * x2 + (a * -3.88396438e-3f + 2.42546219e-2f);
  p = p * a - 1.06777877e-1f;
  p = p * a - 6.34846687e-1f;
  p = p * a - 1.28717512e-1f;
  p = p * a - a;
  VecF far = 1.0f - exp2(p * 1.44269504088896340736f);
  VecF near = x2 * -5.96761703e-4f + 4.99119423e-3f;
  near = near * x2 - 2.67681349e-2f;
  near = near * x2 + 1.12819925e-1f;
  near = near * x2 - 3.76125336e-1f;
  near = near * x2 + 1.28379166e-1f;
  near = near * x + x;
  return select(a > 0.921875f, select(x < 0.0f, -far, far), near);
}

inline VecF gelu(GeluKind kind, VecF x) {
  switch (kind) {
    case GeluKind::none:
      return x * ((1.0f + erf(x * 0.70710678118654752440f)) * 0.5f);
    case GeluKind::tanh:  // (1 + tanh(u)) / 2 is the sigmoid of 2 u
      return x * sigmoid(1.59576912160573071176f * (x + 0.044715f * (x * x * x)));
    case GeluKind::fast:
      break;
  }
  return x * sigmoid(1.702f * x);
}

// gate * sigmoid(alpha * gate) * (x + 1), with gate clipped from above and x on both sides.
inline VecF clipped_swiglu(const ClippedSwigluArgs& args, VecF gate, VecF x) {
  VecF limit = splat(args.limit);
  gate = select(gate > limit, limit, gate);
  x = select(x > limit, limit, select(x < -limit, -limit, x));
  return (x + 1.0f) * (gate * sigmoid(args.alpha * gate));
}

// Applies `f` to vectors of one or two inputs, then to the remaining elements.
template <typename F, typename T, typename... Inputs>
inline void map_elements(F f, int64_t begin, int64_t end, T* out, const Inputs*... in) {
  int64_t i = begin;
  for (; i + kWidth <= end; i += kWidth) {
    store_vector(out + i, f(load(in + i)...));
  }
  for (; i < end; i++) {
    store_as(out + i, f(splat(load_one(in + i))...)[0]);
  }
}

inline void silu_mul(const SiluMulArgs& args, int64_t begin, int64_t end) {
  with_type(args.dtype, [&](auto type) {
    using T = decltype(type);
    map_elements(
        [](VecF gate, VecF x) { return silu_mul(gate, x); }, begin, end, static_cast<T*>(args.out),
        static_cast<const T*>(args.gate), static_cast<const T*>(args.x));
  });
}

inline void gelu(const GeluArgs& args, int64_t begin, int64_t end) {
  with_type(args.dtype, [&](auto type) {
    using T = decltype(type);
    map_elements(
        [&](VecF x) { return gelu(args.kind, x); }, begin, end, static_cast<T*>(args.out),
        static_cast<const T*>(args.x));
  });
}

inline void clipped_swiglu(const ClippedSwigluArgs& args, int64_t begin, int64_t end) {
  with_type(args.dtype, [&](auto type) {
    using T = decltype(type);
    map_elements(
        [&](VecF gate, VecF x) { return clipped_swiglu(args, gate, x); }, begin, end,
        static_cast<T*>(args.out), static_cast<const T*>(args.gate), static_cast<const T*>(args.x));
  });
}

template <typename T>
inline void greedy_row(
    const GreedyArgs& args, const T* logits, int32_t* token, float* largest_logit) {
  // Each lane keeps the first maximum of its column.
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

// Adapters are read in short runs, far apart, which the hardware prefetcher misses.
inline void fetch(const void* p) {
  __builtin_prefetch(p, 0, 2);  // to the second level: the first is too small for the time it takes
}

// hidden[row, r...] = x[row] . a[r...] for `Rows` rows of x and `Columns` rows of a.
template <int Rows, int Columns, typename T>
inline void lora_down_columns(const LoraArgs& args, int64_t r) {
  const T* a = static_cast<const T*>(args.a) + r * args.k;
  const T* next = static_cast<const T*>(args.next) + r * args.k;
  VecF sums[Rows][Columns] = {};
  int i = 0;
  for (; i + kWidth <= args.k; i += kWidth) {
    VecF x[Rows];
    for (int row = 0; row < Rows; row++) {
      x[row] = load(args.x[row] + i);
    }
    for (int c = 0; c < Columns; c++) {
      VecF v = load(a + int64_t(c) * args.k + i);
      fetch(next + int64_t(c) * args.k + i);
      for (int row = 0; row < Rows; row++) {
        sums[row][c] += x[row] * v;
      }
    }
  }
  if (i < args.k) {
    for (int c = 0; c < Columns; c++) {
      VecF v = load_tail(a + int64_t(c) * args.k + i, args.k - i);
      for (int row = 0; row < Rows; row++) {
        sums[row][c] += load_tail(args.x[row] + i, args.k - i) * v;
      }
    }
  }
  for (int row = 0; row < Rows; row++) {
    for (int c = 0; c < Columns; c++) {
      args.hidden[row][r + c] = sum(sums[row][c]);
    }
  }
}

// `Vectors` vectors of `Rows` rows of out, from column i on.
template <int Rows, int Vectors, typename T>
inline void lora_up_vectors(const LoraArgs& args, int64_t i) {
  const T* b = static_cast<const T*>(args.b) + i;
  const T* next = static_cast<const T*>(args.next) + i;
  VecF sums[Rows][Vectors] = {};
  for (int r = 0; r < args.rank; r++) {
    VecF v[Vectors];
    for (int j = 0; j < Vectors; j++) {
      int64_t at = int64_t(r) * args.n + j * kWidth;
      v[j] = load(b + at);
      fetch(next + at);
    }
    for (int row = 0; row < Rows; row++) {
      VecF h = splat(args.hidden[row][r]);
      for (int j = 0; j < Vectors; j++) {
        sums[row][j] += h * v[j];
      }
    }
  }
  for (int row = 0; row < Rows; row++) {
    for (int j = 0; j < Vectors; j++) {
      float* out = args.out[row] + i + j * kWidth;
      store(out, load(out) + sums[row][j]);
    }
  }
}

template <int N>
struct Constant {
  static constexpr int value = N;
};

// Calls body(T{}, Constant<number of rows>{}).
template <typename Body>
inline void with_lora_rows(const LoraArgs& args, const Body& body) {
  with_type(args.dtype, [&](auto type) {
    switch (args.num_rows) {
      case 1:
        return body(type, Constant<1>{});
      case 2:
        return body(type, Constant<2>{});
      case 3:
        return body(type, Constant<3>{});
      default:
        return body(type, Constant<kLoraRows>{});
    }
  });
}

inline void lora_down(const LoraArgs& args, int64_t begin, int64_t end) {
  with_lora_rows(args, [&](auto type, auto rows) {
    using T = decltype(type);
    int64_t r = begin;
    for (; r + kLoraColumns <= end; r += kLoraColumns) {
      lora_down_columns<rows.value, kLoraColumns, T>(args, r);
    }
    for (; r < end; r++) {
      lora_down_columns<rows.value, 1, T>(args, r);
    }
  });
}

inline void lora_up(const LoraArgs& args, int64_t begin, int64_t end) {
  with_lora_rows(args, [&](auto type, auto rows) {
    using T = decltype(type);
    int64_t i = begin;
    for (; i + 4 * kWidth <= end; i += 4 * kWidth) {
      lora_up_vectors<rows.value, 4, T>(args, i);
    }
    for (; i + 2 * kWidth <= end; i += 2 * kWidth) {
      lora_up_vectors<rows.value, 2, T>(args, i);
    }
    for (; i + kWidth <= end; i += kWidth) {
      lora_up_vectors<rows.value, 1, T>(args, i);
    }
    const T* b = static_cast<const T*>(args.b) + i;
    for (int row = 0; row < rows.value && i < end; row++) {
      VecF sums = {};
      for (int r = 0; r < args.rank; r++) {
        sums += splat(args.hidden[row][r]) * load_tail(b + int64_t(r) * args.n, int(end - i));
      }
      for (int64_t j = i; j < end; j++) {
        args.out[row][j] += sums[j - i];
      }
    }
  });
}

}  // namespace mlx_paged::cpu::MLX_PAGED_ISA
