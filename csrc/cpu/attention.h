// Copyright © 2026 the mlx_paged authors. Apache-2.0.
//
// Arguments of the vectorized attention and pool kernels on the CPU.

#pragma once

#include <cstddef>
#include <cstdint>

#include "../dtype.h"
#include "../weight_format.h"

namespace mlx_paged::cpu {

struct PoolView : PoolLayout {
  char* data;
};

struct AttentionArgs {
  DType dtype;          // dtype of queries, results and plain pools
  const void* queries;  // [num_rows, num_q_heads, keys.head_dim]
  PoolView keys;
  PoolView values;
  void* out;                            // [num_rows, num_q_heads, values.head_dim]
  const int32_t* positions;             // [num_rows], or with bounds [3, num_rows]
  const int32_t* block_tables;          // [num_seqs, max_blocks]
  const paged::WorkItem* work_items;    // [num_items]
  const paged::MergeItem* merge_items;  // [num_merges]
  const float* per_head;                // values per query head, or null
  float* partial_out;  // [partial rows, num_q_heads, values.head_dim], not normalized
  float* partial_max;  // [partial rows, num_q_heads], base-2 logits
  float* partial_sum;  // [partial rows, num_q_heads]
  int num_rows;
  int num_q_heads;
  int num_kv_heads;
  int block_size;
  int max_blocks;
  paged::AttentionOptions options;
  Activations activations;
};

// Arguments for reading and writing slots of a quantized pool.
struct PoolArgs {
  PoolView pool;
  DType dtype;
  bool rotated;  // see rotates_keys
};

struct PoolKernels {
  // Quantizes rows [begin, end) of [num_tokens, num_kv_heads, head_dim]; row i goes to slot
  // slots[i] unless that is negative.
  void (*quantize)(
      const PoolArgs& args, const void* rows, const int32_t* slots, int64_t begin, int64_t end);
  // Dequantizes one head of a slot.
  void (*dequantize)(const PoolArgs& args, int64_t slot, int head, void* out);
};

struct AttentionKernels {
  // Floats of scratch that a task needs for an item with `rows` query rows and `num_heads` KV
  // heads.
  size_t (*scratch_size)(const AttentionArgs& args, int rows, int num_heads);
  // Computes one work item for KV heads [head_begin, head_end).
  void (*attend)(const AttentionArgs& args, int item, int head_begin, int head_end, float* scratch);
  // Merges the partials of one output row, for all heads.
  void (*merge)(const AttentionArgs& args, int merge_item, int row);
};

}  // namespace mlx_paged::cpu
