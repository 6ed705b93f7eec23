// Copyright © 2026 the mlx_paged authors. Apache-2.0.
//
// Which kernel of linear.cu, linear_cluster.cu or linear_quantised.h serves a product of few rows,
// and over which grid. Needs neither CUDA nor a GPU, so that its rule can be tested anywhere.

#pragma once

#include "../device_program.h"
#include "../launch.h"
#include "quantised_shape.h"

namespace mlx_paged::cuda {

// Whether thread blocks can form clusters: sm_90 and later, if this build has code for it.
bool has_clusters();

// The host name of linear_cluster for so many tiles of x.
std::string cluster_kernel(DType dtype, int tiles);

// Operands of a launch; a part without a bias names its weight, as the argument must be a buffer.
struct LinearOperands {
  struct Part {
    int weight;
    int bias;
    int out;
    int scales = -1;  // of a quantised weight
    int biases = -1;  // scales: its format has none
  };
  int x;
  int residual;  // x: none
  Part parts[kLinearMostWeights];
  int rotations;  // x, as the slots: no heads
  int slots;
};

Launch linear_launch(
    const LinearParams& params, DType dtype, const LinearOperands& operands, bool clusters);

// Whether there is a kernel for such a product.
bool serves_product(int num_rows, int n, int k, bool is_gated);

// The same of weights that mx.quantize made.
Launch quantised_launch(
    const LinearParams& params, DType dtype, const WeightCodes& codes,
    const LinearOperands& operands, bool clusters);

bool serves_quantised(int num_rows, int n, int k, const WeightCodes& codes);

// Throws NoProgram where no kernel serves it.
Launch product_launch(const ProductStep& step, const std::vector<ProgramOperand>& operands);

}  // namespace mlx_paged::cuda
