// Copyright © 2026 the mlx_paged authors. Apache-2.0.
//
// Parts of integers.h that all forms share, and blocks of four columns, whose weights are read in
// place. Compiled once per instruction set; see simd.h.

#pragma once

#if defined(__ARM_FEATURE_DOTPROD)
#include <arm_neon.h>
#elif defined(__SSE2__)
#include <immintrin.h>
#endif

#include "integers.h"
#include "simd.h"
#include "transpose.h"
#include "unpack_kernel.h"

namespace mlx_paged::cpu::MLX_PAGED_ISA {

typedef uint8_t VecU8 __attribute__((vector_size(4 * kWidth)));
typedef uint16_t VecU16 __attribute__((vector_size(4 * kWidth)));
typedef int16_t VecS16 __attribute__((vector_size(4 * kWidth)));

constexpr int kUnits = kWidth / 4;               // groups with one piece in a vector
constexpr int kParts = kIntegerGroups / kUnits;  // vectors for a piece of each group
constexpr int kBlockOfColumns = 4;
constexpr int kBlocksAhead = 2;
constexpr int kScaleGroups = 16;  // groups of weights whose scales are widened at once

// Adds the products of four codes and digits to each element of `sums`. 4-bit codes are below 16.
template <int Bits>
inline VecI add_products(VecI sums, VecU8 codes, VecU8 x) {
#if defined(__AVX512VNNI__)
  // Inline assembly: with the intrinsic, GCC 12 copies the sums each time.
  asm("vpdpbusd %2, %1, %0" : "+v"(sums) : "v"(codes), "v"(x));
  return sums;
#elif defined(__ARM_FEATURE_DOTPROD)
  // Signed by signed: splits eight bits into two halves.
  int32x4_t low = vdotq_s32((int32x4_t)sums, (int8x16_t)(codes & 15), (int8x16_t)x);
  if constexpr (Bits == 4) {
    return (VecI)low;
  } else {
    int32x4_t high = vdotq_s32(int32x4_t{}, (int8x16_t)(codes >> 4), (int8x16_t)x);
    return (VecI)(low + high * 16);
  }
#else
  // Bytes 0 and 2, then 1 and 3, as 16-bit numbers.
  VecS16 even = (VecS16)((VecU16)codes & 0xff);
  VecS16 odd = (VecS16)((VecU16)codes >> 8);
  VecS16 x_even = (VecS16)((VecU16)x << 8) >> 8;
  VecS16 x_odd = (VecS16)x >> 8;
#if defined(__AVX512BW__)
  return sums + (VecI)_mm512_madd_epi16((__m512i)even, (__m512i)x_even) +
         (VecI)_mm512_madd_epi16((__m512i)odd, (__m512i)x_odd);
#elif defined(__AVX2__)
  return sums + (VecI)_mm256_madd_epi16((__m256i)even, (__m256i)x_even) +
         (VecI)_mm256_madd_epi16((__m256i)odd, (__m256i)x_odd);
#elif defined(__SSE2__)
  return sums + (VecI)_mm_madd_epi16((__m128i)even, (__m128i)x_even) +
         (VecI)_mm_madd_epi16((__m128i)odd, (__m128i)x_odd);
#else
  auto low = [](VecS16 v) { return (VecI)((VecU)v << 16) >> 16; };
  auto high = [](VecS16 v) { return (VecI)v >> 16; };
  return sums + low(even) * low(x_even) + high(even) * high(x_even) + low(odd) * low(x_odd) +
         high(odd) * high(x_odd);
#endif
#endif
}

#if defined(__AVX2__)
// Products of codes below 16 and digits, summed in pairs.
inline VecS16 pair_products(VecU8 codes, VecU8 digits) {
#if defined(__AVX512BW__)
  return (VecS16)_mm512_maddubs_epi16((__m512i)codes, (__m512i)digits);
#else
  return (VecS16)_mm256_maddubs_epi16((__m256i)codes, (__m256i)digits);
#endif
}

inline VecI add_pairs(VecS16 v) {
#if defined(__AVX512BW__)
  return (VecI)_mm512_madd_epi16((__m512i)v, _mm512_set1_epi16(1));
#else
  return (VecI)_mm256_madd_epi16((__m256i)v, _mm256_set1_epi16(1));
#endif
}
#endif

// Adds the products of all pieces of groups, whose digits are kPieceBytes apart.
template <int Bits, int Pieces>
inline VecI add_pieces(VecI sums, const VecU8 (&codes)[Pieces], const int8_t* x) {
  constexpr int kPieceBytes = kIntegerGroups * kIntegerPiece;
  auto digits = [&](int piece) { return load_as<VecU8>(x + piece * kPieceBytes); };
#if defined(__AVX2__) && !defined(__AVX512VNNI__)
  if constexpr (Bits == 4) {  // eight products of 15 and 128 fit 16 bits
    VecS16 pairs = pair_products(codes[0], digits(0));
    for (int piece = 1; piece < Pieces; piece++) {
      pairs += pair_products(codes[piece], digits(piece));
    }
    return sums + add_pairs(pairs);
  }
#endif
  for (int piece = 0; piece < Pieces; piece++) {
    sums = add_products<Bits>(sums, codes[piece], digits(piece));
  }
  return sums;
}

// Sums the four elements of each group (a quarter of a vector) of each column and interleaves the
// columns.
inline VecI sum_columns(VecI a, VecI b, VecI c, VecI d) {
#if defined(__SSE2__)
  auto add_words = [](VecI a, VecI b) {
    return unpack_low_words((VecU)a, (VecU)b) + unpack_high_words((VecU)a, (VecU)b);
  };
  const VecU ab = add_words(a, b), cd = add_words(c, d);
  return (VecI)(unpack_low_pairs(ab, cd) + unpack_high_pairs(ab, cd));
#else
  auto sum = [](VecI v) { return v[0] + v[1] + v[2] + v[3]; };
  return VecI{sum(a), sum(b), sum(c), sum(d)};
#endif
}

// The upper four bits of each byte.
inline VecU8 upper_halves(VecU8 bytes) {
  return (VecU8)((VecU16)bytes >> 4) & 15;
}

// Loads both pieces of the groups of 32 elements in part `part` of four groups, whose weights start
// at p.
template <int Bits>
inline void load_codes(const uint8_t* p, int part, VecU8& first, VecU8& second) {
  constexpr int kBytes = 4 * kWidth;
  if constexpr (Bits == 4) {
    VecU8 both = load_as<VecU8>(p + part * kBytes);
    first = both & 15;
    second = upper_halves(both);
  } else {
    p += part * 2 * kBytes;
#if defined(__AVX512F__)
    __m512i low = load_as<__m512i>(p);
    __m512i high = load_as<__m512i>(p + kBytes);
    first = (VecU8)_mm512_shuffle_i32x4(low, high, 0x88);
    second = (VecU8)_mm512_shuffle_i32x4(low, high, 0xdd);
#elif defined(__AVX2__)
    __m256i low = load_as<__m256i>(p);
    __m256i high = load_as<__m256i>(p + kBytes);
    first = (VecU8)_mm256_permute2x128_si256(low, high, 0x20);
    second = (VecU8)_mm256_permute2x128_si256(low, high, 0x31);
#else
    first = load_as<VecU8>(p);
    second = load_as<VecU8>(p + kBytes);
#endif
  }
}

// Collects the even or the odd quarters of two vectors.
inline void split_quarters(VecU8 a, VecU8 b, VecU8& even, VecU8& odd) {
#if defined(__AVX512F__)
  even = (VecU8)_mm512_shuffle_i32x4((__m512i)a, (__m512i)b, 0x88);
  odd = (VecU8)_mm512_shuffle_i32x4((__m512i)a, (__m512i)b, 0xdd);
#elif defined(__AVX2__)
  even = (VecU8)_mm256_permute2x128_si256((__m256i)a, (__m256i)b, 0x20);
  odd = (VecU8)_mm256_permute2x128_si256((__m256i)a, (__m256i)b, 0x31);
#else
  even = a;
  odd = b;
#endif
}

// Loads all pieces of the groups in part `part` of a chunk, whose weights start at p.
template <int Bits, int Group>
inline void load_pieces(const uint8_t* p, int part, VecU8 (&pieces)[Group / kIntegerPiece]) {
  if constexpr (Group == 32) {
    load_codes<Bits>(p, part, pieces[0], pieces[1]);
  } else if constexpr (Bits == 4) {
    constexpr int kBytes = 4 * kWidth;
    p += part * 2 * kBytes;
    VecU8 both[2];  // of the first 32 elements of each group, then of the others
    split_quarters(load_as<VecU8>(p), load_as<VecU8>(p + kBytes), both[0], both[1]);
    for (int half = 0; half < 2; half++) {
      pieces[2 * half] = both[half] & 15;
      pieces[2 * half + 1] = upper_halves(both[half]);
    }
  } else {
    VecU8 firsts[2], seconds[2];
    load_codes<8>(p, 2 * part, firsts[0], seconds[0]);
    load_codes<8>(p, 2 * part + 1, firsts[1], seconds[1]);
    split_quarters(firsts[0], firsts[1], pieces[0], pieces[2]);
    split_quarters(seconds[0], seconds[1], pieces[1], pieces[3]);
  }
}

// Scales or biases of four columns; those of weight group i start at [4 * i].
struct ColumnScales {
  alignas(64) float values[(kScaleGroups + 3) * kBlockOfColumns];

