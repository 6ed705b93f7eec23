// Copyright © 2026 the mlx_paged authors. Apache-2.0.
//
// What the host hands to the kernels. Both sides include this file, so it names nothing but `int`
// and `float`, which are 32 bits wide on both, and `long`, which is 64.

#pragma once

namespace paged {

// Rows [row_begin, row_end) of one sequence against blocks [first_block, last_block) of its table.
// With partial_begin < 0 the item covers all that its rows can see and writes the output; otherwise
// row r of the item leaves its partial in row partial_begin + r of the workspace.
struct WorkItem {
  int sequence;
  int row_begin;
  int row_end;
  int first_block;
  int last_block;
  int partial_begin;
};

// Rows [row_begin, row_end) were split `num_splits` ways; split i of row r is workspace row
// partial_begin + i * (row_end - row_begin) + (r - row_begin).
struct MergeItem {
  int row_begin;
  int row_end;
  int partial_begin;
  int num_splits;
};

struct AttentionParams {
  int num_q_heads;
  int num_kv_heads;
  int block_shift;   // log2 of the block size
  int max_blocks;    // row length of block_tables
  int num_partials;  // rows of the workspace: [num_partials, num_q_heads, value_dim] sums of
                     // values, then as many maxima and sums of the softmax, each without value_dim
  int min_rows;      // a launch serves the items of [min_rows, max_rows] query rows; others are
  int max_rows;      // another launch's
  int window;        // keys in (position - window, position]
  int has_sinks;
  float scale;    // of the dot product; with log2(e) folded in unless there is a soft-cap
  float softcap;  // 0: none
};

struct MergeParams {
  int num_q_heads;
  int num_partials;
  int has_sinks;
};

// All counts of `chunks` are in units of 16 bytes.
struct WriteParams {
  int num_tokens;
  int key_chunks;    // of one token, all heads
  int value_chunks;  // likewise
};

struct CopyParams {
  int num_pairs;
  int block_chunks;
};

struct GatherParams {
  int num_kv_heads;
  int head_chunks;  // of one token and head
  int max_context_len;
  int block_shift;
  int max_blocks;
};

// Elements; the first two dims are the grid's.
struct StridedParams {
  int shape_2;
  int shape_3;
  long stride_0;
  long stride_1;
  long stride_2;
  long stride_3;
};

struct FillParams {
  int num_chunks;
};

}  // namespace paged
