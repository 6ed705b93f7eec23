// Copyright © 2026 the mlx_paged authors. Apache-2.0.
//
// Products of quantised activations with affine weights of 4 or 8 bits. Activations are rounded to
// int8 in groups of 32, each with a scale of its own, so that
//   sum_k x w = sum over groups of sx s (sum of xq q) + b (sx sum of xq),
// where w = s q + b. A group's sum of products is at most 32 * 127 * 255, which float32 holds
// exactly: what the integers round is the activations, and nothing else.

#pragma once

#include <stdint.h>

#include "product.h"

namespace mlx_paged::cpu {

constexpr int kInt8Group = 32;
constexpr int kInt8Groups = 4;  // of a chunk
constexpr int kInt8Chunk = kInt8Group * kInt8Groups;

// 128 activations. The codes lie as kernels read weights: first half of each of the four groups,
// then the other half. Half of a group are its 16 even elements, which the low four bits of bytes
// hold where weights have 4 bits; where they have 8, its first 16.
struct Int8Chunk {
  int8_t codes[kInt8Chunk];
  float scales[4 * kInt8Groups];  // of each group four times,
  float sums[4 * kInt8Groups];    // as is the scale times the sum of its codes
};

inline int num_int8_chunks(int k) {
  return (k + kInt8Chunk - 1) / kInt8Chunk;
}

struct Int8ProductArgs {
  const Int8Chunk* x;  // [rows, num_int8_chunks(weights.k)]
  WeightView weights;
  float* c;  // [rows, weights.n], rows ldc apart
  int rows;
  int64_t ldc;
  float* scratch;  // int8_scratch floats, 64-byte aligned
};

// Whether there is such a product.
inline bool has_int8_product(const WeightView& w) {
  return w.format == WeightFormat::affine && (w.bits == 4 || w.bits == 8);
}

constexpr int kInt8TileColumns = 32;

struct Int8Kernels {
  // `count` rows of x [.., k], which lie `stride` apart, for weights of `bits` bits. A group with a
  // number that is infinite or none makes its whole product none; one whose numbers are all below
  // 2^-100 counts as zeros.
  void (*quantise)(const float* x, int64_t stride, int count, int k, int bits, Int8Chunk* out);
  // Columns [begin, end) of c. Each element is summed in the same order whatever `rows` is.
  void (*product)(const Int8ProductArgs& args, int64_t begin, int64_t end);
  // From how many rows on the codes of kInt8TileColumns columns at a time are laid out anew, in
  // memory of the caller's; 0: never.
  int least_tile_rows;

  bool uses_tiles(int rows) const { return least_tile_rows > 0 && rows >= least_tile_rows; }

  int64_t num_scratch_floats(int rows, const WeightView& w) const {
    if (!uses_tiles(rows)) {
      return 0;
    }
    int64_t codes = int64_t(num_int8_chunks(w.k)) * kInt8Chunk / int64_t(sizeof(float));
    return (codes + 2 * (w.k / w.group_size)) * kInt8TileColumns;
  }
};

}  // namespace mlx_paged::cpu