  // Scales of a part of a chunk whose first weight group is `first`; a weight group spans 1 <<
  // shift activation groups.
  VecF of(int first, int part, int shift) const {
    const float* at = values + first * kBlockOfColumns;
#if defined(__AVX512F__)
    static const int64_t kQuarters[3][8] = {
        {0, 1, 2, 3, 4, 5, 6, 7}, {0, 1, 0, 1, 2, 3, 2, 3}, {0, 1, 0, 1, 0, 1, 0, 1}};
    (void)part;
    // No wider than needed: a load that spans two stores waits until both are in the cache.
    const __m512i groups =
        shift == 0 ? load_as<__m512i>(at) : _mm512_castsi256_si512(load_as<__m256i>(at));
    return (VecF)_mm512_permutexvar_epi64(load_as<__m512i>(kQuarters[shift]), groups);
#elif defined(__AVX2__)
    return (VecF)_mm256_set_m128(
        load_as<__m128>(at + ((2 * part + 1) >> shift) * kBlockOfColumns),
        load_as<__m128>(at + ((2 * part) >> shift) * kBlockOfColumns));
#else
    return load(at + (part >> shift) * kBlockOfColumns);
#endif
  }
};

#if defined(__AVX512F__)
// The same for types of 16 bits, which are interleaved before they are widened.
template <typename T>
inline void read_halves(const T* const* from, int count, ColumnScales& to) {
  const __mmask16 mask = count >= kScaleGroups ? 0xffff : (1u << count) - 1;
  __m256i rows[kBlockOfColumns];
  for (int j = 0; j < kBlockOfColumns; j++) {
    rows[j] = _mm256_maskz_loadu_epi16(mask, from[j]);
  }
  const __m256i ab = _mm256_unpacklo_epi16(rows[0], rows[1]);
  const __m256i cd = _mm256_unpacklo_epi16(rows[2], rows[3]);
  const __m256i ab_high = _mm256_unpackhi_epi16(rows[0], rows[1]);
  const __m256i cd_high = _mm256_unpackhi_epi16(rows[2], rows[3]);
  // Groups 2 * i, 2 * i + 1, and those eight later.
  const __m256i groups[4] = {
      _mm256_unpacklo_epi32(ab, cd), _mm256_unpackhi_epi32(ab, cd),
      _mm256_unpacklo_epi32(ab_high, cd_high), _mm256_unpackhi_epi32(ab_high, cd_high)};
  for (int i = 0; i < 4; i++) {
    const __m512i wide = (__m512i)widened(groups[i], T{});
    float* at = to.values + 2 * i * kBlockOfColumns;
    _mm256_store_si256(reinterpret_cast<__m256i*>(at), _mm512_castsi512_si256(wide));
    if (count > 8) {
      at += 8 * kBlockOfColumns;
      _mm256_store_si256(reinterpret_cast<__m256i*>(at), _mm512_extracti64x4_epi64(wide, 1));
    }
  }
}
#endif

template <typename T>
inline void read_scales(const T* const* from, int count, ColumnScales& to) {
#if defined(__AVX512F__)
  if constexpr (sizeof(T) == 2) {
    return read_halves(from, count, to);
  }
#endif
  count = count < kScaleGroups ? count : kScaleGroups;
#if defined(__AVX2__) && !defined(__AVX512F__)
  for (int i = 0; i < count; i += kWidth) {
    VecU rows[kBlockOfColumns];
    for (int j = 0; j < kBlockOfColumns; j++) {
      const T* p = from[j] + i;
      rows[j] = as_uint(count - i >= kWidth ? load(p) : load_tail(p, count - i));
    }
    VecU groups[4];  // i and 4 + i
    transpose_quarters(rows, groups);
    float* at = to.values + i * kBlockOfColumns;
    for (int pair = 0; pair < 2; pair++) {
      const __m256i a = (__m256i)groups[2 * pair], b = (__m256i)groups[2 * pair + 1];
      store(at + 8 * pair, (VecF)_mm256_permute2x128_si256(a, b, 0x20));
      store(at + 16 + 8 * pair, (VecF)_mm256_permute2x128_si256(a, b, 0x31));
    }
  }
#else
  alignas(64) float rows[kBlockOfColumns][kScaleGroups];
  for (int j = 0; j < kBlockOfColumns; j++) {
    for (int i = 0; i < kScaleGroups; i += kWidth) {
      const T* p = from[j] + i;
      int left = count - i;
      store(rows[j] + i, left >= kWidth ? load(p) : left > 0 ? load_tail(p, left) : VecF{});
    }
  }
#if defined(__AVX512F__)
  __m512 a = load_as<__m512>(rows[0]), b = load_as<__m512>(rows[1]);
  __m512 c = load_as<__m512>(rows[2]), d = load_as<__m512>(rows[3]);
  __m512d ab = (__m512d)_mm512_unpacklo_ps(a, b), cd = (__m512d)_mm512_unpacklo_ps(c, d);
  __m512d ab_high = (__m512d)_mm512_unpackhi_ps(a, b), cd_high = (__m512d)_mm512_unpackhi_ps(c, d);
  // Quarter q of vector i is group 4 * q + i.
  const __m512 groups[4] = {
      (__m512)_mm512_unpacklo_pd(ab, cd), (__m512)_mm512_unpackhi_pd(ab, cd),
      (__m512)_mm512_unpacklo_pd(ab_high, cd_high), (__m512)_mm512_unpackhi_pd(ab_high, cd_high)};
  auto put = [&](int at, __m512 v01, __m512 v23) {
    store(to.values + at, (VecF)_mm512_shuffle_f32x4(v01, v23, 0x88));
    store(to.values + at + 16, (VecF)_mm512_shuffle_f32x4(v01, v23, 0xdd));
  };
  put(0, _mm512_shuffle_f32x4(groups[0], groups[1], 0x44),
      _mm512_shuffle_f32x4(groups[2], groups[3], 0x44));
  put(32, _mm512_shuffle_f32x4(groups[0], groups[1], 0xee),
      _mm512_shuffle_f32x4(groups[2], groups[3], 0xee));
#else
  for (int i = 0; i < kScaleGroups; i++) {
    for (int j = 0; j < kBlockOfColumns; j++) {
      to.values[i * kBlockOfColumns + j] = rows[j][i];
    }
  }
#endif
#endif
}

// log2 of the activation groups per weight group.
template <int Group>
inline int group_shift(int group_size) {
  return group_size == Group ? 0 : group_size == 2 * Group ? 1 : 2;
}

// Sums that a group's products take: with 8-bit weights the lowest of three digits has its own.
template <int Bits, int Digits>
constexpr int kIntegerSums = Bits > 4 && Digits > 1 ? 2 : 1;

inline VecF whole_sum(const VecI (&sums)[1]) {
  return to_float((VecU)sums[0]);
}

inline VecF whole_sum(const VecI (&sums)[2]) {
  return to_float((VecU)sums[0]) * 256.0f + to_float((VecU)sums[1]);
}

// Lengths that all columns of a product share.
struct ColumnExtents {
  int groups;  // of weights
  int shift;   // group_shift
  int chunks;
  int whole_chunks;
  int rest;  // groups of activations of an incomplete chunk

