// Copyright © 2026 the mlx_paged authors. Apache-2.0.
//
// Implements integers.h for many rows: repacks the codes of two vectors of columns so that a vector
// holds four codes from each of its columns, and no sum crosses lanes. For AVX-512 and AVX2.

#pragma once

#include "integers_block_kernel.h"

namespace mlx_paged::cpu::MLX_PAGED_ISA {

#if defined(__AVX2__)
// With VNNI, repacking takes as long as multiplying two or three rows; without, half a row of three
// digits.
#if defined(__AVX512VNNI__)
template <int Digits>
constexpr int kMinTileRows = 8;
constexpr int kMaxTileBits = 8;
#else
template <int Digits>
constexpr int kMinTileRows = Digits == 1 ? 6 : 3;
constexpr int kMaxTileBits = 4;  // products with longer codes do not fit 16 bits
#endif

struct IntegerTile {
  static constexpr int kVectors = 2;
  static constexpr int kColumns = kVectors * kWidth;

  static_assert(kIntegerTileColumns % kColumns == 0);

  uint8_t* codes;  // of a chunk: [unit of four codes, vector, kWidth, 4]
  float* scales;   // [weight group, 2: scale and bias, kColumns]
  float* sums;     // between chunks: [row, kIntegerGroups, kColumns]

  IntegerTile(float* scratch, const WeightView& w)
      : codes(reinterpret_cast<uint8_t*>(scratch)),
        scales(scratch + int64_t(w.k < kTileChunk ? w.k : kTileChunk) * kColumns / 4),
        sums(scales + int64_t(w.k / w.group_size) * 2 * kColumns) {}

  uint8_t* at(int64_t unit, int v) const { return codes + (unit * kVectors + v) * 4 * kWidth; }

