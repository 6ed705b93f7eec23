// Copyright © 2026 the mlx_paged authors. Apache-2.0.
//
// Contract between the host and the kernels of linear layers: params, work division, and every
// instantiation of linear_stream. Plain C++ that nvcc reads too.

#pragma once

#include "code_order.h"

namespace mlx_paged::cuda {

constexpr int kLinearMaxWeights = 3;

// Low-rank adapters of a product's weights (kernels/linear_adapters.h). The first blocks of the
// grid multiply x by `a` (kernels/adapter_units.h).
struct LinearAdapters {
  int count;                      // 0: none
  int rank;                       // a multiple of 8, as are the rows of weights with adapters
  int num_targets;                // weights with adapters
  int num_units;                  // of work, at most
  int num_workers;                // the first blocks, which do that work in turns
  int num_blocks;                 // of them, if they do nothing else: whole clusters
  int target[kLinearMaxWeights];  // index of each weight among those with adapters; -1: none
};

constexpr int kAdapterMaxRank = 64;
constexpr int kAdapterRows = 8;    // of a unit: rows of x with one adapter
constexpr int kAdapterRanks = 16;  // of a unit: rows of the first matrix
constexpr int kAdapterParts = 4;   // of k, at least
constexpr int kAdapterMaxParts = 8;

// The most tiles (eight rows of x each) for which a product's own blocks compute units. With more,
// too few registers are left. The warps' sums take extra shared memory.
constexpr int kAdapterUnitTiles = 4;
constexpr int adapter_sum_bytes(int num_warps) {
  return num_warps * 32 * 16;
}

// Parts of k, so that units of a wide x take no longer.
constexpr int adapter_parts(int k) {
  return k < 8192 ? kAdapterParts : kAdapterMaxParts;
}

// The most tiles of kAdapterRows rows with one of `count` adapters (kernels/adapter_units.h): each
// adapter of 32 rows begins one, and takes another for every eight rows more.
constexpr int adapter_tiles(int num_rows, int count) {
  int tiles = 0;
  for (int rows = num_rows; rows > 0; rows -= 32) {
    const int some = rows < 32 ? rows : 32;
    const int adapters = count < some ? count : some;
    tiles += adapters + (some - adapters) / kAdapterRows;
  }
  return tiles;
}

// Parameters of products of one x with several weights. `is_gated`: the weights are gate and up,
// and the output is silu(x @ gate.T) * (x @ up.T), written to the first weight's output.
struct LinearParams {
  int num_rows;  // of x and the outputs
  int k;         // columns of x and of the weights
  int x_stride;  // elements between rows of x
  int num_weights;
  int is_gated;
  int has_residual;  // added to the single output
  // Head dim if the weights are those of queries, keys and values; otherwise 0. Queries and keys
  // are rotated; keys and values go to their pool slots. A block covers rows of both halves of a
  // head.
  int head_dim;
  int n[kLinearMaxWeights];  // rows of each weight
  int has_bias[kLinearMaxWeights];
  // linear_quantized_wgmma only: x is already in code order.
  int x_is_ordered;
  CodeOrder out_order;      // order of the outputs, whose number is a multiple of its run
  LinearAdapters adapters;  // linear_stream and linear_quantized_stream only
};
static_assert(sizeof(LinearParams) == 100, "the same for every compiler");

// Parameters of products of rows with one weight of each of their experts (metal/experts.h), or
// with its gate and up. A launch covers `max_items` items; the step's items come first.
struct ExpertProductParams {
  LinearParams product;  // for one expert; x has one row per row of the step, or one per pair
  int num_tiles;         // in an expert's weight
  int top_k;
  int is_first;  // gathers x by row and stores results in sorted order; otherwise the reverse
};
static_assert(sizeof(ExpertProductParams) == 112, "the same for every compiler");

// Parameters for items of rows that are sorted by expert (kernels/sorted_experts.h).
constexpr int kMaxSortedExperts = 1023;
struct SortedItemsParams {
  int num_rows;
  int num_experts;
  int item_rows;
  int max_items;
};
static_assert(sizeof(SortedItemsParams) == 16, "the same for every compiler");

// Parameters for gathering the rows of pairs (a row and one of its experts) of 16-bit elements.
struct SortedRowsParams {
  int row_chunks;  // of eight elements
  int x_stride;    // chunks between rows of x
  int top_k;
};
static_assert(sizeof(SortedRowsParams) == 12, "the same for every compiler");

// A row's columns are summed in one fixed order, so its result does not depend on the number of
// rows: the columns form kLinearParts parts, each summed in order, and the parts are added
// pairwise, then pairs of pairs. In `linear`, chunk i of two 32-column steps belongs to part i % 8.
constexpr int kLinearStep = 32;
constexpr int kLinearChunkSteps = 2;
constexpr int kLinearChunk = kLinearChunkSteps * kLinearStep;
constexpr int kLinearParts = 8;

constexpr int kLinearMaxRows = 64;  // maximum rows of x for any of these kernels

// linear: one warp per part; a warp's tile covers this many rows of the weight.
constexpr int kLinearRows = 16;
constexpr int kLinearBlockRows = 32;  // maximum rows of x per block

// linear_stream, for any number of rows where blocks can form clusters (sm_90 and later). Its parts
// are runs of chunks; each block of a cluster takes one or more.
constexpr int kWgmmaTiles = 8;               // tiles of eight rows of x in sm_90a's kernel
constexpr int kStreamRows = 64;              // weight rows per block, sixteen per warp
constexpr int kStreamBytes = 96 * 1024;      // maximum ring: two blocks fit a multiprocessor
constexpr int kBlockPairBytes = 113 * 1024;  // the most of each of two blocks
constexpr int kStreamMaxBlocks =
    264;  // two for each of 132 multiprocessors: limit when columns are divided
constexpr int kStreamMinChunks = 4;  // minimum per block after division
constexpr int kStreamThreads = 32 * (kStreamRows / kLinearRows + 1);  // one producer warp
constexpr int kStreamPitch = kStreamRows + 4;  // floats between rows of a block's results

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

// Offset of the barriers, which follow the ring of operand tiles. The block's results later reuse
// the ring's memory.
constexpr int stream_barriers(int tiles) {
  int ring = stream_stages(tiles) * stream_stage_bytes(tiles);
  int results = 8 * tiles * kStreamPitch * 4;
  return ring > results ? ring : results;
}

constexpr int stream_scratch(int tiles) {
  return stream_barriers(tiles) + copy_ring_bytes(stream_stages(tiles));
}

// sm_90a's kernel also keeps part sums there that do not fit its registers. sm_120 has too little
// shared memory for them.
constexpr int wgmma_scratch(int tiles) {
  return stream_scratch(tiles) + 8 * tiles * kStreamRows * 4;
}

// Number of blocks per cluster: divides `num_chunks` chunks of `num_tiles` weight tiles, leaving
// each block at least `fewest` chunks.
constexpr int stream_cluster(int num_tiles, int num_chunks, int fewest) {
  int blocks = 1;
  while (blocks < kLinearParts && 2 * blocks * num_tiles <= kStreamMaxBlocks &&
         num_chunks >= 2 * blocks * fewest) {
    blocks *= 2;
  }
  return blocks;
}

// Position of row `row` of block `block` in a weight of heads. A block has `rows` rows, taken from
// both halves of a head. `first` is the row within the first half; is_second: the row itself is
// `head_dim` / 2 further.
struct HeadRow {
  int first;  // within the first half
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

// X(...) receives the arguments after it, then the number of tiles of eight rows of x.
#define PAGED_FOR_EACH_LINEAR_STREAM(X, ...) \
  X(__VA_ARGS__, 1)                          \
  X(__VA_ARGS__, 2)                          \
  X(__VA_ARGS__, 4)                          \
  X(__VA_ARGS__, 8)
