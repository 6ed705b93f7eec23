// Copyright © 2026 the mlx_paged authors. Apache-2.0.
//
// See int8.h. Of many rows: the codes of 32 columns are laid out anew, so that a vector has four
// codes of each of sixteen columns and no sum crosses a vector. For AVX-512 with VNNI.

#pragma once

#include "int8_kernel.h"
#include "transpose.h"

namespace mlx_paged::cpu::MLX_PAGED_ISA {

#if defined(__AVX512VNNI__)
constexpr int kLeastTileRows = 24;

struct Int8Tile {
  static constexpr int kVectors = kInt8TileColumns / kWidth;
  static constexpr int kUnits = 8;  // of four codes, in a group

  uint8_t* codes;  // [chunk, group, unit, vector, kWidth, 4]
  float* scales;   // [group of weights, 2: scale and bias, kInt8TileColumns]

  Int8Tile(float* scratch, const WeightView& w)
      : codes(reinterpret_cast<uint8_t*>(scratch)),
        scales(scratch + int64_t(num_int8_chunks(w.k)) * kInt8Chunk * kInt8TileColumns / 4) {}

  const uint8_t* group(int chunk, int g) const {
    constexpr int kBytes = kInt8Group * kInt8TileColumns;
    return codes + int64_t(chunk * kInt8Groups + g) * kBytes;
  }
};

template <int Bits>
inline void fill_codes(const WeightView& w, int64_t column, int columns, const Int8Tile& tile) {
  constexpr int kBytes = kInt8Chunk * Bits / 8;
  constexpr int kVectors = kBytes / 64;
  const int row_bytes = w.k * Bits / 8;
  for (int v = 0; v < Int8Tile::kVectors; v++) {
    const uint8_t* p[kWidth];
    for (int j = 0; j < kWidth; j++) {  // (those that are missing are the last one again)
      int at = v * kWidth + j < columns ? v * kWidth + j : columns - 1;
      p[j] = static_cast<const uint8_t*>(w.data) + (column + at) * w.row_bytes;
    }
    for (int c = 0; c < num_int8_chunks(w.k); c++) {
      __m512i low[kWidth], high[kWidth];
      for (int j = 0; j < kWidth; j++) {
        __m512i read[kVectors];
        for (int i = 0; i < kVectors; i++) {
          int at = c * kBytes + i * 64;
          int left = row_bytes - at < 64 ? row_bytes - at : 64;
          __mmask64 mask = left <= 0 ? 0 : ~uint64_t(0) >> (64 - left);
          read[i] = _mm512_maskz_loadu_epi8(mask, p[j] + at);
        }
        VecU8 first, second;
        load_codes<Bits>(reinterpret_cast<const uint8_t*>(read), 0, first, second);
        low[j] = (__m512i)first;
        high[j] = (__m512i)second;
      }
      transpose(low);
      transpose(high);
      for (int g = 0; g < kInt8Groups; g++) {
        auto to = const_cast<uint8_t*>(tile.group(c, g)) + v * 64;
        for (int i = 0; i < 4; i++) {
          constexpr int kUnitBytes = 64 * Int8Tile::kVectors;
          _mm512_store_si512(to + i * kUnitBytes, low[4 * g + i]);
          _mm512_store_si512(to + (4 + i) * kUnitBytes, high[4 * g + i]);
        }
      }
    }
  }
}

inline void fill_scales(const WeightView& w, int64_t column, int columns, const Int8Tile& tile) {
  const int groups = w.k / w.group_size;
  with_type(w.dtype, [&](auto type) {
    using T = decltype(type);
    const void* both[2] = {w.scales, w.biases};
    for (int which = 0; which < 2; which++) {
      for (int v = 0; v < Int8Tile::kVectors; v++) {
        for (int first = 0; first < groups; first += kWidth) {
          __m512i rows[kWidth];
          int left = groups - first;
          for (int j = 0; j < kWidth; j++) {
            int at = v * kWidth + j < columns ? v * kWidth + j : columns - 1;
            const T* p = static_cast<const T*>(both[which]) + (column + at) * groups + first;
            rows[j] = (__m512i)(left >= kWidth ? load(p) : load_tail(p, left));
          }
          transpose(rows);
          for (int g = 0; g < kWidth && g < left; g++) {
            float* to = tile.scales + (int64_t(first + g) * 2 + which) * kInt8TileColumns;
            store(to + v * kWidth, (VecF)rows[g]);
          }
        }
      }
    }
  });
}

template <int Rows>
inline void tile_rows_of(
    const Int8ProductArgs& args, const Int8Tile& tile, int row, int64_t column, int columns) {
  constexpr int kVectors = Int8Tile::kVectors;
  const int chunks = num_int8_chunks(args.weights.k);
  const int groups = args.weights.k / kInt8Group;
  const int shift = group_shift(args.weights.group_size);
  const Int8Chunk* x = args.x + int64_t(row) * chunks;
  // Every fourth group is added up by itself: the order of int8_block.
  VecF sums[kInt8Groups][Rows][kVectors] = {};
  for (int group = 0; group < groups; group++) {
    const int c = group / kInt8Groups;
    const int g = group % kInt8Groups;
    const uint8_t* codes = tile.group(c, g);
    __m512i products[Rows][kVectors] = {};
    for (int unit = 0; unit < Int8Tile::kUnits; unit++) {
      __m512i w[kVectors];
      for (int v = 0; v < kVectors; v++) {
        w[v] = _mm512_load_si512(codes + (unit * kVectors + v) * 64);
      }
      const int at = unit / 4 * (kInt8Chunk / 2) + 16 * g + 4 * (unit % 4);
      for (int i = 0; i < Rows; i++) {
        __m512i four = _mm512_set1_epi32(load_as<int32_t>(x[int64_t(i) * chunks + c].codes + at));
        for (int v = 0; v < kVectors; v++) {
          products[i][v] = _mm512_dpbusd_epi32(products[i][v], w[v], four);
        }
      }
    }
    const float* scales = tile.scales + int64_t(group >> shift) * 2 * kInt8TileColumns;
    VecF scale[kVectors], bias[kVectors];
    for (int v = 0; v < kVectors; v++) {
      scale[v] = load(scales + v * kWidth);
      bias[v] = load(scales + kInt8TileColumns + v * kWidth);
    }
    for (int i = 0; i < Rows; i++) {
      const Int8Chunk& xc = x[int64_t(i) * chunks + c];
      for (int v = 0; v < kVectors; v++) {
        const VecF scaled = to_float((VecU)products[i][v]) * xc.scales[4 * g];
        sums[g][i][v] += scaled * scale[v];
        sums[g][i][v] += xc.sums[4 * g] * bias[v];
      }
    }
  }
  for (int i = 0; i < Rows; i++) {
    alignas(64) float out[kInt8TileColumns];
    for (int v = 0; v < kVectors; v++) {
      store(out + v * kWidth, (sums[0][i][v] + sums[1][i][v]) + (sums[2][i][v] + sums[3][i][v]));
    }
    __builtin_memcpy(args.c + int64_t(row + i) * args.ldc + column, out, columns * sizeof(float));
  }
}

template <int Bits>
inline void int8_tiles(const Int8ProductArgs& args, int64_t begin, int64_t end) {
  const Int8Tile tile(args.scratch, args.weights);
  for (int64_t column = begin; column < end; column += kInt8TileColumns) {
    int columns = end - column < kInt8TileColumns ? int(end - column) : kInt8TileColumns;
    fill_codes<Bits>(args.weights, column, columns, tile);
    fill_scales(args.weights, column, columns, tile);
    int row = 0;
    for (; row + 8 <= args.rows; row += 8) {
      tile_rows_of<8>(args, tile, row, column, columns);
    }
    if (row + 4 <= args.rows) {
      tile_rows_of<4>(args, tile, row, column, columns);
      row += 4;
    }
    switch (args.rows - row) {
      case 1:
        tile_rows_of<1>(args, tile, row, column, columns);
        break;
      case 2:
        tile_rows_of<2>(args, tile, row, column, columns);
        break;
      case 3:
        tile_rows_of<3>(args, tile, row, column, columns);
        break;
    }
  }
}
#else
constexpr int kLeastTileRows = 0;
#endif

inline void int8_product(const Int8ProductArgs& args, int64_t begin, int64_t end) {
#if defined(__AVX512VNNI__)
  if (args.rows >= kLeastTileRows) {
    return args.weights.bits == 4 ? int8_tiles<4>(args, begin, end)
                                  : int8_tiles<8>(args, begin, end);
  }
#endif
  return args.weights.bits == 4 ? int8_columns<4>(args, begin, end)
                                : int8_columns<8>(args, begin, end);
}

}  // namespace mlx_paged::cpu::MLX_PAGED_ISA
