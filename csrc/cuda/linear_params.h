// Copyright © 2026 the mlx_paged authors. Apache-2.0.
//
// What the host and the kernel of a linear layer agree on. Plain C++: nvcc reads it too.

#pragma once

namespace mlx_paged::cuda {

struct LinearParams {
  int num_rows;  // of x and the output
  int n;         // outputs: rows of the weight
  int k;         // inputs
  int has_bias;
};

// One warp's tile of a weight is this many of its rows, and this many of its columns at a time.
constexpr int kLinearRows = 16;
constexpr int kLinearStep = 32;
constexpr int kLinearWarps = 8;      // of a block; they share the rows and divide the columns
constexpr int kLinearMostRows = 32;  // of x

}  // namespace mlx_paged::cuda
