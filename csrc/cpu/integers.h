// Copyright © 2026 the mlx_paged authors. Apache-2.0.
//
// Products of integer activations with affine weights of 4 or 8 bits. Each group of activations
// becomes integers xq with a scale sx, so that
//   sum_k x w = sum over groups of sx s (sum of xq q) + b (sx sum of xq),
// where w = s q + b. Sums within a group are exact: rounding affects the activations only.
//
// One 8-bit digit is int8, which users can select; 32 activations share a scale, since eight bits
// leave the small ones of a larger group too few. Three digits are numbers of 21 or 22 bits with a
// sign, whose errors are comparable to those of float32 sums; they beat widening the weights where
// one instruction multiplies and adds 64 bytes, and, for 4-bit weights, with AVX2, whose vectors of
// floats are short. A group's sum of products must fit 32 bits: 32 of 22 and 4 bits, or 64 of 21
// and 4; with 8-bit weights the two upper digits and the lowest have sums of their own. A row with
// a few very large numbers is multiplied in float32: next to a large number a small one has few
// digits left, and the large one may meet small weights.
//
// 64 three-digit activations share a scale where as many weights do. Products of prompts with AMX
// are 1.4 times as fast, as tiles are full and half as many sums are scaled. The price is one bit:
// errors of small numbers beside a large one are up to 1e-5 of the result, or 5e-5 if every group
// has one, not 4e-6 and 4e-5. Rounding to bfloat16 costs up to 2^-9, 40 times as much.
//
// Rounded rows are stored one after another as chunks, or, for AMX tiles, in blocks of 16 rows
// (amx_integers_kernel.h). Sums of a group are exact, so all kernels of a format add the same
// numbers in the same order.

#pragma once

#include <stdint.h>

#include "product.h"

namespace mlx_paged::cpu {

constexpr int kIntegerGroups = 4;  // per chunk
constexpr int kIntegerPiece = 16;  // elements
constexpr int kMinIntegerGroup = 32;

// Four groups of activations. Digits are stored in the order in which kernels read weights: a piece
// of each of the four groups, then the next piece of each. With 4-bit weights the pieces of each 32
// elements are the even ones, whose codes are the low four bits of bytes, and the odd ones; with
// 8-bit weights, the first 16 and the others.
template <int Digits, int Group>
struct IntegerChunk {
  static constexpr int kSize = kIntegerGroups * Group;
  static constexpr int kPieces = Group / kIntegerPiece;

  // Most significant first; each counts 256 of the next.
  int8_t digits[Digits][kPieces][kIntegerGroups][kIntegerPiece];
  float scales[4 * kIntegerGroups];  // of each group, four times
  float sums[4 * kIntegerGroups];    // scale times the sum of the group's integers, also four times
};

// Stored as a row's first scale; marks a three-digit row to be multiplied in float32.
constexpr uint32_t kUnevenRow = 0x7fc00001;

inline int num_integer_chunks(int k, int group) {
  return (k + kIntegerGroups * group - 1) / (kIntegerGroups * group);
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
constexpr int kTileChunk = 1024;  // elements of k, with vectors
constexpr int kMaxSpread = 8;     // powers of two between a row's largest and most others
constexpr int kRowBlock = 16;
constexpr int kAmxChunk = 2048;    // elements of k
constexpr int kPanelColumns = 64;  // at a time, with AMX
constexpr int64_t kPanelSums = kIntegerGroups * kPanelColumns * kRowBlock;

// A block of kRowBlock rows has, for each group of activations, digits, then scales, then sums of
// the rows: kRowBlock floats each.
struct RowBlockLayout {
  int group = 0;
  int digit_bytes = 0;
  int min_rows = 0;    // fewer rows are stored as chunks; 0: all
  int code_bytes = 1;  // of a repacked code

  int64_t group_bytes() const { return digit_bytes + 2 * kRowBlock * int64_t(sizeof(float)); }
  int64_t bytes(int k) const { return k / group * group_bytes(); }

  // For codes of a chunk, scales, and sums.
  int64_t num_scratch_floats(int rows, const WeightView& w) const {
    int64_t codes = int64_t(w.k < kAmxChunk ? w.k : kAmxChunk) * code_bytes;
    int64_t floats = codes / int64_t(sizeof(float)) + 2 * (w.k / w.group_size);
    int64_t blocks = w.k <= kAmxChunk ? 1 : (rows + kRowBlock - 1) / kRowBlock;
    return floats * kPanelColumns + blocks * kPanelSums;
  }
};

struct IntegerKernels {
  int chunk_bytes;
  int digits;
  int group;  // activations that share a scale
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
  RowBlockLayout blocks = {};
  bool leaves_many_rows = false;  // to a BLAS, which is faster

  bool uses_tiles(int rows) const { return min_tile_rows > 0 && rows >= min_tile_rows; }

  bool uses_blocks(int rows) const { return blocks.min_rows > 0 && rows >= blocks.min_rows; }

  int64_t row_bytes(int k) const { return int64_t(num_integer_chunks(k, group)) * chunk_bytes; }

  // Bytes of `rows` rounded rows.
  int64_t rounded_bytes(int rows, int k) const {
    return uses_blocks(rows) ? (rows + kRowBlock - 1) / kRowBlock * blocks.bytes(k)
                             : rows * row_bytes(k);
  }

  // True if one of `rows` rounded rows must be multiplied in float32.
  bool is_uneven(const void* rounded, int row, int rows, int k) const {
    int64_t at = uses_blocks(rows) ? row / kRowBlock * blocks.bytes(k) + blocks.digit_bytes +
                                         row % kRowBlock * int64_t(sizeof(float))
                                   : row * row_bytes(k) + digits * kIntegerGroups * group;
    uint32_t scale;
    __builtin_memcpy(&scale, static_cast<const char*>(rounded) + at, sizeof(scale));
    return digits > 1 && scale == kUnevenRow;
  }

  int64_t num_scratch_floats(int rows, const WeightView& w) const {
    if (!uses_tiles(rows)) {
      return 0;
    }
    if (uses_blocks(rows)) {
      return blocks.num_scratch_floats(rows, w);
    }
    const int64_t codes = w.k < kTileChunk ? w.k : kTileChunk;
    const int64_t sums = w.k < kTileChunk ? 0 : rows * kIntegerGroups;
    return (codes / int64_t(sizeof(float)) + 2 * (w.k / w.group_size) + sums) * kIntegerTileColumns;
  }
};

// Computes columns [begin, end) of args.c for all rows, multiplying uneven rows from `x` [rows, k]
// with row stride `stride`. Each element is summed in the same order for any number of rows.
void multiply_rounded(
    const IntegerKernels& integers, const IntegerProductArgs& args, const float* x, int64_t stride,
    int64_t begin, int64_t end);

}  // namespace mlx_paged::cpu
