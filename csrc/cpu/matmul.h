// Copyright © 2026 the mlx_paged authors. Apache-2.0.
//
// The two products of attention for a few lanes, over rows at any address and in any pool type.
// Compiled once per instruction set; see simd.h.

#pragma once

#include "simd.h"
#include "sums.h"
#include "transpose.h"

namespace mlx_paged::cpu::MLX_PAGED_ISA {

constexpr int kTile = 64;  // tokens

// scores[r * kTile + i] = q_r . k_i for R lanes and N tokens. Queries are padded with zeros to
// whole vectors.
template <int R, int N, typename T>
inline void dot(
    const float* q, int q_stride, const T* const* keys, int offset, int dim, float* scores) {
  VecF sums[R][N];
  // Not `= {}`: GCC clears the stack for that with an instruction as slow as the sums.
#pragma GCC unroll 4
  for (int r = 0; r < R; r++) {
#pragma GCC unroll 4
    for (int i = 0; i < N; i++) {
      sums[r][i] = VecF{};
    }
  }
  auto add = [&](int d, auto load_key) {
    VecF kv[N];
    for (int i = 0; i < N; i++) {
      kv[i] = load_key(keys[i] + offset + d);
    }
    for (int r = 0; r < R; r++) {
      VecF qv = load(q + r * q_stride + d);
      for (int i = 0; i < N; i++) {
        sums[r][i] += qv * kv[i];
      }
    }
  };
  int d = 0;
  for (; d + kWidth <= dim; d += kWidth) {
    add(d, [](const T* p) { return load(p); });
  }
  if (d < dim) {
    add(d, [&](const T* p) { return load_tail(p, dim - d); });
  }
  store_sums(sums, scores, kTile);
}

#if defined(__AVX512F__)
constexpr int kTransposed = 2 * kWidth;  // tokens of a transposed piece of a tile

// Transposes rows [begin, begin + kTransposed) of a tile whose first of `count` rows is at `first`.
// Places without a row repeat the nearest one.
inline void transpose_keys(
    const float* const* rows, int first, int count, int begin, int dim, float* out) {
  for (int v = 0; v < kTransposed; v += kWidth) {
    const float* from[kWidth];
    for (int t = 0; t < kWidth; t++) {
      const int i = begin + v + t - first;
      from[t] = rows[i < 0 ? 0 : i < count ? i : count - 1];
    }
    for (int d = 0; d < dim; d += kWidth) {
      __m512i vectors[kWidth];
      for (int t = 0; t < kWidth; t++) {
        vectors[t] = (__m512i)load(from[t] + d);
      }
      transpose(vectors);
      for (int i = 0; i < kWidth; i++) {
        store(out + (d + i) * kTransposed + v, (VecF)vectors[i]);
      }
    }
  }
}

// The same as dot() for kTransposed tokens of `keys` [dim, kTransposed], in the same order: a
// vector's element becomes a vector of tokens, and its additions are those of store_sums. That
// needs no shuffles, which take as long there as a head dim of 64.
template <int R>
inline void dot_transposed(
    const float* q, int q_stride, const float* keys, int dim, float* scores) {
  constexpr int kVectors = kTransposed / kWidth;
  struct Sums {
    VecF of[R][kVectors];
    Sums operator+(const Sums& other) const {
      Sums result;
      for (int r = 0; r < R; r++) {
        for (int v = 0; v < kVectors; v++) {
          result.of[r][v] = of[r][v] + other.of[r][v];
        }
      }
      return result;
    }
  };
  auto sum_of_two = [&](int d, int other) {
    Sums a{}, b{};
    for (; d < dim; d += kWidth, other += kWidth) {
      VecF ka[kVectors], kb[kVectors];
      for (int v = 0; v < kVectors; v++) {
        ka[v] = load(keys + d * kTransposed + v * kWidth);
        kb[v] = load(keys + other * kTransposed + v * kWidth);
      }
      for (int r = 0; r < R; r++) {
        const VecF qa = splat(q[r * q_stride + d]);
        const VecF qb = splat(q[r * q_stride + other]);
        for (int v = 0; v < kVectors; v++) {
          a.of[r][v] += qa * ka[v];
          b.of[r][v] += qb * kb[v];
        }
      }
    }
    return a + b;
  };
  auto sum_of_quarter = [&](int d) { return sum_of_two(d, d + 2) + sum_of_two(d + 1, d + 3); };
  const Sums low = sum_of_quarter(0) + sum_of_quarter(4);
  const Sums high = sum_of_quarter(8) + sum_of_quarter(12);
  const Sums all = low + high;
  for (int r = 0; r < R; r++) {
    for (int v = 0; v < kVectors; v++) {
      store(scores + r * kTile + v * kWidth, all.of[r][v]);
    }
  }
}
#endif

// out[r * out_stride + c] = alpha[r] * itself + sum_i a[r * a_stride + i] * b[i][b_offset + c], for
// R rows and C vectors of columns. The last vector has `tail` elements (0: all are whole).
template <int R, int C, bool Tail = false, typename T>
inline void multiply(
    const float* a, int a_stride, const T* const* b, int b_offset, int depth, const float* alpha,
    float* out, int out_stride, int tail = 0) {
  VecF acc[R][C];
  for (int r = 0; r < R; r++) {
    for (int c = 0; c < C; c++) {
      acc[r][c] = alpha[r] * load(out + r * out_stride + c * kWidth);
    }
  }
  for (int i = 0; i < depth; i++) {
    VecF bv[C];
    for (int c = 0; c < C; c++) {
      const T* p = b[i] + b_offset + c * kWidth;
      bv[c] = Tail ? load_tail(p, tail) : load(p);
    }
    for (int r = 0; r < R; r++) {
      float av = a[r * a_stride + i];
      for (int c = 0; c < C; c++) {
        acc[r][c] += av * bv[c];
      }
    }
  }
  for (int r = 0; r < R; r++) {
    for (int c = 0; c < C; c++) {
      store(out + r * out_stride + c * kWidth, acc[r][c]);
    }
  }
}

template <int R, typename T>
inline void multiply_rows(
    const float* a, int a_stride, const T* const* b, int b_offset, int depth, const float* alpha,
    float* out, int out_stride, int columns) {
  int c = 0;
#if defined(__AVX512F__)  // has enough registers
  for (; c + 4 * kWidth <= columns; c += 4 * kWidth) {
    multiply<R, 4>(a, a_stride, b, b_offset + c, depth, alpha, out + c, out_stride);
  }
#endif
  for (; c + 2 * kWidth <= columns; c += 2 * kWidth) {
    multiply<R, 2>(a, a_stride, b, b_offset + c, depth, alpha, out + c, out_stride);
  }
  if (c + kWidth <= columns) {
    multiply<R, 1>(a, a_stride, b, b_offset + c, depth, alpha, out + c, out_stride);
    c += kWidth;
  }
  if (c < columns) {
    multiply<R, 1, true>(
        a, a_stride, b, b_offset + c, depth, alpha, out + c, out_stride, columns - c);
  }
}

// Splits `lanes` into groups of R = 4, then 3, 2 or 1, and calls body(r, R) with a compile-time R.
template <int R>
struct Lanes {
  static constexpr int kCount = R;
};

template <typename Body>
inline void for_lanes(int lanes, const Body& body) {
  int r = 0;
  for (; r + 4 <= lanes; r += 4) {
    body(r, Lanes<4>());
  }
  switch (lanes - r) {
    case 3:
      return body(r, Lanes<3>());
    case 2:
      return body(r, Lanes<2>());
    case 1:
      return body(r, Lanes<1>());
  }
}

// out [lanes, out_stride] = alpha * out + a [lanes, a_stride] x b [depth][b_offset .. + columns].
template <typename T>
inline void matmul(
    int lanes, const float* a, int a_stride, const T* const* b, int b_offset, int depth,
    const float* alpha, float* out, int out_stride, int columns) {
  for_lanes(lanes, [&](int r, auto group) {
    multiply_rows<decltype(group)::kCount>(
        a + r * a_stride, a_stride, b, b_offset, depth, alpha + r, out + size_t(r) * out_stride,
        out_stride, columns);
  });
}

}  // namespace mlx_paged::cpu::MLX_PAGED_ISA
