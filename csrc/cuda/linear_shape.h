// Copyright © 2026 the mlx_paged authors. Apache-2.0.
//
// What the host and the kernels of a linear layer agree on: params, how the work is divided, and
// every instantiation of linear_cluster. Plain C++: nvcc reads it too.

#pragma once

namespace mlx_paged::cuda {

constexpr int kLinearMostWeights = 3;

// Products of one x with several weights, side by side. `is_gated`: the weights are gate and up,
// and the output is silu(x @ gate.T) * (x @ up.T), of which the first weight's output is written.
struct LinearParams {
  int num_rows;  // of x and the outputs
  int k;         // inputs
  int x_stride;  // elements from one row of x to the next
  int num_weights;
  int is_gated;
  int has_residual;  // that is added to the only output
  // Of the weights of queries, keys and values; 0: of others. Queries and keys are rotated, keys
  // and values go to their slots of the pools. A block has rows of both halves of a head.
  int head_dim;
  int n[kLinearMostWeights];  // outputs: rows of each weight
  int has_bias[kLinearMostWeights];
};
static_assert(sizeof(LinearParams) == 52, "the same for every compiler");

// Columns are added up in one order, whatever the kernel and however many rows x has, so that a
// row's result does not depend on the others: chunk i of two steps of 32 columns belongs to part
// i % 8, a part adds its own in order, and the parts are added in pairs, pairs of pairs and so on.
constexpr int kLinearStep = 32;
constexpr int kLinearChunkSteps = 2;
constexpr int kLinearChunk = kLinearChunkSteps * kLinearStep;
constexpr int kLinearParts = 8;

constexpr int kLinearMostRows = 64;  // of x, whichever kernel

// linear: a block has a warp for each part; a warp's tile is this many rows of the weight.
constexpr int kLinearRows = 16;
constexpr int kLinearBlockRows = 32;  // of x, of a block: most

// linear_cluster, for more rows of x where blocks can form clusters (sm_90 and later): a block of a
// cluster has a part.
constexpr int kClusterFewestRows = 17;  // of x: fewer are faster in linear
constexpr int kClusterWarpRows = 32;    // of the weight, in a warp's tile

constexpr int cluster_rows(int row_warps) {
  return kClusterWarpRows * row_warps;
}

constexpr int cluster_stage_bytes(int tiles, int row_warps) {
  return (cluster_rows(row_warps) + 8 * tiles) * kLinearChunk * 2;
}

// Where rows of a weight of heads are, of which a block has `rows` (or several heads): those of the
// first half that its row `row` is, or is `head_dim` / 2 before.
struct HeadRow {
  int first;  // of the first half
  int is_second;
};

constexpr HeadRow head_row(int block, int rows, int head_dim, int row) {
  const int unit = rows < head_dim ? rows : head_dim;
  const int chunk = block * (rows / unit) + row / unit;
  const int in_unit = row % unit;
  const int head = chunk / (head_dim / unit);
  const int first = chunk % (head_dim / unit) * (unit / 2) + in_unit % (unit / 2);
  return {head * head_dim + first, in_unit >= unit / 2};
}

// Of fp32, from one row of x to the next: no two lanes of a warp's store use the same bank.
constexpr int cluster_result_pitch(int row_warps) {
  return cluster_rows(row_warps) + 4;
}

// A ring of tiles of both operands, and in its place at the end the block's results.
constexpr int cluster_scratch(int tiles, int row_warps, int stages) {
  int ring = stages * cluster_stage_bytes(tiles, row_warps);
  int results = 8 * tiles * cluster_result_pitch(row_warps) * 4;
  return ring > results ? ring : results;
}

}  // namespace mlx_paged::cuda

// X(...) receives the arguments given after it, then tiles of eight rows of x, warps of a block,
// and stages. Small blocks, three or more to a multiprocessor, were fastest.
#define PAGED_FOR_EACH_LINEAR_CLUSTER(X, ...) \
  X(__VA_ARGS__, 4, 2, 3)                     \
  X(__VA_ARGS__, 8, 4, 3)