  // Repacks the codes of elements [begin, end).
  template <int Bits>
  void fill(const WeightView& w, int64_t column, int columns, int begin, int end) const;
};

// A vector of columns of a matrix, as addresses of their first bytes.
using ColumnBytes = const uint8_t* [kWidth];

// Loads 16 bytes of columns j, 4 + j, ... at `byte`, one after another. Bytes from `left` on count
// as zeros.
inline VecU load_quarters(const ColumnBytes& p, int j, int64_t byte, int left) {
  auto quarter = [&](int column) {
    const uint8_t* at = p[column] + byte;
    if (left >= 16) {
      return load_as<__m128i>(at);
    }
#if defined(__AVX512F__)
    return _mm_maskz_loadu_epi8(__mmask16((1u << left) - 1), at);
#else
    uint8_t padded[16];
    copy_tail(padded, at, left, sizeof(padded));
    return load_as<__m128i>(padded);
#endif
  };
#if defined(__AVX512F__)
  // Inserting quarters from memory keeps the one port that shuffles free.
  __m512i row = _mm512_castsi128_si512(quarter(j));
  row = _mm512_inserti32x4(row, quarter(4 + j), 1);
  row = _mm512_inserti32x4(row, quarter(8 + j), 2);
  return (VecU)_mm512_inserti32x4(row, quarter(12 + j), 3);
#else
  return (VecU)_mm256_inserti128_si256(_mm256_castsi128_si256(quarter(j)), quarter(4 + j), 1);
#endif
}

// Loads words 4 * i to 4 * i + 3 at `byte` of each column: lane j of to[i] is word i of column j.
// Bytes from `left` on count as zeros.
inline void load_words(const ColumnBytes& p, int64_t byte, int left, VecU (&to)[4]) {
  VecU rows[4];
  for (int j = 0; j < 4; j++) {
    rows[j] = load_quarters(p, j, byte, left);
  }
  transpose_quarters(rows, to);
}

// Prefetches a share of the codes of a tile's columns, as many as one group has.
template <int Bits, int Group>
inline void prefetch_group(const WeightView& w, int64_t column, int group) {
  constexpr int kBytes = IntegerTile::kColumns * Group * Bits / 8;
  auto codes = static_cast<const char*>(w.data) + column * w.row_bytes + int64_t(group) * kBytes;
  for (int byte = 0; byte < kBytes; byte += 64) {
    __builtin_prefetch(codes + byte, 0, 2);
  }
}

// Returns the addresses of vector v of up to 16 * kVectors columns. Missing columns repeat the
// last.
inline void find_columns(
    const void* data, int64_t row_bytes, int64_t column, int columns, int v, ColumnBytes& to) {
  for (int j = 0; j < kWidth; j++) {
    const int at = v * kWidth + j < columns ? v * kWidth + j : columns - 1;
    to[j] = static_cast<const uint8_t*>(data) + (column + at) * row_bytes;
  }
}

// Calls put(unit, codes) with each unit of four codes of each of a vector's columns, for elements
// [begin, end) of each, a multiple of 32. Units have the order of IntegerChunk's digits.
template <int Bits, typename Put>
__attribute__((always_inline)) inline void read_codes(
    const ColumnBytes& p, int begin, int end, const Put& put) {
  constexpr int kBytes = 16;
  constexpr int kElements = kBytes * 8 / Bits;
  auto read = [&]<int Times>(int k) {
    const int64_t at = int64_t(k) * Bits / 8;
    VecU words[Times][4];
    for (int j = 0; j < 4; j++) {
      for (int i = 0; i < Times; i++) {
        words[i][j] = load_quarters(p, j, at + i * kBytes, kBytes);
      }
    }
    for (int i = 0; i < Times; i++) {
      const int unit = (k + i * kElements) / 4;
      VecU four[4];
      transpose_quarters(words[i], four);
      for (int u = 0; u < 4; u++) {
        const VecU8 codes = (VecU8)four[u];
        if constexpr (Bits == 4) {
          put(unit + u, codes & 15);
          put(unit + 4 + u, upper_halves(codes));
        } else {
          put(unit + u, codes);
        }
      }
    }
  };
  int k = begin;
#if defined(__AVX512F__)
  // A whole cache line of each column: lines a power of two apart may evict each other.
  for (; k + 4 * kElements <= end; k += 4 * kElements) {
    read.template operator()<4>(k);
  }
#endif
  for (; k < end; k += kElements) {
    read.template operator()<1>(k);
  }
}

// Calls put(element, values) with the elements of type T in four words of each column.
template <typename T, typename Put>
inline void widen_words(const VecU (&words)[4], const Put& put) {
  for (int i = 0; i < 4; i++) {
    if constexpr (sizeof(T) == 4) {
      put(i, (VecF)words[i]);
    } else {
      auto widen = [](VecU elements) {
        const VecH halves = __builtin_convertvector(elements, VecH);
        return load(reinterpret_cast<const T*>(&halves));
      };
      put(2 * i, widen(words[i]));
      put(2 * i + 1, widen(words[i] >> 16));
    }
  }
}

// Fills `to` [weight group, 2: scale and bias, IntegerTile::kColumns].
inline void fill_scales(const WeightView& w, int64_t column, int columns, float* to) {
  const int groups = w.k / w.group_size;
  with_type(w.dtype, [&](auto type) {
    using T = decltype(type);
    constexpr int kAtOnce = 16 / sizeof(T);
    const void* both[2] = {w.scales, w.biases};
    for (int which = 0; which < 2; which++) {
      for (int v = 0; v < IntegerTile::kVectors; v++) {
        ColumnBytes p;
        find_columns(both[which], groups * int64_t(sizeof(T)), column, columns, v, p);
        float* at = to + which * IntegerTile::kColumns + v * kWidth;
        for (int first = 0; first < groups; first += kAtOnce) {
          const int left = groups - first;
          VecU words[4];
          load_words(p, first * sizeof(T), left * int(sizeof(T)), words);
          widen_words<T>(words, [&](int i, VecF values) {
            if (i < left) {
              store(at + int64_t(first + i) * 2 * IntegerTile::kColumns, values);
            }
          });
        }
      }
    }
  });
}

template <int Bits>
inline void IntegerTile::fill(
    const WeightView& w, int64_t column, int columns, int begin, int end) const {
  for (int v = 0; v < kVectors; v++) {
    ColumnBytes p;
    find_columns(w.data, w.row_bytes, column, columns, v, p);
    read_codes<Bits>(p, begin, end, [&](int unit, VecU8 read) {
      __builtin_memcpy(at(unit - begin / 4, v), &read, sizeof(read));
    });
  }
}

// Adds the products of a group's codes and one digit of Rows rows: four elements of k at
// digits[i * stride + offset of the unit]. `group` counts from the chunk's first.
template <int Bits, int Group, int Rows>
inline void add_digit(
    const IntegerTile& tile, int group, const int8_t* digits, int64_t stride,
    VecI (&sums)[Rows][IntegerTile::kVectors]) {
  constexpr int kVectors = IntegerTile::kVectors;
  constexpr int kUnitsOfGroup = Group / 4;
  constexpr int kPieceStride = kIntegerGroups * kIntegerPiece;
  const int64_t first_unit = int64_t(group) * kUnitsOfGroup;
#if defined(__AVX512VNNI__)
  // Every third row has a pointer; the processor adds `stride` and its double to it for free.
  const int8_t* rows[(Rows + 2) / 3];
  for (int i = 0; i < Rows; i += 3) {
    rows[i / 3] = digits + i * stride;
  }
  const uint8_t* codes = tile.at(first_unit, 0);
  for (int piece = 0; piece < Group / kIntegerPiece; piece++) {
    for (auto& row : rows) {
      asm("" : "+r"(row));  // GCC would compute an address per row and unit
    }
#pragma GCC unroll 4
    for (int unit = 0; unit < kIntegerPiece / 4; unit++) {
      VecU8 w[kVectors];
      for (int v = 0; v < kVectors; v++) {
        w[v] = load_as<VecU8>(codes + (unit * kVectors + v) * 4 * kWidth);
      }
      for (int i = 0; i < Rows; i++) {
        const int8_t* four = rows[i / 3] + i % 3 * stride + 4 * unit;
        const VecU8 x = (VecU8)(VecI{} + load_as<int32_t>(four));
        for (int v = 0; v < kVectors; v++) {
          sums[i][v] = add_products<Bits>(sums[i][v], w[v], x);
        }
      }
    }
    codes += kIntegerPiece * kVectors * kWidth;
    for (auto& row : rows) {
      row += kPieceStride;
    }
  }
#else
  auto four_of = [&](int unit, int i) {
    const int at = unit / 4 * kPieceStride + 4 * (unit % 4);
    return (VecU8)(VecI{} + load_as<int32_t>(digits + i * stride + at));
  };
  static_assert(Bits == 4);  // 16 products that meet in 16 bits fit: 16 * 15 * 128
  constexpr int kAtOnce = 8;
  for (int begin = 0; begin < kUnitsOfGroup; begin += kAtOnce) {
    VecS16 pairs[Rows][kVectors] = {};
#pragma GCC unroll 8
    for (int unit = begin; unit < begin + kAtOnce; unit++) {
      VecU8 w[kVectors];
      for (int v = 0; v < kVectors; v++) {
        w[v] = load_as<VecU8>(tile.at(first_unit + unit, v));
      }
      for (int i = 0; i < Rows; i++) {
        const VecU8 four = four_of(unit, i);
        for (int v = 0; v < kVectors; v++) {
          pairs[i][v] += pair_products(w[v], four);
          asm("" : "+v"(pairs[i][v]));  // GCC would keep the products, and add them later
        }
      }
    }
    for (int i = 0; i < Rows; i++) {
      for (int v = 0; v < kVectors; v++) {
        sums[i][v] += add_pairs(pairs[i][v]);
      }
    }
  }
#endif
}

// Multiplies Rows rows by groups [first, last) of a tile, which holds no others.
template <int Bits, int Digits, int Group, int Rows>
inline void tile_rows_of(
    const IntegerProductArgs& args, const IntegerTile& tile, int row, int first, int last,
    int64_t column, int columns) {
  constexpr int kVectors = IntegerTile::kVectors;
  constexpr int kSums = kIntegerSums<Bits, Digits>;
  const int chunks = num_integer_chunks(args.weights.k, Group);
  const int groups = args.weights.k / Group;
  const int shift = group_shift<Group>(args.weights.group_size);
  auto x = static_cast<const IntegerChunk<Digits, Group>*>(args.x) + int64_t(row) * chunks;
  // Every fourth group has its own sum, to match the order of integer_block.
  VecF sums[kIntegerGroups][Rows][kVectors] = {};
  float* kept = tile.sums + int64_t(row) * kIntegerGroups * IntegerTile::kColumns;
  if (first > 0) {
    __builtin_memcpy(sums, kept, sizeof(sums));
  }
  for (int group = first; group < last; group++) {
    if (row == 0) {  // a little at a time, as memory delivers it
      prefetch_group<Bits, Group>(args.weights, column + IntegerTile::kColumns, group);
    }
    const int g = group % kIntegerGroups;
    const auto* xg = x + group / kIntegerGroups;
    const float* scales = tile.scales + int64_t(group >> shift) * 2 * IntegerTile::kColumns;
    VecI products[Rows][kVectors] = {};
    VecF upper[Rows][kVectors] = {};  // with two sums: the first
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
      add_digit<Bits, Group, Rows>(
          tile, group - first, xg->digits[d][0][g], chunks * int64_t(sizeof(*xg)), products);
    }
    VecF scale[kVectors], bias[kVectors];
    for (int v = 0; v < kVectors; v++) {
      scale[v] = load(scales + v * kWidth);
      bias[v] = load(scales + IntegerTile::kColumns + v * kWidth);
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
  if (last < groups) {
    __builtin_memcpy(kept, sums, sizeof(sums));
    return;
  }
  for (int i = 0; i < Rows; i++) {
    alignas(64) float out[IntegerTile::kColumns];
    for (int v = 0; v < kVectors; v++) {
      store(out + v * kWidth, (sums[0][i][v] + sums[1][i][v]) + (sums[2][i][v] + sums[3][i][v]));
    }
    __builtin_memcpy(args.c + int64_t(row + i) * args.ldc + column, out, columns * sizeof(float));
  }
}

template <int Bits, int Digits, int Group>
inline void integer_tiles(const IntegerProductArgs& args, int64_t first, int64_t last) {
  const IntegerTile tile(args.scratch, args.weights);
  const int k = args.weights.k;
  for (int64_t column = first; column < last; column += IntegerTile::kColumns) {
    int left = int(last - column);
    int columns = left < IntegerTile::kColumns ? left : IntegerTile::kColumns;
    fill_scales(args.weights, column, columns, tile.scales);
    for (int begin = 0; begin < k; begin += kTileChunk) {
      const int end = k - begin < kTileChunk ? k : begin + kTileChunk;
      tile.fill<Bits>(args.weights, column, columns, begin, end);
      auto rows_of = [&]<int Rows>(int row) {
        tile_rows_of<Bits, Digits, Group, Rows>(
            args, tile, row, begin / Group, end / Group, column, columns);
      };
      int row = 0;
      if constexpr (kWidth == 16) {
        for (; row + 8 <= args.rows; row += 8) {
          rows_of.template operator()<8>(row);
        }
      }
      for_few_rows(row, args.rows, rows_of);
    }
  }
}
#else
template <int Digits>
constexpr int kMinTileRows = 0;
constexpr int kMaxTileBits = 0;
#endif

template <int Bits, int Digits, int Group>
inline void integer_product_of(const IntegerProductArgs& args, int64_t begin, int64_t end) {
#if defined(__AVX2__)
  if constexpr (Bits <= kMaxTileBits) {
    if (args.rows >= kMinTileRows<Digits>) {
      return integer_tiles<Bits, Digits, Group>(args, begin, end);
    }
  }
#endif
  integer_columns<Bits, Digits, Group>(args, begin, end);
}

template <int Digits, int Group>
inline void integer_product(const IntegerProductArgs& args, int64_t begin, int64_t end) {
  return args.weights.bits == 4 ? integer_product_of<4, Digits, Group>(args, begin, end)
                                : integer_product_of<8, Digits, Group>(args, begin, end);
}

template <int Digits, int Group>
constexpr IntegerKernels kIntegerKernels = {
    sizeof(IntegerChunk<Digits, Group>),
    Digits,
    Group,
    round_to_chunks<Digits, Group>,
    integer_product<Digits, Group>,
    kMinTileRows<Digits>,
    {},
    Digits > 1 && kMaxTileBits == 4};

}  // namespace mlx_paged::cpu::MLX_PAGED_ISA
