// Copyright © 2026 the mlx_paged authors. Apache-2.0.
//
// Matrix products of bfloat16 weights in bfloat16 pairs with float32 sums, which run at a multiple
// of float32's rate. Activations are rounded to one bfloat16, or split into three that add up to
// the float32 number: products with AMX tiles are so fast that three of them still pay off.

#pragma once

#include <stdint.h>

#include "product.h"

namespace mlx_paged::cpu {

constexpr int kBFloatTileColumns = 32;
constexpr int kBFloatBlock = 32;   // elements of k
constexpr int kBFloatPart = 1024;  // elements of k processed at a time, sized for the L2 cache

// Elements of rounded rows; those past k are zero.
inline int64_t bfloat_stride(int k) {
  return (int64_t(k) + kBFloatBlock - 1) / kBFloatBlock * kBFloatBlock;
}

struct BFloatRoundArgs {
  const float* x;  // [rows, k], rows `stride` apart
  int64_t stride;
  int rows;
  int k;
  uint16_t* out;  // [BFloatKernels::rounded_size]
};

struct BFloatProductArgs {
  const uint16_t* x;  // all `rows`, rounded together
  WeightView weights;
  float* c;  // [rows, weights.n], rows ldc apart
  int rows;
  int64_t ldc;
  float* scratch;  // num_scratch_floats, 64-byte aligned
};

struct BFloatKernels {
  // Rounds rows [begin, end) of args.x.
  void (*round)(const BFloatRoundArgs& args, int begin, int end);
  // Computes columns [begin, end) of c. Each element is summed in the same order for any `rows`.
  // Denormals count as zero.
  void (*product)(const BFloatProductArgs& args, int64_t begin, int64_t end);
  int parts = 1;       // numbers per activation
  int row_block = 1;   // rows that are stored together
  bool whole = false;  // True: all of k is processed at a time

  bool serves(const WeightView& w) const {
    return product && w.format == WeightFormat::dense && w.dtype == DType::bfloat16;
  }

  int64_t rounded_size(int rows, int k) const {
    return (rows + row_block - 1) / row_block * row_block * parts * bfloat_stride(k);
  }

  int64_t num_scratch_floats(int k) const {
    return kBFloatTileColumns * (whole ? bfloat_stride(k) : kBFloatPart) / 2;
  }
};

}  // namespace mlx_paged::cpu
