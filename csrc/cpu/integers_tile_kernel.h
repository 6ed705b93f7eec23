// Copyright © 2026 the mlx_paged authors. Apache-2.0.
//
// Implements integers.h for many rows: repacks the codes of 32 columns so that a vector holds four
// codes from each of sixteen columns, and no sum crosses lanes. For AVX-512 with VNNI.

#pragma once

#include "integers_kernel.h"
#include "transpose.h"

namespace mlx_paged::cpu::MLX_PAGED_ISA {

#if defined(__AVX512VNNI__)
template <int Digits>
constexpr int kMinTileRows = Digits == 1 ? 24 : 32;

struct IntegerTile {
  static constexpr int kVectors = kIntegerTileColumns / kWidth;
  static constexpr int kUnits = 8;  // of four codes, per group

  uint8_t* codes;  // [group, unit, vector, kWidth, 4]
  float* scales;   // [weight group, 2: scale and bias, kIntegerTileColumns]

  IntegerTile(float* scratch, const WeightView& w)
      : codes(reinterpret_cast<uint8_t*>(scratch)),
        scales(
            scratch + int64_t(num_integer_chunks(w.k)) * kIntegerChunk * kIntegerTileColumns / 4) {}

  uint8_t* at(int group, int unit, int v) const {
    return codes + ((int64_t(group) * kUnits + unit) * kVectors + v) * 64;
  }

  template <int Bits>
  void fill(const WeightView& w, int64_t column, int columns) const;
};

// Calls put(group, unit, vector, codes) with each unit of four codes of each of sixteen columns;
// groups past the end of k are zeros. Prefetches the next columns, which the next call reads after
// all rows were multiplied by these.
template <int Bits, typename Put>
inline void read_codes(const WeightView& w, int64_t column, int columns, const Put& put) {
  constexpr int kBytes = kIntegerChunk * Bits / 8;
  constexpr int kVectors = kBytes / 64;
  const int row_bytes = w.k * Bits / 8;
  for (int v = 0; v < IntegerTile::kVectors; v++) {
    const uint8_t* p[kWidth];
    for (int j = 0; j < kWidth; j++) {  // missing columns repeat the last one
      int at = v * kWidth + j < columns ? v * kWidth + j : columns - 1;
      p[j] = static_cast<const uint8_t*>(w.data) + (column + at) * w.row_bytes;
    }
    for (int c = 0; c < num_integer_chunks(w.k); c++) {
      __m512i low[kWidth], high[kWidth];
      for (int j = 0; j < kWidth; j++) {
        __m512i read[kVectors];
        for (int i = 0; i < kVectors; i++) {
          int at = c * kBytes + i * 64;
          int left = row_bytes - at < 64 ? row_bytes - at : 64;
          __mmask64 mask = left <= 0 ? 0 : ~uint64_t(0) >> (64 - left);
          read[i] = _mm512_maskz_loadu_epi8(mask, p[j] + at);
          __builtin_prefetch(p[j] + at + kIntegerTileColumns * w.row_bytes, 0, 2);
        }
        VecU8 first, second;
        load_codes<Bits>(reinterpret_cast<const uint8_t*>(read), 0, first, second);
        low[j] = (__m512i)first;
        high[j] = (__m512i)second;
      }
      transpose(low);
      transpose(high);
      for (int g = 0; g < kIntegerGroups; g++) {
        for (int i = 0; i < 4; i++) {
          put(c * kIntegerGroups + g, i, v, low[4 * g + i]);
          put(c * kIntegerGroups + g, 4 + i, v, high[4 * g + i]);
        }
      }
    }
  }
}

// Fills `to` [weight group, 2: scale and bias, kIntegerTileColumns].
inline void fill_scales(const WeightView& w, int64_t column, int columns, float* to) {
  const int groups = w.k / w.group_size;
  with_type(w.dtype, [&](auto type) {
    using T = decltype(type);
    const void* both[2] = {w.scales, w.biases};
    for (int which = 0; which < 2; which++) {
      for (int v = 0; v < IntegerTile::kVectors; v++) {
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
            float* at = to + (int64_t(first + g) * 2 + which) * kIntegerTileColumns;
            store(at + v * kWidth, (VecF)rows[g]);
          }
        }
      }
    }
  });
}

template <int Bits>
inline void IntegerTile::fill(const WeightView& w, int64_t column, int columns) const {
  read_codes<Bits>(w, column, columns, [&](int group, int unit, int v, __m512i read) {
    _mm512_store_si512(at(group, unit, v), read);
  });
  fill_scales(w, column, columns, scales);
}

