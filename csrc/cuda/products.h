// Copyright © 2026 the mlx_paged authors. Apache-2.0.
//
// Chooses the kernel and grid of a product: linear.cu, linear_stream.cu or linear_quantized.h, or
// cuBLASLt for more rows. Needs neither CUDA nor a GPU, so its rules can be tested anywhere.

#pragma once

#include "../gpu/executable.h"
#include "../launch.h"
#include "quantized_shape.h"

namespace mlx_paged::cuda {

// Stream kernels that can run here. They need a copy engine and clusters: sm_90 and later, if this
// build has code for it.
enum class TmaKernels {
  none,
  small,  // linear_stream only: too little shared memory per block for the others (sm_120)
  any,
  wgmma,  // also those of sm_90a
};
TmaKernels tma_kernels();

// Host name of linear_stream for `tiles` tiles of x.
std::string stream_kernel(DType dtype, int tiles, TmaKernels tma);

// Operands of a launch. A part without a bias names its weight, because the argument must be a
// buffer.
struct LinearOperands {
  struct Part {
    int weight;
    int bias;
    int out;
    int scales = -1;    // of a quantized weight
    int biases = -1;    // equal to scales if the format has none
    int adapter_b = 0;  // equal to x without adapters
  };
  int x;
  int residual;  // equal to x if there is none
  Part parts[kLinearMaxWeights];
  int rotations;  // equal to x, like slots, without heads
  int slots;
  int hidden;  // equal to x, like those below, without adapters
  int adapters;
  int finished;
  int adapter_a[kLinearMaxWeights];  // of each target
};

Launch linear_launch(
    LinearParams params, DType dtype, const LinearOperands& operands, TmaKernels tma);

// True if there is a kernel for such a product.
bool serves_product(int num_rows, int n, int k, bool is_gated, TmaKernels tma);

// The same for weights from mx.quantize.
Launch quantized_launch(
    LinearParams params, DType dtype, const WeightCodes& codes, const LinearOperands& operands,
    TmaKernels tma);

bool serves_quantized(int num_rows, int n, int k, const WeightCodes& codes, TmaKernels tma);

// Order of x that the product's kernel reads fastest; it reorders x itself otherwise. Empty for
// kernels that read x as it is.
CodeOrder order_of_x(const ProductStep& step, TmaKernels tma);

// --- Products of rows with their experts (metal/experts.h)

// Tiles of eight pairs per item of a step: twice the average number of pairs per expert.
int expert_tiles(int num_rows, int top_k, int num_experts);
// The same for quantized weights, which have fewer kernels.
int quantized_expert_tiles(int tiles);

// True if there are kernels for such products with the experts' matrices.
bool serves_experts(const ProductStep& products, TmaKernels tma);

Launch expert_launch(
    const MixtureStep& step, const ProductStep& products, bool is_first, int tiles, int max_items);

// --- Products of rows that are sorted by expert: those of a prompt

// One of them. A row is a pair of a row of the step and one of its experts.
struct SortedProduct {
  // Operands of a weight; formats without biases have the scales again.
  struct Part {
    int weight;
    int scales;
    int biases;
    int bias;  // -1: none
  };

  int num_rows;
  int num_experts;
  int n;
  int k;
  DType dtype;
  WeightCodes codes;
  std::vector<Part> parts;  // one, or gate and up
  int x;
  int out;
  int items;          // its SortedItems
  bool x_is_ordered;  // as order_of_sorted says
  CodeOrder out_order;
  std::optional<int> pairs;  // where each row's result goes; nothing: to its own place
};
bool serves_sorted(const SortedProduct& product, TmaKernels tma);
Launch sorted_launch(const SortedProduct& product);
// The order of x that its kernel reads fastest.
CodeOrder order_of_sorted(const WeightCodes& codes);

// A product's work items: up to `item_rows` adjacent rows of one expert each.
struct SortedItems {
  int num_rows;
  int num_experts;
  int item_rows;

  static SortedItems of(const SortedProduct& product);
  int max_count() const;
  uint64_t bytes() const;
};
Launch sorted_items_launch(const SortedItems& items, int experts, int to);
// Gathers each pair's row of x for a product. `x_stride`: elements between rows of x.
struct SortedRows {
  int num_pairs;
  int top_k;
  int k;
  int x_stride;
};
Launch sorted_rows_launch(const SortedRows& rows, CodeOrder order, int x, int pairs, int to);

// True if this process has cuBLASLt.
bool has_library_products();

// Name of launches that are one or two cuBLASLt products of equal size instead of a kernel.
inline constexpr const char* kLibraryProduct = "library_product";
constexpr uint64_t kLibraryWorkspaceBytes = 32 << 20;  // for one at a time
constexpr int kLibraryMaxRows =
    512;  // per step; larger steps run long enough to hide the host's time

struct LibraryProductParams {
  // Buffers. Each part has a weight, a bias (or the weight again) and a result.
  static constexpr int kX = 0;
  static constexpr int kResidual = 1;  // equal to x if there is none
  static constexpr int kWorkspace = 2;
  static constexpr int kParts = 3;

  int num_rows;
  int k;
  int x_stride;  // elements between rows of x
  int n;         // rows of each weight
  int count;     // parts: 1 or 2
  int has_bias;
  int has_residual;
  DType dtype;
};

// Launches of one product step. `workspace`: an operand. Throws UnsupportedGraph if no kernel
// serves it.
std::vector<Launch> product_launches(
    const ProductStep& step, const std::vector<StepOperand>& operands, int workspace,
    TmaKernels tma);

}  // namespace mlx_paged::cuda
