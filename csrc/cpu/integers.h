// Copyright © 2026 the mlx_paged authors. Apache-2.0.
//
// Products of integer activations with affine weights of 4 or 8 bits. Each group of 32 activations
// becomes integers xq with a scale sx, so that
//   sum_k x w = sum over groups of sx s (sum of xq q) + b (sx sum of xq),
// where w = s q + b. Sums within a group are exact: rounding affects the activations only.
//
// One 8-bit digit is int8, which users can select. Three digits are 22-bit numbers with a sign,
// whose errors are comparable to those of float32 sums; they beat widening the weights where one
// instruction multiplies and adds 64 bytes, and, for 4-bit weights, with AVX2, whose vectors of
// floats are short. A group's sum of 32 products of 22 and 4 bits fits 32 bits; with
// 8-bit weights the two upper digits and the lowest have sums of their own. A row with a few very
// large numbers is multiplied in float32: next to a large number 22 bits leave a small one few
// digits, and the large one may meet small weights.
//
// Rounded rows are stored one after another as chunks, or, for AMX tiles, in blocks of 16 rows
// (amx_integers_kernel.h). Sums of a group are exact, so all kernels of a format add the same
// numbers in the same order.

#pragma once

#include <stdint.h>

#include "product.h"

namespace mlx_paged::cpu {

constexpr int kIntegerGroup = 32;
constexpr int kIntegerGroups = 4;  // per chunk
constexpr int kIntegerChunk = kIntegerGroup * kIntegerGroups;

// 128 activations. Digits are stored in the order in which kernels read weights: the first half of
// each of the four groups, then the other halves. With 4-bit weights the first half of a group is
// its 16 even elements, whose codes are the low four bits of bytes; with 8-bit weights, its first
// 16.
template <int Digits>
struct IntegerChunk {
  int8_t digits[Digits][kIntegerChunk];  // most significant first; each counts 256 of the next
  float scales[4 * kIntegerGroups];      // of each group, four times
  float sums[4 * kIntegerGroups];  // scale times the sum of the group's integers, also four times
};

// Stored as a row's first scale; marks a three-digit row to be multiplied in float32.
constexpr uint32_t kUnevenRow = 0x7fc00001;

inline int num_integer_chunks(int k) {
  return (k + kIntegerChunk - 1) / kIntegerChunk;
}

struct RoundArgs {
  const float* x;  // [rows, k], rows `stride` apart
  int64_t stride;
  int rows;
  int k;
  int bits;   // of the weights
  void* out;  // [IntegerKernels::rounded_bytes]
};

struct IntegerProductArgs {
  const void* x;  // all `rows`, rounded together
  WeightView weights;
  float* c;  // [rows, weights.n], rows ldc apart
  int rows;
  int64_t ldc;
  float* scratch;  // num_scratch_floats, 64-byte aligned
};

constexpr int kIntegerTileColumns = 32;
constexpr int kMaxSpread = 8;  // powers of two between a row's largest and most others
constexpr int kRowBlock = 16;
constexpr int kAmxChunk = 2048;    // elements of k
constexpr int kPanelColumns = 64;  // at a time, with AMX
constexpr int64_t kPanelSums = kIntegerGroups * kPanelColumns * kRowBlock;

// A block of kRowBlock rows has, for each group of activations, digits, then scales, then sums of
// the rows: kRowBlock floats each.
struct RowBlockLayout {
  int digit_bytes = 0;
  int min_rows = 0;  // fewer rows are stored as chunks; 0: all

  int64_t group_bytes() const { return digit_bytes + 2 * kRowBlock * int64_t(sizeof(float)); }
  int64_t bytes(int k) const { return k / kIntegerGroup * group_bytes(); }

  // For codes of a chunk, scales, and sums; `code_bytes` as in IntegerKernels.
  int64_t num_scratch_floats(int rows, const WeightView& w, int code_bytes) const {
    int64_t codes = int64_t(w.k < kAmxChunk ? w.k : kAmxChunk) * code_bytes;
    int64_t floats = codes / int64_t(sizeof(float)) + 2 * (w.k / w.group_size);
    int64_t blocks = w.k <= kAmxChunk ? 1 : (rows + kRowBlock - 1) / kRowBlock;
    return floats * kPanelColumns + blocks * kPanelSums;
  }
};

struct IntegerKernels {
  int chunk_bytes;
  int digits;
  // Rounds rows [begin, end) of args.x. A group with an infinity or NaN makes its whole product
  // NaN; a group with all numbers below 2^-100 counts as zeros. Three digits: a finite row whose
  // largest number exceeds most others by more than 2^kMaxSpread gets kUnevenRow as its first
  // scale, and its product is NaN.
  void (*round)(const RoundArgs& args, int begin, int end);
  // Computes columns [begin, end) of c. Each element is summed in the same order for any `rows`.
  void (*product)(const IntegerProductArgs& args, int64_t begin, int64_t end);
  // Minimum rows for repacking the codes of kIntegerTileColumns columns at a time, in the caller's
  // memory; 0: never.
  int min_tile_rows;
  int code_bytes = 1;  // of a repacked code
  RowBlockLayout blocks = {};
  bool leaves_many_rows = false;  // to a BLAS, which is faster

  bool uses_tiles(int rows) const { return min_tile_rows > 0 && rows >= min_tile_rows; }

  bool uses_blocks(int rows) const { return blocks.min_rows > 0 && rows >= blocks.min_rows; }

  int64_t row_bytes(int k) const { return int64_t(num_integer_chunks(k)) * chunk_bytes; }

  // Bytes of `rows` rounded rows.
  int64_t rounded_bytes(int rows, int k) const {
    return uses_blocks(rows) ? (rows + kRowBlock - 1) / kRowBlock * blocks.bytes(k)
                             : rows * row_bytes(k);
  }

  // True if one of `rows` rounded rows must be multiplied in float32.
  bool is_uneven(const void* rounded, int row, int rows, int k) const {
    int64_t at = uses_blocks(rows) ? row / kRowBlock * blocks.bytes(k) + blocks.digit_bytes +
                                         row % kRowBlock * int64_t(sizeof(float))
                                   : row * row_bytes(k) + digits * kIntegerChunk;
    uint32_t scale;
    __builtin_memcpy(&scale, static_cast<const char*>(rounded) + at, sizeof(scale));
    return digits > 1 && scale == kUnevenRow;
  }

  int64_t num_scratch_floats(int rows, const WeightView& w) const {
    if (!uses_tiles(rows)) {
      return 0;
    }
    if (uses_blocks(rows)) {
      return blocks.num_scratch_floats(rows, w, code_bytes);
    }
    int64_t codes = int64_t(num_integer_chunks(w.k)) * kIntegerChunk * code_bytes;
    return (codes / int64_t(sizeof(float)) + 2 * (w.k / w.group_size)) * kIntegerTileColumns;
  }
};

// Computes columns [begin, end) of args.c for all rows, multiplying uneven rows from `x` [rows, k]
// with row stride `stride`. Each element is summed in the same order for any number of rows.
void multiply_rounded(
    const IntegerKernels& integers, const IntegerProductArgs& args, const float* x, int64_t stride,
    int64_t begin, int64_t end);

}  // namespace mlx_paged::cpu
