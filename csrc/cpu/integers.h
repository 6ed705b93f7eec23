// Copyright © 2026 the mlx_paged authors. Apache-2.0.
//
// Products of activations as integers with affine weights of 4 or 8 bits. In groups of 32
// activations become integers xq times a scale sx of their own, so that
//   sum_k x w = sum over groups of sx s (sum of xq q) + b (sx sum of xq),
// where w = s q + b. The sums of a group's products are exact: what the integers round is the
// activations, and nothing else.
//
// One digit of eight bits is int8: a choice of the user's. Three are numbers of 22 bits and a sign,
// whose errors are like those of sums in float32. A group's sum of 32 products of 22 bits and 4
// fits 32 bits; so they are for weights of 4 bits, and are faster than widening those where one
// instruction multiplies 64 bytes. A row with numbers much larger than most of its others is
// multiplied in float32: next to a large number, 22 bits leave a small one few digits, and weights
// may well be small where the large one is.

#pragma once

#include <stdint.h>

#include "product.h"

namespace mlx_paged::cpu {

constexpr int kIntegerGroup = 32;
constexpr int kIntegerGroups = 4;  // of a chunk
constexpr int kIntegerChunk = kIntegerGroup * kIntegerGroups;

// 128 activations. Digits lie as kernels read weights: first half of each of the four groups, then
// the other half. Half of a group are its 16 even elements, which the low four bits of bytes hold
// where weights have 4 bits; where they have 8, its first 16.
template <int Digits>
struct IntegerChunk {
  int8_t digits[Digits][kIntegerChunk];  // the highest first; each counts 256 of the next
  float scales[4 * kIntegerGroups];      // of each group four times,
  float sums[4 * kIntegerGroups];        // as is the scale times the sum of its integers
};

// In the place of its first scale: marks a row of three digits as one for float32.
constexpr uint32_t kUnevenRow = 0x7fc00001;

inline int num_integer_chunks(int k) {
  return (k + kIntegerChunk - 1) / kIntegerChunk;
}

struct IntegerProductArgs {
  const void* x;  // chunks [rows, num_integer_chunks(weights.k)]
  WeightView weights;
  float* c;  // [rows, weights.n], rows ldc apart
  int rows;
  int64_t ldc;
  float* scratch;  // num_scratch_floats, 64-byte aligned
};

constexpr int kIntegerTileColumns = 32;
constexpr int kMostSpread = 8;  // powers of two that lie between a row's largest and most others

struct IntegerKernels {
  int chunk_bytes;
  int digits;
  // `count` rows of x [.., k], which lie `stride` apart, for weights of `bits` bits (three digits:
  // of 4). A group with a number that is infinite or none makes its whole product none; one whose
  // numbers are all below 2^-100 counts as zeros. Three digits: of a row of finite numbers whose
  // largest is over 2^kMostSpread times as large as most, the first scale is kUnevenRow, and its
  // product none.
  void (*round)(const float* x, int64_t stride, int count, int k, int bits, void* out);
  // Columns [begin, end) of c. Each element is summed in the same order whatever `rows` is.
  void (*product)(const IntegerProductArgs& args, int64_t begin, int64_t end);
  // From how many rows on the codes of kIntegerTileColumns columns at a time are laid out anew, in
  // memory of the caller's; 0: never.
  int least_tile_rows;

  // True if a rounded row is multiplied in float32.
  bool is_uneven(const void* row) const {
    uint32_t scale;
    __builtin_memcpy(&scale, static_cast<const char*>(row) + digits * kIntegerChunk, sizeof(scale));
    return digits > 1 && scale == kUnevenRow;
  }

  bool uses_tiles(int rows) const { return least_tile_rows > 0 && rows >= least_tile_rows; }

  int64_t row_bytes(int k) const { return int64_t(num_integer_chunks(k)) * chunk_bytes; }

  int64_t num_scratch_floats(int rows, const WeightView& w) const {
    if (!uses_tiles(rows)) {
      return 0;
    }
    int64_t codes = int64_t(num_integer_chunks(w.k)) * kIntegerChunk / int64_t(sizeof(float));
    return (codes + 2 * (w.k / w.group_size)) * kIntegerTileColumns;
  }
};

// Columns [begin, end) of args.c, all rows: uneven ones from their `x` [rows, k], which lie
// `stride` apart. Each element is summed in the same order whatever the number of rows is.
void multiply_rounded(
    const IntegerKernels& integers, const IntegerProductArgs& args, const float* x, int64_t stride,
    int64_t begin, int64_t end);

}  // namespace mlx_paged::cpu