template <int Bits, int Digits, int Rows>
inline void tile_rows_of(
    const IntegerProductArgs& args, const IntegerTile& tile, int row, int64_t column, int columns) {
  constexpr int kVectors = IntegerTile::kVectors;
  constexpr int kSums = kIntegerSums<Bits, Digits>;
  const int chunks = num_integer_chunks(args.weights.k);
  const int groups = args.weights.k / kIntegerGroup;
  const int shift = group_shift(args.weights.group_size);
  auto x = static_cast<const IntegerChunk<Digits>*>(args.x) + int64_t(row) * chunks;
  // Every fourth group has its own sum, to match the order of integer_block.
  VecF sums[kIntegerGroups][Rows][kVectors] = {};
  for (int group = 0; group < groups; group++) {
    const int g = group % kIntegerGroups;
    const auto* xg = x + group / kIntegerGroups;
    const float* scales = tile.scales + int64_t(group >> shift) * 2 * kIntegerTileColumns;
    VecI products[Rows][kVectors] = {};
    VecF upper[Rows][kVectors];  // with two sums: the first
    for (int d = 0; d < Digits; d++) {
      for (int i = 0; d > 0 && i < Rows; i++) {
        for (int v = 0; v < kVectors; v++) {
          if (kSums == 2 && d == Digits - 1) {
            upper[i][v] = to_float((VecU)products[i][v]);
            products[i][v] = VecI{};
          } else {
            products[i][v] <<= 8;
          }
        }
      }
      for (int unit = 0; unit < IntegerTile::kUnits; unit++) {
        VecU8 w[kVectors];
        for (int v = 0; v < kVectors; v++) {
          w[v] = load_as<VecU8>(tile.at(group, unit, v));
        }
        const int at = unit / 4 * (kIntegerChunk / 2) + 16 * g + 4 * (unit % 4);
        for (int i = 0; i < Rows; i++) {
          auto digits = xg[int64_t(i) * chunks].digits[d] + at;
          const VecU8 four = (VecU8)_mm512_set1_epi32(load_as<int32_t>(digits));
          for (int v = 0; v < kVectors; v++) {
            products[i][v] = add_products<Bits>(products[i][v], w[v], four);
          }
        }
      }
    }
    VecF scale[kVectors], bias[kVectors];
    for (int v = 0; v < kVectors; v++) {
      scale[v] = load(scales + v * kWidth);
      bias[v] = load(scales + kIntegerTileColumns + v * kWidth);
    }
    for (int i = 0; i < Rows; i++) {
      const auto& xc = xg[int64_t(i) * chunks];
      for (int v = 0; v < kVectors; v++) {
        VecF whole = to_float((VecU)products[i][v]);
        if constexpr (kSums == 2) {
          whole = upper[i][v] * 256.0f + whole;
        }
        const VecF scaled = whole * xc.scales[4 * g];
        sums[g][i][v] += scaled * scale[v];
        sums[g][i][v] += xc.sums[4 * g] * bias[v];
      }
    }
  }
  for (int i = 0; i < Rows; i++) {
    alignas(64) float out[kIntegerTileColumns];
    for (int v = 0; v < kVectors; v++) {
      store(out + v * kWidth, (sums[0][i][v] + sums[1][i][v]) + (sums[2][i][v] + sums[3][i][v]));
    }
    __builtin_memcpy(args.c + int64_t(row + i) * args.ldc + column, out, columns * sizeof(float));
  }
}

template <int Bits, int Digits>
inline void integer_tiles(const IntegerProductArgs& args, int64_t begin, int64_t end) {
  const IntegerTile tile(args.scratch, args.weights);
  for (int64_t column = begin; column < end; column += kIntegerTileColumns) {
    int columns = end - column < kIntegerTileColumns ? int(end - column) : kIntegerTileColumns;
    tile.fill<Bits>(args.weights, column, columns);
    int row = 0;
    if constexpr (kIntegerSums<Bits, Digits> == 1) {  // two would not fit the registers
      for (; row + 8 <= args.rows; row += 8) {
        tile_rows_of<Bits, Digits, 8>(args, tile, row, column, columns);
      }
    }
    for (; row + 4 <= args.rows; row += 4) {
      tile_rows_of<Bits, Digits, 4>(args, tile, row, column, columns);
    }
    switch (args.rows - row) {
      case 1:
        tile_rows_of<Bits, Digits, 1>(args, tile, row, column, columns);
        break;
      case 2:
        tile_rows_of<Bits, Digits, 2>(args, tile, row, column, columns);
        break;
      case 3:
        tile_rows_of<Bits, Digits, 3>(args, tile, row, column, columns);
        break;
    }
  }
}
#else
template <int Digits>
constexpr int kMinTileRows = 0;
#endif

template <int Bits, int Digits>
inline void integer_product_of(const IntegerProductArgs& args, int64_t begin, int64_t end) {
#if defined(__AVX512VNNI__)
  if (args.rows >= kMinTileRows<Digits>) {
    return integer_tiles<Bits, Digits>(args, begin, end);
  }
#endif
  integer_columns<Bits, Digits>(args, begin, end);
}

template <int Digits>
inline void integer_product(const IntegerProductArgs& args, int64_t begin, int64_t end) {
  return args.weights.bits == 4 ? integer_product_of<4, Digits>(args, begin, end)
                                : integer_product_of<8, Digits>(args, begin, end);
}

template <int Digits>
constexpr IntegerKernels kIntegerKernels = {
    sizeof(IntegerChunk<Digits>),
    Digits,
    round_to_chunks<Digits>,
    integer_product<Digits>,
    kMinTileRows<Digits>,
    1,
    {},
    Digits > 1 && kMinTileRows<Digits> == 0};

}  // namespace mlx_paged::cpu::MLX_PAGED_ISA
