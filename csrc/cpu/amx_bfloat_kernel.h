// Copyright © 2026 the mlx_paged authors. Apache-2.0.
//
// Implements bfloat.h with AMX tiles. A tile product sums even and odd elements of a block of k
// separately, then adds both to the result. AVX-512's instruction sums in another order, so these
// rows have the same bits only among themselves.

#pragma once

#include "amx_tiles.h"
#include "bfloat_kernel.h"

namespace mlx_paged::cpu::MLX_PAGED_ISA {

// Rounded activations of kTileRows rows and one block of k. Three parts: the smallest first.
template <int Parts>
struct BFloatRows {
  uint16_t values[Parts][kTileRows][kBFloatBlock];
};

inline __m256i upper_halves(VecU bits) {
  return _mm512_cvtepi32_epi16((__m512i)(bits >> 16));
}

// Splits numbers into three bfloat16 values with the same sum, by truncation. Infinities and NaNs
// have only a first part.
inline void split_in_three(VecF v, __m256i (&parts)[3]) {
  const VecU bits = as_uint(v);
  const VecU first = bits & 0xffff0000u;
  const VecI is_finite = (VecI)((bits & 0x7f800000u) != 0x7f800000u);
  const VecF rest = select(is_finite, v - as_float(first), VecF{});
  const VecU second = as_uint(rest) & 0xffff0000u;
  const VecU is_nan = (VecU)((bits & 0x7fffffffu) > 0x7f800000u);
  parts[2] = upper_halves(first | (is_nan & 0x400000u));
  parts[1] = upper_halves(second);
  parts[0] = upper_halves(as_uint(rest - as_float(second)));
}

template <int Parts>
inline void round_bfloat_rows(const BFloatRoundArgs& args, int begin, int end) {
  const int64_t blocks = bfloat_stride(args.k) / kBFloatBlock;
  for (int row = begin; row < end; row++) {
    auto to = reinterpret_cast<BFloatRows<Parts>*>(args.out) + row / kTileRows * blocks;
    for (int i = 0; i < blocks * kBFloatBlock; i += kWidth) {
      const VecF v = load_padded(args.x + row * args.stride + i, args.k - i);
      __m256i parts[Parts];
      if constexpr (Parts == 1) {
        parts[0] = (__m256i)_mm512_cvtneps_pbh((__m512)v);
      } else {
        split_in_three(v, parts);
      }
      for (int p = 0; p < Parts; p++) {
        uint16_t* at = to[i / kBFloatBlock].values[p][row % kTileRows] + i % kBFloatBlock;
        __builtin_memcpy(at, &parts[p], sizeof(parts[p]));
      }
    }
  }
}

// Multiplies one or two tiles of rows by two of columns. `x`: of the tiles of rows.
template <int Parts, int RowTiles, typename Tiles>
inline void multiply_bfloat_tiles(
    Tiles& tiles, const BFloatRows<Parts>* x, int64_t blocks, const __m512i* weights,
    float (&out)[RowTiles][kTileVectors][kTileRows][kWidth]) {
  static_assert(RowTiles <= 2 && kTileVectors == 2);
  constexpr bool kTwo = RowTiles == 2;
  constexpr int kX = 0, kWeights = 2, kSums = 4;
  constexpr int64_t kWeightStride = kTileVectors * kTileRowBytes;
  tiles.template zero<kSums>();
  tiles.template zero<kSums + 1>();
  tiles.template zero<kSums + 2>();
  tiles.template zero<kSums + 3>();
  for (int64_t block = 0; block < blocks; block++) {
    const __m512i* w = weights + block * (kBFloatBlock / 2) * kTileVectors;
    tiles.template load<kWeights>(w, kWeightStride);
    tiles.template load<kWeights + 1>(w + 1, kWeightStride);
    for (int p = 0; p < Parts; p++) {
      tiles.template load<kX>(x[block].values[p], kTileRowBytes);
      tiles.template multiply_bfloats<kSums, kX, kWeights>();
      tiles.template multiply_bfloats<kSums + 1, kX, kWeights + 1>();
      if constexpr (kTwo) {
        tiles.template load<kX + 1>(x[blocks + block].values[p], kTileRowBytes);
        tiles.template multiply_bfloats<kSums + 2, kX + 1, kWeights>();
        tiles.template multiply_bfloats<kSums + 3, kX + 1, kWeights + 1>();
      }
    }
  }
  tiles.template store<kSums>(out[0][0], kTileRowBytes);
  tiles.template store<kSums + 1>(out[0][1], kTileRowBytes);
  if constexpr (kTwo) {
    tiles.template store<kSums + 2>(out[1][0], kTileRowBytes);
    tiles.template store<kSums + 3>(out[1][1], kTileRowBytes);
  }
}

template <int Parts, typename Tiles>
inline void amx_bfloat_product(const BFloatProductArgs& args, int64_t begin, int64_t end) {
  auto weights = reinterpret_cast<__m512i*>(args.scratch);
  auto x = reinterpret_cast<const BFloatRows<Parts>*>(args.x);
  const int64_t blocks = bfloat_stride(args.weights.k) / kBFloatBlock;
  Tiles tiles(kWholeTiles);
  for (int64_t column = begin; column < end; column += kBFloatTileColumns) {
    int columns = end - column < kBFloatTileColumns ? int(end - column) : kBFloatTileColumns;
    fill_pairs(args.weights, column, columns, 0, args.weights.k, weights);
    auto rows = [&]<int RowTiles>(int row) {
      alignas(64) float sums[RowTiles][kTileVectors][kTileRows][kWidth];
      multiply_bfloat_tiles<Parts, RowTiles>(
          tiles, x + row / kTileRows * blocks, blocks, weights, sums);
      for (int i = 0; i < RowTiles * kTileRows && row + i < args.rows; i++) {
        float* to = args.c + int64_t(row + i) * args.ldc + column;
        for (int v = 0; v * kWidth < columns; v++) {
          const int left = columns - v * kWidth;
          __builtin_memcpy(
              to + v * kWidth, sums[i / kTileRows][v][i % kTileRows],
              (left < kWidth ? left : kWidth) * sizeof(float));
        }
      }
    };
    int row = 0;
    for (; row + kTileRows < args.rows; row += 2 * kTileRows) {
      rows.template operator()<2>(row);
    }
    if (row < args.rows) {
      rows.template operator()<1>(row);
    }
  }
}

template <int Parts, typename Tiles>
constexpr BFloatKernels kAmxBFloatKernels = {
    round_bfloat_rows<Parts>, amx_bfloat_product<Parts, Tiles>, Parts, kTileRows, true};

}  // namespace mlx_paged::cpu::MLX_PAGED_ISA