  ColumnExtents(const WeightView& w, int shift, int group)
      : groups(w.k / w.group_size),
        shift(shift),
        chunks(num_integer_chunks(w.k, group)),
        whole_chunks(w.k / (kIntegerGroups * group)),
        rest(w.k / group % kIntegerGroups) {}
};

// Reads the scales and biases of up to kScaleGroups groups of four columns, from group `first` on.
inline void read_block_scales(
    const WeightView& w, const ColumnExtents& of, int64_t column, int columns, int first,
    ColumnScales& scales, ColumnScales& biases) {
  with_type(w.dtype, [&](auto type) {
    using T = decltype(type);
    const T *s[kBlockOfColumns], *b[kBlockOfColumns];
    int64_t at = column * of.groups + first;
    for (int j = 0; j < kBlockOfColumns; j++) {
      s[j] = static_cast<const T*>(w.scales) + at;
      b[j] = static_cast<const T*>(w.biases) + at;
      at += j + 1 < columns ? of.groups : 0;
    }
    const int ahead = kBlocksAhead * kBlockOfColumns * of.groups;
    for (int j = 0; j < kBlockOfColumns; j++) {
      __builtin_prefetch(s[j] + ahead, 0, 2);
      __builtin_prefetch(b[j] + ahead, 0, 2);
    }
    read_scales(s, of.groups - first, scales);
    read_scales(b, of.groups - first, biases);
  });
}

// Adds up the sums of every fourth group of up to four columns.
inline void store_columns(const VecF* sums, float* out, int columns) {
  typedef float Columns __attribute__((vector_size(kBlockOfColumns * sizeof(float))));
  Columns quarters[kIntegerGroups];
  __builtin_memcpy(quarters, sums, sizeof(quarters));
  const Columns total = (quarters[0] + quarters[1]) + (quarters[2] + quarters[3]);
  if (columns == kBlockOfColumns) {
    __builtin_memcpy(out, &total, sizeof(total));
    return;
  }
  for (int j = 0; j < columns; j++) {
    out[j] = total[j];
  }
}

// Calls block.operator()<Rows>(row) for the rows from `row` on, four at a time.
template <typename Block>
inline void for_few_rows(int row, int rows, const Block& block) {
  for (; row + 4 <= rows; row += 4) {
    block.template operator()<4>(row);
  }
  switch (rows - row) {
    case 1:
      block.template operator()<1>(row);
      break;
    case 2:
      block.template operator()<2>(row);
      break;
    case 3:
      block.template operator()<3>(row);
      break;
  }
}

// Computes up to four columns; missing ones repeat the last.
template <int Bits, int Digits, int Group, int Rows>
inline void integer_block(
    const IntegerProductArgs& args, const ColumnExtents& of, int row, int64_t column, int columns) {
  using Chunk = IntegerChunk<Digits, Group>;
  constexpr int kSums = kIntegerSums<Bits, Digits>;
  constexpr int kBytes = Chunk::kSize * Bits / 8;
  const WeightView& w = args.weights;
  const int chunks = of.chunks;
  const int whole = of.whole_chunks;
  const int shift = of.shift;
  const uint8_t* p[kBlockOfColumns];
  const uint8_t* next = static_cast<const uint8_t*>(w.data) + column * w.row_bytes;
  for (int j = 0; j < kBlockOfColumns; j++) {
    p[j] = next;
    next += j + 1 < columns ? w.row_bytes : 0;
  }
  // Codes past a column's end meet zeros, so the next column's may stand there, but not memory past
  // the matrix.
  alignas(64) uint8_t last[kBlockOfColumns][kBytes];
  const bool copies = whole < chunks && (w.n - column - columns) * w.row_bytes < kBytes;
  if (copies) {
    const int bytes = (w.k % Chunk::kSize) * Bits / 8;
    for (int j = 0; j < kBlockOfColumns; j++) {
      copy_tail(last[j], p[j] + whole * kBytes, bytes, kBytes);
    }
  }
  const int in_place = copies ? whole : chunks;
  ColumnScales scales, biases;
  auto x = static_cast<const Chunk*>(args.x) + int64_t(row) * chunks;
  VecF sums[Rows][kParts] = {};
  // Prefetches one long run: the columns after the next ones, and their scales.
  const uint8_t* ahead = p[0] + kBlocksAhead * kBlockOfColumns * w.row_bytes;
  const int chunks_of_scales = kScaleGroups / kIntegerGroups << shift;
  for (int c = 0; c < chunks; c++) {
    const int within = c & (chunks_of_scales - 1);
    if (within == 0) {
      read_block_scales(w, of, column, columns, c * kIntegerGroups >> shift, scales, biases);
    }
    const int first = within * kIntegerGroups >> shift;
    const uint8_t* codes[kBlockOfColumns];
    for (int j = 0; j < kBlockOfColumns; j++) {
      codes[j] = c < in_place ? p[j] + c * kBytes : last[j];
      for (int byte = 0; byte < kBytes; byte += 64, ahead += 64) {
        __builtin_prefetch(ahead, 0, 2);
      }
    }
    for (int part = 0; part < kParts; part++) {
      VecU8 pieces[kBlockOfColumns][Chunk::kPieces];
      for (int j = 0; j < kBlockOfColumns; j++) {
        load_pieces<Bits, Group>(codes[j], part, pieces[j]);
      }
      const VecF scale = scales.of(first, part, shift);
      const VecF bias = biases.of(first, part, shift);
      for (int i = 0; i < Rows; i++) {
        const auto& xc = x[int64_t(i) * chunks + c];
        VecI products[kSums][kBlockOfColumns] = {};
        for (int d = 0; d < Digits; d++) {
          const int8_t* digits = xc.digits[d][0][part * kUnits];
          const int of = d < 2 ? 0 : kSums - 1;
          const bool shifts = d > 0 && (kSums == 1 || d < 2);
          for (int j = 0; j < kBlockOfColumns; j++) {
            VecI& sum = products[of][j];
            sum = add_pieces<Bits>(sum << (shifts ? 8 : 0), pieces[j], digits);
          }
        }
        VecI totals[kSums];
        for (int s = 0; s < kSums; s++) {
          const VecI(&of)[kBlockOfColumns] = products[s];
          totals[s] = sum_columns(of[0], of[1], of[2], of[3]);
        }
        const VecF scaled = whole_sum(totals) * load(xc.scales + part * kWidth);
        sums[i][part] += scaled * scale;
        sums[i][part] += load(xc.sums + part * kWidth) * bias;
      }
    }
  }
  for (int i = 0; i < Rows; i++) {
    store_columns(sums[i], args.c + int64_t(row + i) * args.ldc + column, columns);
  }
}

typedef int8_t Bytes __attribute__((vector_size(kWidth)));
typedef int8_t HalfBytes __attribute__((vector_size(kWidth / 2)));
typedef uint16_t BytePairs __attribute__((vector_size(kWidth)));

// Measures how evenly a row's numbers are distributed, by the exponent of the larger of each pair
// from a group's halves. Exponents far below the group's largest are clamped to kFar.
struct Spread {
  static constexpr uint32_t kFar = kMaxSpread + 4;

