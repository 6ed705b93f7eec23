// Copyright © 2026 the mlx_paged authors. Apache-2.0.
//
// Matrix products in bfloat16 pairs with float32 sums, which run at twice the rate of float32.
// Activations are rounded to bfloat16. For AVX-512 with BF16.

#pragma once

#include <stdint.h>

#include "product.h"

namespace mlx_paged::cpu {

constexpr int kBFloatTileColumns = 32;
constexpr int kBFloatPart = 1024;  // elements of k processed at a time, sized for the L2 cache

// Elements between rows of rounded activations; elements past k are zero.
inline int64_t bfloat_stride(int k) {
  return (int64_t(k) + 31) / 32 * 32;
}

struct BFloatProductArgs {
  const uint16_t* x;  // [rows, bfloat_stride(weights.k)]
  WeightView weights;
  float* c;  // [rows, weights.n], rows ldc apart
  int rows;
  int64_t ldc;
  float* scratch;  // kBFloatScratch floats, 64-byte aligned
};

constexpr int64_t kBFloatScratch = int64_t(kBFloatTileColumns) * kBFloatPart / 2;

struct BFloatKernels {
  // Rounds `count` rows of x [.., k] to nearest.
  void (*round)(const float* x, int64_t stride, int count, int k, uint16_t* out);
  // Computes columns [begin, end) of c. Denormals count as zero.
  void (*product)(const BFloatProductArgs& args, int64_t begin, int64_t end);

  bool serves(const WeightView& w) const {
    return product && w.format == WeightFormat::dense && w.dtype == DType::bfloat16;
  }
};

}  // namespace mlx_paged::cpu
