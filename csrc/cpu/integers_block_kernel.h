// Copyright © 2026 the mlx_paged authors. Apache-2.0.
//
// Implements integers.h for few rows, four columns at a time. Where one instruction multiplies and
// adds 64 bytes, the rest of integer_block takes as long as the products of three digits. There
// vnni_block computes the same numbers: it multiplies no padding, reads scales without a copy, and
// keeps enough sums in flight.

#pragma once

#include "integers_kernel.h"

namespace mlx_paged::cpu::MLX_PAGED_ISA {

#if defined(__AVX512VNNI__)
// Four columns of a matrix, as the distances of the last three from the first; missing columns
// repeat the last. Pointers to all would not fit the registers.
struct FourColumns {
  int64_t offsets[kBlockOfColumns] = {};

  FourColumns(int columns, int64_t stride) {
    for (int j = 1; j < kBlockOfColumns; j++) {
      offsets[j] = offsets[j - 1] + (j < columns ? stride : 0);
    }
  }

  template <typename T>
  const T* of(const T* first, int j) const {
    return first + offsets[j];
  }
};

// Places of a chunk's scales among those of four weight groups of each of four columns, by the
// shift of ColumnExtents and the chunk.
struct ScaleIndices {
  static constexpr int kGroups = 4;  // of weights

  alignas(64) uint16_t of[3][4][kIntegerGroups * kBlockOfColumns] = {};

  constexpr ScaleIndices() {
    for (int shift = 0; shift < 3; shift++) {
      for (int i = 0; i < 4 * kIntegerGroups * kBlockOfColumns; i++) {
        const int group = (i / kBlockOfColumns >> shift) % kGroups;
        of[shift][i / 16][i % 16] = uint16_t(i % kBlockOfColumns * kGroups + group);
      }
    }
  }
};
constexpr ScaleIndices kScaleIndices;

// Scales or biases of four columns. Their type is known at run time only, since a block for each
// would take three times as long to compile.
class BlockScales {
 public:
  static constexpr int kGroups = ScaleIndices::kGroups;  // read at once; enough for a chunk

  // p: those of the first column.
  BlockScales(const void* p, const FourColumns& columns, DType dtype)
      : p_(static_cast<const char*>(p)), columns_(columns), dtype_(dtype) {}

  // Reads kGroups weight groups from `first` on, or `left` if fewer.
  void read(int first, int left) {
    const __mmask8 mask = left < kGroups ? (1 << left) - 1 : 0xf;
    if (dtype_ == DType::float32) {
      auto groups = [&](int j) {
        return _mm_maskz_loadu_epi32(mask, columns_.of(p_, j) + first * sizeof(float));
      };
      all_ = _mm512_castsi128_si512(groups(0));
      all_ = _mm512_inserti32x4(all_, groups(1), 1);
      all_ = _mm512_inserti32x4(all_, groups(2), 2);
      all_ = _mm512_inserti32x4(all_, groups(3), 3);
    } else {
      auto groups = [&](int j) {
        return _mm_maskz_loadu_epi16(mask, columns_.of(p_, j) + first * sizeof(uint16_t));
      };
      const __m128i low = _mm_unpacklo_epi64(groups(0), groups(1));
      const __m128i high = _mm_unpacklo_epi64(groups(2), groups(3));
      all_ = _mm512_castsi256_si512(_mm256_set_m128i(high, low));
    }
  }

  // Those of the chunk-th chunk since read(), in the order of ColumnScales.
  VecF of(int chunk, int shift) const { return at(kScaleIndices.of[shift][chunk]); }

  // Those of the first group, in all quarters.
  VecF of_first() const { return at(kScaleIndices.of[2][0]); }

 private:
  VecF at(const uint16_t* from) const {
    const __m256i indices = load_as<__m256i>(from);
    if (dtype_ == DType::float32) {
      return (VecF)_mm512_permutexvar_epi32(_mm512_cvtepu16_epi32(indices), all_);
    }
    const __m256i halves = _mm256_permutexvar_epi16(indices, _mm512_castsi512_si256(all_));
    return dtype_ == DType::bfloat16 ? widened(halves, BFloat{}) : widened(halves, Half{});
  }

