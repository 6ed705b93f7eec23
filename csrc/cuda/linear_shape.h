// Copyright © 2026 the mlx_paged authors. Apache-2.0.
//
// Contract between the host and the kernels of a linear layer: params, how the work is divided, and
// every instantiation of linear_stream. Plain C++: nvcc reads it too.

#pragma once

#include "code_order.h"

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
  // Head dim of the weights of queries, keys and values; 0 for others. Queries and keys are
  // rotated, keys and values go to their slots of the pools. A block has rows of both halves of a
  // head.
  int head_dim;
  int n[kLinearMostWeights];  // outputs: rows of each weight
  int has_bias[kLinearMostWeights];
  // linear_quantised_wgmma only: x is in the order of the weights' codes.
  int x_is_ordered;
  CodeOrder out_order;  // of outputs, which are multiples of its run
};
static_assert(sizeof(LinearParams) == 64, "the same for every compiler");

// Products of rows with one weight of each of their experts (metal/experts.h), or its gate and
// up. A launch has kernels for `max_items` items, of which those of the step are first.
struct ExpertProductParams {
  LinearParams product;  // of one expert; x has a row for each row of the step, or for each pair
  int num_tiles;         // of an expert's weight
  int top_k;
  int is_first;  // x is gathered by row of the step, and results are by place; else the reverse
};
static_assert(sizeof(ExpertProductParams) == 76, "the same for every compiler");

// Columns are added up in one order, however many rows x has, so that a row's result does not
// depend on the others: the columns are kLinearParts parts, a part is added up in order, and the
// parts are added in pairs, pairs of pairs and so on. Of linear, chunk i of two steps of 32 columns
// belongs to part i % 8.
constexpr int kLinearStep = 32;
constexpr int kLinearChunkSteps = 2;
constexpr int kLinearChunk = kLinearChunkSteps * kLinearStep;
constexpr int kLinearParts = 8;

constexpr int kLinearMostRows = 64;  // of x, whichever kernel

// linear: a block has a warp for each part; a warp's tile is this many rows of the weight.
constexpr int kLinearRows = 16;
constexpr int kLinearBlockRows = 32;  // of x, of a block: most

// linear_stream, which serves any number of rows where blocks can form clusters (sm_90 and later).
// Its parts are runs of chunks, of which a block of a cluster has one or several.
constexpr int kWgmmaTiles = 8;           // of eight rows of x: of sm_90a's kernel
constexpr int kStreamRows = 64;          // of the weight, of a block: a warp for each sixteen
constexpr int kStreamBytes = 96 * 1024;  // of a ring, at most: two blocks to a multiprocessor
constexpr int kStreamMostBlocks =
    264;  // that are made by dividing columns: two for each of 132 multiprocessors
constexpr int kStreamFewestChunks = 4;                                // that are left to each
constexpr int kStreamThreads = 32 * (kStreamRows / kLinearRows + 1);  // one warp copies
constexpr int kStreamPitch =
    kStreamRows + 4;  // floats from one row of a block's results to the next

constexpr int stream_stage_bytes(int tiles) {
  return (kStreamRows + 8 * tiles) * kLinearChunk * 2;
}

constexpr int stream_stages(int tiles) {
  return kStreamBytes / stream_stage_bytes(tiles);
}

// Bytes of the barriers in shared memory (kernels/copy_ring.h).
constexpr int copy_ring_bytes(int stages) {
  return 16 * stages;
}

// A ring of tiles of both operands, and in its place at the end the block's results; then barriers.
constexpr int stream_barriers(int tiles) {
  int ring = stream_stages(tiles) * stream_stage_bytes(tiles);
  int results = 8 * tiles * kStreamPitch * 4;
  return ring > results ? ring : results;
}

constexpr int stream_scratch(int tiles) {
  return stream_barriers(tiles) + copy_ring_bytes(stream_stages(tiles));
}

// Behind these, of sm_90a's kernel: sums of parts for which registers have no room. (sm_120 has no
// room for them in shared memory, either.)
constexpr int wgmma_scratch(int tiles) {
  return stream_scratch(tiles) + 8 * tiles * kStreamRows * 4;
}

// Blocks of a cluster, which divide `num_chunks` of so many tiles of the weight, each `fewest`.
constexpr int stream_cluster(int num_tiles, int num_chunks, int fewest) {
  int blocks = 1;
  while (blocks < kLinearParts && 2 * blocks * num_tiles <= kStreamMostBlocks &&
         num_chunks >= 2 * blocks * fewest) {
    blocks *= 2;
  }
  return blocks;
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

}  // namespace mlx_paged::cuda

// X(...) receives the arguments given after it, then tiles of eight rows of x.
#define PAGED_FOR_EACH_LINEAR_STREAM(X, ...) \
  X(__VA_ARGS__, 1)                          \
  X(__VA_ARGS__, 2)                          \
  X(__VA_ARGS__, 4)                          \
  X(__VA_ARGS__, 8)