  uint32_t max_exponent = 0;
  VecU sums = {};
  uint32_t count = 0;  // of each sum
  bool finite = true;

  void add(VecU magnitudes, uint32_t largest) {
    uint32_t exponent = largest >> 23;
    VecU floor = VecU{} + (exponent > kFar ? exponent - kFar : 0u);
    VecU exponents = magnitudes >> 23;
    sums += exponents > floor ? exponents : floor;
    count++;
    max_exponent = exponent > max_exponent ? exponent : max_exponent;
  }

  bool is_uneven() const {
    uint64_t sum = 0;
    for (int i = 0; i < kWidth; i++) {
      sum += sums[i];
    }
    const uint64_t all = uint64_t(count) * kWidth;
    return finite && max_exponent * all > sum + kMaxSpread * all;
  }
};

// log2 of a lower bound of the largest integer in a group of three digits. Chosen so that sums of
// products fit into 32 bits.
template <int Group>
inline uint32_t integer_exponent(int bits) {
  return Group == 64 && bits == 4 ? 20 : 21;
}

// Rounds a group to integers and a scale. Returns the sum of the integers.
template <int Digits, int Group>
inline int round_group(const float* x, int bits, VecI* integers, float& scale, Spread& spread) {
  constexpr int kVectors = Group / kWidth;
  constexpr int kPairs = kVectors / 2;
  VecF values[kVectors];
  VecU pairs[kPairs] = {};  // the larger of each
  VecU largest = {};
  for (int i = 0; i < kVectors; i++) {
    values[i] = load(x + i * kWidth);
    VecU magnitude = as_uint(values[i]) & 0x7fffffffu;
    VecU& pair = pairs[i % kPairs];
    pair = magnitude > pair ? magnitude : pair;
    largest = pair > largest ? pair : largest;
  }
  const uint32_t group_max = max(largest);  // infinities and NaNs compare above all numbers
  constexpr uint32_t kSmallest = (127u - 100) << 23;  // 2^-100
  constexpr uint32_t kInfinity = 255u << 23;
  if (group_max < kSmallest || group_max >= kInfinity) {
    scale = group_max < kSmallest ? 0.0f : __builtin_nanf("");
    spread.finite = spread.finite && group_max < kInfinity;
    for (int i = 0; i < kVectors; i++) {
      integers[i] = VecI{};
    }
    return 0;
  }
  float inverse;
  if constexpr (Digits == 1) {
    float magnitude = bits_as_float(group_max);
    scale = magnitude / 127.0f;
    inverse = 127.0f / magnitude;
  } else {
    // A power of two.
    static_assert(Digits == 3);
    for (const VecU& pair : pairs) {
      spread.add(pair, group_max);
    }
    uint32_t exponent = (group_max >> 23) - integer_exponent<Group>(bits);
    scale = bits_as_float(exponent << 23);
    inverse = bits_as_float((254 - exponent) << 23);
  }
  VecI sums = {};
  for (int i = 0; i < kVectors; i++) {
    // Rounds to the nearest integer, which is then in the low bits.
    VecF shifted = values[i] * inverse + 0x1.8p23f;
    integers[i] = (VecI)(as_uint(shifted) - 0x4b400000u);
    sums += integers[i];
  }
  return sum(sums);
}

// Stores the lowest eight bits of 32 integers as two pieces; see IntegerChunk.
inline void store_digits(const VecI* integers, int bits, int8_t* first, int8_t* second) {
#if defined(__AVX512F__)
  __m128i low = _mm512_cvtepi32_epi8((__m512i)integers[0]);
  __m128i high = _mm512_cvtepi32_epi8((__m512i)integers[1]);
  if (bits == 4) {
    const __m128i even_then_odd =
        _mm_setr_epi8(0, 2, 4, 6, 8, 10, 12, 14, 1, 3, 5, 7, 9, 11, 13, 15);
    low = _mm_shuffle_epi8(low, even_then_odd);
    high = _mm_shuffle_epi8(high, even_then_odd);
    const __m128i even = _mm_unpacklo_epi64(low, high);
    high = _mm_unpackhi_epi64(low, high);
    low = even;
  }
  _mm_storeu_si128(reinterpret_cast<__m128i*>(first), low);
  _mm_storeu_si128(reinterpret_cast<__m128i*>(second), high);
#elif defined(__AVX2__)
  auto low_bits = [&](int i) { return (__m256i)(integers[i] & 255); };
  const __m256i low = _mm256_packus_epi32(low_bits(0), low_bits(1));
  const __m256i high = _mm256_packus_epi32(low_bits(2), low_bits(3));
  // Packing interleaves words of the halves of vectors.
  const __m256i in_order = _mm256_setr_epi32(0, 4, 1, 5, 2, 6, 3, 7);
  __m256i digits = _mm256_permutevar8x32_epi32(_mm256_packus_epi16(low, high), in_order);
  if (bits == 4) {
    const __m256i even_then_odd = _mm256_broadcastsi128_si256(
        _mm_setr_epi8(0, 2, 4, 6, 8, 10, 12, 14, 1, 3, 5, 7, 9, 11, 13, 15));
    digits = _mm256_permute4x64_epi64(_mm256_shuffle_epi8(digits, even_then_odd), 0xd8);
  }
  _mm_storeu_si128(reinterpret_cast<__m128i*>(first), _mm256_castsi256_si128(digits));
  _mm_storeu_si128(reinterpret_cast<__m128i*>(second), _mm256_extracti128_si256(digits, 1));
#else
  for (int i = 0; i < 2 * kIntegerPiece / kWidth; i++) {
    const Bytes digits = __builtin_convertvector(integers[i], Bytes);
    if (bits == 4) {
      const auto pairs = load_as<BytePairs>(&digits);
      const HalfBytes even = __builtin_convertvector(pairs, HalfBytes);
      const HalfBytes odd = __builtin_convertvector(pairs >> 8, HalfBytes);
      __builtin_memcpy(first + i * (kWidth / 2), &even, kWidth / 2);
      __builtin_memcpy(second + i * (kWidth / 2), &odd, kWidth / 2);
    } else {
      int8_t* piece = i * kWidth < kIntegerPiece ? first : second;
      __builtin_memcpy(piece + i * kWidth % kIntegerPiece, &digits, kWidth);
    }
  }
#endif
}

template <int Digits, int Group>
inline void round_to_chunks(const RoundArgs& args, int begin, int end) {
  using Chunk = IntegerChunk<Digits, Group>;
  constexpr int kVectors = Group / kWidth;
  const int chunks = num_integer_chunks(args.k, Group);
  auto to = static_cast<Chunk*>(args.out) + int64_t(begin) * chunks;
  for (int row = begin; row < end; row++) {
    const float* x = args.x + row * args.stride;
    auto first_chunk = to;
    Spread spread;
    for (int c = 0; c < chunks; c++, to++) {
      for (int g = 0; g < kIntegerGroups; g++) {
        VecI integers[kVectors] = {};
        float scale = 0;
        int sum = 0;
        int64_t at = int64_t(c) * Chunk::kSize + g * Group;
        if (at < args.k) {
          sum = round_group<Digits, Group>(x + at, args.bits, integers, scale, spread);
        }
        for (int d = Digits; d-- > 0;) {
          auto& pieces = to->digits[d];
          for (int p = 0; p < Chunk::kPieces; p += 2) {
            store_digits(
                integers + p * kIntegerPiece / kWidth, args.bits, pieces[p][g], pieces[p + 1][g]);
          }
          for (int i = 0; i < kVectors; i++) {
            integers[i] = (integers[i] + 128) >> 8;
          }
        }
        for (int i = 0; i < 4; i++) {
          to->scales[4 * g + i] = scale;
          to->sums[4 * g + i] = scale * float(sum);
        }
      }
    }
    if (spread.is_uneven()) {
      first_chunk->scales[0] = bits_as_float(kUnevenRow);
    }
  }
}

}  // namespace mlx_paged::cpu::MLX_PAGED_ISA