  const char* p_;
  const FourColumns& columns_;
  DType dtype_;
  __m512i all_;  // column after column
};

// Loads the pieces of one group of four columns, each in its quarter.
template <int Bits, int Group>
inline void load_group(
    const uint8_t* p, const FourColumns& columns, VecU8 (&pieces)[Group / kIntegerPiece]) {
  for (int v = 0; v < Group * Bits / 8 / kIntegerPiece; v++) {
    auto quarter = [&](int j) { return load_as<__m128i>(columns.of(p, j) + v * kIntegerPiece); };
    __m512i codes = _mm512_castsi128_si512(quarter(0));
    codes = _mm512_inserti32x4(codes, quarter(1), 1);
    codes = _mm512_inserti32x4(codes, quarter(2), 2);
    codes = _mm512_inserti32x4(codes, quarter(3), 3);
    if constexpr (Bits == 4) {
      pieces[2 * v] = (VecU8)codes & 15;
      pieces[2 * v + 1] = upper_halves((VecU8)codes);
    } else {
      pieces[v] = (VecU8)codes;
    }
  }
}

// Adds up the sums of each digit. With two sums, the last digit has its own.
template <int Bits, int Digits>
inline void join_digits(const VecI (&digits)[Digits], VecI (&sums)[kIntegerSums<Bits, Digits>]) {
  if constexpr (Digits == 1) {
    sums[0] = digits[0];
  } else {
    sums[0] = (digits[0] << 8) + digits[1];
    if constexpr (kIntegerSums<Bits, Digits> == 2) {
      sums[1] = digits[2];
    } else {
      sums[0] = (sums[0] << 8) + digits[2];
    }
  }
}

// Adds up to `sums` the products of four columns, whose first one has codes p, scales s, and biases
// b.
template <int Bits, int Digits, int Group, int Rows>
__attribute__((always_inline)) inline void vnni_block(
    const IntegerChunk<Digits, Group>* x, const ColumnExtents& of, const uint8_t* p,
    const FourColumns& columns, int64_t row_bytes, BlockScales scales, BlockScales biases,
    VecF (&sums)[Rows]) {
  using Chunk = IntegerChunk<Digits, Group>;
  constexpr int kPieces = Chunk::kPieces;
  constexpr int kSums = kIntegerSums<Bits, Digits>;
  constexpr int kBytes = Chunk::kSize * Bits / 8;
  const int shift = of.shift;
  // One long run: the columns after the next ones.
  const uint8_t* next = p + kBlocksAhead * kBlockOfColumns * row_bytes;
  for (int c = 0; c < of.whole_chunks; c++, p += kBytes) {
    VecU8 pieces[kBlockOfColumns][kPieces];
    for (int j = 0; j < kBlockOfColumns; j++) {
      load_pieces<Bits, Group>(columns.of(p, j), 0, pieces[j]);
      for (int byte = 0; byte < kBytes; byte += 64, next += 64) {
        __builtin_prefetch(next, 0, 2);
      }
    }
    const int since = c & ((1 << shift) - 1);
    if (since == 0) {
      const int first = c * kIntegerGroups >> shift;
      scales.read(first, of.groups - first);
      biases.read(first, of.groups - first);
    }
    const VecF scale = scales.of(since, shift);
    const VecF bias = biases.of(since, shift);
    for (int i = 0; i < Rows; i++) {
      const auto& xc = x[int64_t(i) * of.chunks + c];
      // A sum for each digit: chains of additions that wait for each other stay short.
      VecI products[kBlockOfColumns][Digits] = {};
      for (int piece = 0; piece < kPieces; piece++) {
        for (int d = 0; d < Digits; d++) {
          const auto digits = load_as<VecU8>(xc.digits[d][piece]);
          for (int j = 0; j < kBlockOfColumns; j++) {
            products[j][d] = add_products<Bits>(products[j][d], pieces[j][piece], digits);
          }
        }
      }
      VecI joined[kBlockOfColumns][kSums];
      for (int j = 0; j < kBlockOfColumns; j++) {
        join_digits<Bits, Digits>(products[j], joined[j]);
      }
      VecI totals[kSums];
      for (int k = 0; k < kSums; k++) {
        totals[k] = sum_columns(joined[0][k], joined[1][k], joined[2][k], joined[3][k]);
      }
      const VecF scaled = whole_sum(totals) * load(xc.scales);
      sums[i] += scaled * scale;
      sums[i] += load(xc.sums) * bias;
    }
  }
  // The groups of an incomplete chunk, one at a time.
  for (int g = 0; g < of.rest; g++, p += kBytes / kIntegerGroups) {
    VecU8 pieces[kPieces];
    load_group<Bits, Group>(p, columns, pieces);
    const int group = (of.whole_chunks * kIntegerGroups + g) >> shift;
    scales.read(group, of.groups - group);
    biases.read(group, of.groups - group);
    const VecF scale = scales.of_first();
    const VecF bias = biases.of_first();
    const __mmask16 quarter = 0xf << (4 * g);
    for (int i = 0; i < Rows; i++) {
      const auto& xc = x[int64_t(i) * of.chunks + of.whole_chunks];
      VecI products[Digits] = {};
      for (int piece = 0; piece < kPieces; piece++) {
        for (int d = 0; d < Digits; d++) {
          const __m128i digits = load_as<__m128i>(xc.digits[d][piece][g]);
          products[d] =
              add_products<Bits>(products[d], pieces[piece], (VecU8)_mm512_broadcast_i32x4(digits));
        }
      }
      VecI totals[kSums];
      join_digits<Bits, Digits>(products, totals);
      for (VecI& v : totals) {
        v += (VecI)_mm512_shuffle_epi32((__m512i)v, _MM_PERM_ENUM(0xb1));
        v += (VecI)_mm512_shuffle_epi32((__m512i)v, _MM_PERM_ENUM(0x4e));
        const __m512i columns =
            _mm512_setr_epi32(0, 4, 8, 12, 0, 4, 8, 12, 0, 4, 8, 12, 0, 4, 8, 12);
        v = (VecI)_mm512_permutexvar_epi32(columns, (__m512i)v);
      }
      const VecF scaled = whole_sum(totals) * xc.scales[4 * g];
      VecF sum = sums[i];
      sum += scaled * scale;
      sum += xc.sums[4 * g] * bias;
      sums[i] = (VecF)_mm512_mask_mov_ps((__m512)sums[i], quarter, (__m512)sum);
    }
  }
}

// Computes columns [begin, end) of Rows rows.
template <int Bits, int Digits, int Group, int Rows>
inline void vnni_columns(
    const IntegerProductArgs& args, const ColumnExtents& of, int row, int64_t begin, int64_t end) {
  const WeightView& w = args.weights;
  const int64_t scale_bytes = int64_t(of.groups) * (w.dtype == DType::float32 ? 4 : 2);
  for (int64_t column = begin; column < end; column += kBlockOfColumns) {
    const int columns = end - column < kBlockOfColumns ? int(end - column) : kBlockOfColumns;
    const FourColumns scale_columns(columns, scale_bytes);
    auto of_column = [&](const void* p) {
      const char* at = static_cast<const char*>(p) + column * scale_bytes;
      const char* ahead = at + kBlocksAhead * kBlockOfColumns * scale_bytes;
      for (int byte = 0; byte < kBlockOfColumns * scale_bytes; byte += 64) {
        __builtin_prefetch(ahead + byte, 0, 2);
      }
      return BlockScales(at, scale_columns, w.dtype);
    };
    VecF sums[Rows] = {};
    vnni_block<Bits, Digits, Group, Rows>(
        static_cast<const IntegerChunk<Digits, Group>*>(args.x) + int64_t(row) * of.chunks, of,
        static_cast<const uint8_t*>(w.data) + column * w.row_bytes,
        FourColumns(columns, w.row_bytes), w.row_bytes, of_column(w.scales), of_column(w.biases),
        sums);
    for (int i = 0; i < Rows; i++) {
      store_columns(&sums[i], args.c + int64_t(row + i) * args.ldc + column, columns);
    }
  }
}
#endif

template <int Bits, int Digits, int Group>
inline void integer_columns(const IntegerProductArgs& args, int64_t begin, int64_t end) {
  const ColumnExtents of(args.weights, group_shift<Group>(args.weights.group_size), Group);
#if defined(__AVX512VNNI__)
  constexpr bool kUsesVnni = Digits > 1;
#else
  constexpr bool kUsesVnni = false;
#endif
  // The next rows find a block's weights in the L1 cache.
  const int64_t block_columns = kUsesVnni && args.rows <= 4 ? end - begin : kBlockOfColumns;
  for (int64_t column = begin; column < end; column += block_columns) {
    const int64_t last = end - column < block_columns ? end : column + block_columns;
    for_few_rows(0, args.rows, [&]<int Rows>(int row) {
#if defined(__AVX512VNNI__)
      if constexpr (kUsesVnni) {
        return vnni_columns<Bits, Digits, Group, Rows>(args, of, row, column, last);
      }
#endif
      if constexpr (!kUsesVnni) {
        integer_block<Bits, Digits, Group, Rows>(args, of, row, column, int(last - column));
      }
    });
  }
}

}  // namespace mlx_paged::cpu::MLX_PAGED_ISA
