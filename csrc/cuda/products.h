// Copyright © 2026 the mlx_paged authors. Apache-2.0.
//
// Which kernel of linear.cu, linear_stream.cu or linear_cluster.cu serves a product of few rows,
// and over which grid. Needs neither CUDA nor a GPU, so that its rule can be tested anywhere.

#pragma once

#include "../device_fusions.h"
#include "../device_program.h"
#include "../launch.h"
#include "linear_shape.h"

namespace mlx_paged::cuda {

// How many clusters of eight thread blocks run at once, one block on a multiprocessor; 0: none.
// sm_90 and later, if this build has code for it.
int most_clusters();

// The host name of linear_stream for so many tiles of x.
std::string stream_kernel(DType dtype, int tiles);

// Operands of a launch; a part without a bias names its weight, as the argument must be a buffer.
struct LinearOperands {
  struct Part {
    int weight;
    int bias;
    int out;
  };
  int x;
  int residual;  // x: none
  Part parts[kLinearMostWeights];
  int squares;    // of x; x: it is not normed
  int next_norm;  // x, as the following two: none
  int next_x;
  int next_squares;
  int rotations;  // x, as the slots: no heads
  int slots;
};

Launch linear_launch(
    const LinearParams& params, DType dtype, const LinearOperands& operands, int clusters);

// Whether there is a kernel for such a product.
bool serves_product(int num_rows, int n, int k, bool is_gated);

// Throws NoProgram where no kernel serves it.
Launch product_launch(const ProductStep& step, const std::vector<ProgramOperand>& operands);

}  // namespace mlx_paged::cuda
