// Copyright © 2026 the mlx_paged authors. Apache-2.0.
//
// Plain C++ that nvcc reads too.

#pragma once

namespace mlx_paged {

// Permutation of a value's columns for the products that read it (cuda/code_order.h).
struct ColumnOrder {
  int run;    // 32 or 64; 0: not permuted
  int apart;  // 1, 2 or 4
};

constexpr bool operator==(ColumnOrder a, ColumnOrder b) {
  return a.run == b.run && a.apart == b.apart;
}

}  // namespace mlx_paged
