// Copyright © 2026 the mlx_paged authors. Apache-2.0.
//
// A block of rows x columns at a time, each element a vector of partial sums: both operands are
// read along k as they lie in memory. Compiled once for each instruction set, see simd.h.

#pragma once

#include "product.h"
#include "simd.h"

namespace mlx_paged::cpu::MLX_PAGED_ISA {

#if defined(__AVX512F__)
constexpr int kBlockRows = 4;
constexpr int kBlockColumns = 4;
#else
constexpr int kBlockRows = 4;
constexpr int kBlockColumns = 2;
#endif

template <int Rows, int Columns>
inline void product_block(const ProductArgs& args, int64_t row, int64_t column) {
  const float* a = args.a + row * args.lda;
  const float* b = args.b + column * args.ldb;
  VecF sums[Rows][Columns] = {};
  auto add = [&](auto load_at) {
    VecF columns[Columns];
    for (int j = 0; j < Columns; j++) {
      columns[j] = load_at(b + j * args.ldb);
    }
    for (int i = 0; i < Rows; i++) {
      VecF x = load_at(a + i * args.lda);
      for (int j = 0; j < Columns; j++) {
        sums[i][j] += x * columns[j];
      }
    }
  };
  int k = 0;
  for (; k + kWidth <= args.k; k += kWidth) {
    add([k](const float* p) { return load(p + k); });
  }
  if (k < args.k) {
    add([&](const float* p) { return load_tail(p + k, args.k - k); });
  }
  for (int i = 0; i < Rows; i++) {
    for (int j = 0; j < Columns; j++) {
      args.c[(row + i) * args.ldc + column + j] = sum(sums[i][j]);
    }
  }
}

template <int Columns>
inline void product_columns(const ProductArgs& args, int64_t column) {
  int row = 0;
  for (; row + kBlockRows <= args.rows; row += kBlockRows) {
    product_block<kBlockRows, Columns>(args, row, column);
  }
  switch (args.rows - row) {
    case 1:
      return product_block<1, Columns>(args, row, column);
    case 2:
      return product_block<2, Columns>(args, row, column);
    case 3:
      return product_block<3, Columns>(args, row, column);
  }
}

inline void few_rows(const ProductArgs& args, int64_t begin, int64_t end) {
  int64_t column = begin;
  for (; column + kBlockColumns <= end; column += kBlockColumns) {
    product_columns<kBlockColumns>(args, column);
  }
  for (; column < end; column++) {
    product_columns<1>(args, column);
  }
}

}  // namespace mlx_paged::cpu::MLX_PAGED_ISA
