// Copyright © 2026 the mlx_paged authors. Apache-2.0.
//
// Products of few rows with a transposed matrix, as decode has them: x [rows, k] times the rows of
// weights [n, k]. A general product packs the weights first, which for few rows costs more than the
// product.

#pragma once

#include <cstdint>

namespace mlx_paged::cpu {

struct ProductArgs {
  const float* a;  // [rows, k], rows lda apart
  const float* b;  // [n, k], rows ldb apart
  float* c;        // [rows, n], rows ldc apart
  int rows;
  int k;
  int64_t lda;
  int64_t ldb;
  int64_t ldc;
};

struct ProductKernels {
  // Columns [begin, end) of c. Each element is summed in the same order whatever `rows` is.
  void (*few_rows)(const ProductArgs& args, int64_t begin, int64_t end);
  // Up to which it pays. 0 where the instruction set has too few registers: `few_rows` is null.
  int most_rows;
};

}  // namespace mlx_paged::cpu
