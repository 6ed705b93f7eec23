// Copyright © 2026 the mlx_paged authors. Apache-2.0.
//
// Chooses how a product is computed: a kernel of linear.cu, linear_stream.cu or linear_quantised.h
// and its grid, or cuBLASLt for more rows. Needs neither CUDA nor a GPU, so that its rule can be
// tested anywhere.

#pragma once

#include "../gpu/executable.h"
#include "../launch.h"
#include "quantised_shape.h"

namespace mlx_paged::cuda {

// The kernels fed by the copy engine (TMA), with blocks in clusters, that may run here: on sm_90 and
// later, if this build has code for the GPU.
enum class TmaKernels {
  none,
  small,  // linear_stream alone: a block has too little shared memory for the other (sm_120)
  any,
  wgmma,  // sm_90a's, too
};
TmaKernels tma_kernels();

// The host name of linear_stream for so many tiles of x.
std::string stream_kernel(DType dtype, int tiles, TmaKernels tma);

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
    const LinearParams& params, DType dtype, const LinearOperands& operands, TmaKernels tma);

// True if there is a kernel for such a product.
bool serves_product(int num_rows, int n, int k, bool is_gated, TmaKernels tma);

// The same of weights that mx.quantize made.
Launch quantised_launch(
    const LinearParams& params, DType dtype, const WeightCodes& codes,
    const LinearOperands& operands, TmaKernels tma);

bool serves_quantised(int num_rows, int n, int k, const WeightCodes& codes);

// The order in which the product's kernel accepts x; it reorders x itself otherwise. Kernels
// without an order: none.
CodeOrder order_of_x(const ProductStep& step, TmaKernels tma);

// --- Products of rows with their experts (metal/experts.h)

// Tiles of eight pairs that an item has, of a step's: twice as many as an expert has on average.
int expert_tiles(int num_rows, int top_k, int num_experts);
// The same of quantised weights, whose kernels are fewer.
int quantised_expert_tiles(int tiles);

// True if there are kernels for such products with the matrices of experts.
bool serves_experts(const ProductStep& products, TmaKernels tma);

Launch expert_launch(
    const MixtureStep& step, const ProductStep& products, bool is_first, int tiles, int max_items);

// True if this process has cuBLASLt.
bool has_library_products();

// The name of a launch that is no kernel but a product, or two of one size, by cuBLASLt.
inline constexpr const char* kLibraryProduct = "library_product";
constexpr uint64_t kLibraryWorkspaceBytes = 32 << 20;  // of one at a time
constexpr int kLibraryMostRows =
    512;  // of a step: more take so long that the host is no part of it

struct LibraryProductParams {
  // Buffers. Of each part its weight, its bias (or weight) and its result.
  static constexpr int kX = 0;
  static constexpr int kResidual = 1;  // x: none
  static constexpr int kWorkspace = 2;
  static constexpr int kParts = 3;

  int num_rows;
  int k;
  int x_stride;  // elements from one row of x to the next
  int n;         // rows of each weight
  int count;     // of parts: 1 or 2
  int has_bias;
  int has_residual;
  DType dtype;
};

// The launches of one step of products. `workspace`: an operand. Throws UnsupportedGraph where
// nothing serves it.
std::vector<Launch> product_launches(
    const ProductStep& step, const std::vector<StepOperand>& operands, int workspace,
    TmaKernels tma);

}  // namespace mlx_paged::cuda
