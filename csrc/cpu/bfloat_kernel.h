// Copyright © 2026 the mlx_paged authors. Apache-2.0.
//
// Implements bfloat.h. Repacks pairs of elements of 32 columns so that a vector holds one pair from
// each of sixteen columns, and no sum crosses lanes.

#pragma once

#include "bfloat.h"
#include "simd.h"
#include "transpose.h"

namespace mlx_paged::cpu::MLX_PAGED_ISA {

constexpr int kPairs = 16;  // per vector
constexpr int kTileVectors = kBFloatTileColumns / kWidth;

inline VecF load_padded(const float* p, int left) {
  return left >= kWidth ? load(p) : left > 0 ? load_tail(p, left) : VecF{};
}

inline void round_bfloat(const BFloatRoundArgs& args, int begin, int end) {
  const int64_t padded = bfloat_stride(args.k);
  for (int row = begin; row < end; row++) {
    uint16_t* to = args.out + row * padded;
    for (int i = 0; i < padded; i += kWidth) {
      const VecF v = load_padded(args.x + row * args.stride + i, args.k - i);
      __m256bh rounded = _mm512_cvtneps_pbh((__m512)v);
      __builtin_memcpy(to + i, &rounded, sizeof(rounded));
    }
  }
}

// Packs `count` elements of each of 32 columns, which `column_at(i)` finds, as [pair, vector,
// kWidth, 2], with zeros up to a whole kBFloatBlock.
template <typename ColumnAt>
inline void fill_pairs(const ColumnAt& column_at, int count, __m512i* tile) {
  for (int v = 0; v < kTileVectors; v++) {
    for (int first = 0; first < count; first += 2 * kPairs) {
      int left = count - first;
      __mmask32 mask = left >= 2 * kPairs ? ~0u : (1u << left) - 1;
      __m512i rows[kWidth];
      for (int j = 0; j < kWidth; j++) {
        rows[j] = _mm512_maskz_loadu_epi16(mask, column_at(v * kWidth + j) + first);
      }
      transpose(rows);
      for (int i = 0; i < kPairs; i++) {
        tile[(first / 2 + i) * kTileVectors + v] = rows[i];
      }
    }
  }
}

// The same for elements [begin, begin + count) of columns of a matrix.
inline void fill_pairs(
    const WeightView& w, int64_t column, int columns, int begin, int count, __m512i* tile) {
  auto column_at = [&](int i) {
    const int64_t at = column + (i < columns ? i : columns - 1);  // missing ones repeat the last
    auto p = static_cast<const char*>(w.data) + at * w.row_bytes;
    return reinterpret_cast<const BFloat*>(p) + begin;
  };
  fill_pairs(column_at, count, tile);
}

// Adds the products of one part of k to `Rows` rows of c, or stores them.
template <int Rows>
inline void multiply_pairs(
    const __m512i* tile, int pairs, const uint16_t* x, int64_t stride, float* c, int64_t ldc,
    int columns, bool is_first) {
  __mmask16 mask[kTileVectors];
  __m512 sums[Rows][kTileVectors];
  for (int v = 0; v < kTileVectors; v++) {
    int left = columns - v * kWidth;
    mask[v] = left >= kWidth ? 0xffff : left > 0 ? (1 << left) - 1 : 0;
    for (int i = 0; i < Rows; i++) {
      sums[i][v] =
          is_first ? _mm512_setzero_ps() : _mm512_maskz_loadu_ps(mask[v], c + i * ldc + v * kWidth);
    }
  }
  for (int pair = 0; pair < pairs; pair++) {
    __m512bh w[kTileVectors];
    for (int v = 0; v < kTileVectors; v++) {
      w[v] = (__m512bh)tile[pair * kTileVectors + v];
    }
    for (int i = 0; i < Rows; i++) {
      auto two = (__m512bh)_mm512_set1_epi32(load_as<int32_t>(x + i * stride + 2 * pair));
      for (int v = 0; v < kTileVectors; v++) {
        sums[i][v] = _mm512_dpbf16_ps(sums[i][v], w[v], two);
      }
    }
  }
  for (int i = 0; i < Rows; i++) {
    for (int v = 0; v < kTileVectors; v++) {
      _mm512_mask_storeu_ps(c + i * ldc + v * kWidth, mask[v], sums[i][v]);
    }
  }
}

inline void bfloat_product(const BFloatProductArgs& args, int64_t begin, int64_t end) {
  auto tile = reinterpret_cast<__m512i*>(args.scratch);
  const WeightView& w = args.weights;
  const int64_t stride = bfloat_stride(w.k);
  for (int64_t column = begin; column < end; column += kBFloatTileColumns) {
    int columns = end - column < kBFloatTileColumns ? int(end - column) : kBFloatTileColumns;
    for (int from = 0; from < w.k; from += kBFloatPart) {
      int count = w.k - from < kBFloatPart ? w.k - from : kBFloatPart;
      fill_pairs(w, column, columns, from, count, tile);
      auto rows = [&]<int Rows>(int row) {
        multiply_pairs<Rows>(
            tile, (count + 1) / 2, args.x + row * stride + from, stride,
            args.c + row * args.ldc + column, args.ldc, columns, from == 0);
      };
      int row = 0;
      for (; row + 8 <= args.rows; row += 8) {
        rows.template operator()<8>(row);
      }
      for (; row + 4 <= args.rows; row += 4) {
        rows.template operator()<4>(row);
      }
      for (; row < args.rows; row++) {
        rows.template operator()<1>(row);
      }
    }
  }
}

}  // namespace mlx_paged::cpu::MLX_PAGED_ISA
