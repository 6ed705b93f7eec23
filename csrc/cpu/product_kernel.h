// Copyright © 2026 the mlx_paged authors. Apache-2.0.
//
// A block of rows x columns at a time, each element a vector of partial sums: both operands are
// read along k as they lie in memory. Compiled once for each instruction set, see simd.h.

#pragma once

#include "product.h"
#include "simd.h"
#include "sums.h"

namespace mlx_paged::cpu::MLX_PAGED_ISA {

#if defined(__AVX512F__)
constexpr int kBlockRows = 4;
constexpr int kBlockColumns = 4;
constexpr int kMostProductRows = 64;
#else
constexpr int kBlockRows = 4;
constexpr int kBlockColumns = 2;
constexpr int kMostProductRows = 16;
#endif

// Fetches `Ahead` vectors for each vector along k, so that memory is read in one long run while
// the block is computed: four short ones side by side are too short for the prefetcher.
template <int Rows, int Columns, int Ahead>
inline void product_block(
    const ProductArgs& args, int64_t row, int64_t column, const float*& ahead) {
  const float* a = args.a + row * args.lda;
  int k_size = args.weights.k;
  int64_t ldb = args.weights.row_bytes / int64_t(sizeof(float));
  const float* b = static_cast<const float*>(args.weights.data) + column * ldb;
  VecF sums[Rows][Columns] = {};
  auto add = [&](auto load_at) {
    VecF columns[Columns];
    for (int j = 0; j < Columns; j++) {
      columns[j] = load_at(b + j * ldb);
    }
    for (int j = 0; j < Ahead; j++) {
      __builtin_prefetch(ahead, 0, 2);
      ahead += kWidth;
    }
    for (int i = 0; i < Rows; i++) {
      VecF x = load_at(a + i * args.lda);
      for (int j = 0; j < Columns; j++) {
        sums[i][j] += x * columns[j];
      }
    }
  };
  int k = 0;
  for (; k + kWidth <= k_size; k += kWidth) {
    add([k](const float* p) { return load(p + k); });
  }
  if (k < k_size) {
    add([&](const float* p) { return load_tail(p + k, k_size - k); });
  }
  store_sums(sums, args.c + row * args.ldc + column, args.ldc);
}

// All rows of some columns. The columns after them are fetched by the first blocks of rows, `Ahead`
// vectors at a time.
template <int Columns, int Ahead>
inline void product_rows(const ProductArgs& args, int64_t column) {
  auto ahead = reinterpret_cast<const float*>(
      static_cast<const char*>(args.weights.data) + (column + Columns) * args.weights.row_bytes);
  int row = 0;
  for (int fetched = 0; row + kBlockRows <= args.rows; row += kBlockRows, fetched += Ahead) {
    if (fetched < Columns) {
      product_block<kBlockRows, Columns, Ahead>(args, row, column, ahead);
    } else {
      product_block<kBlockRows, Columns, 0>(args, row, column, ahead);
    }
  }
  switch (args.rows - row) {
    case 1:
      return product_block<1, Columns, Ahead>(args, row, column, ahead);
    case 2:
      return product_block<2, Columns, Ahead>(args, row, column, ahead);
    case 3:
      return product_block<3, Columns, Ahead>(args, row, column, ahead);
  }
}

template <int Columns>
inline void product_columns(const ProductArgs& args, int64_t column) {
  if (args.rows <= kBlockRows) {
    product_rows<Columns, Columns>(args, column);
  } else if (args.rows < Columns * kBlockRows) {
    product_rows<Columns, (Columns + 1) / 2>(args, column);
  } else {
    product_rows<Columns, 1>(args, column);
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
