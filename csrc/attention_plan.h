// Copyright © 2026 the mlx_paged authors. Apache-2.0.
//
// The plan of a step: the pool slot of each row's key, and the blocks that the attention of each
// row reads. mlx_paged/model/plan.py defines and checks the numbers. Computed in C++, many times
// faster than with NumPy, because the GPU waits for it.

#pragma once

#include <cstdint>
#include <optional>
#include <vector>

#include "../metal/kernel_table.h"

namespace mlx_paged {

// Maximum query rows of an item that is a decode or a draft. Items with more rows are prefill
// chunks, which use other kernels and split their contexts differently.
constexpr int kMaxDraftRows = 8;

struct PlanSequences {
  int count;
  int table_width;
  const int32_t* tables;        // [count, table_width]
  const int64_t* num_blocks;    // [count], blocks in each table
  const int64_t* context_lens;  // [count]
  const int64_t* query_lens;    // [count]
  // [2, num_rows]: first and last position of the span that each row sees in full, checked by
  // Python; nullptr: no row has one.
  const int32_t* bounds;
  int num_bounds;  // rows of `bounds`
};

struct PlanRules {
  int block_size;
  int64_t window;         // 0: none
  int64_t rows_per_item;  // maximum
  int64_t split_tokens;   // approximate length of a piece of a context; 0: chosen by device
  bool on_gpu;
  bool pads;     // rounds sizes that depend on contexts, so that shapes repeat
  int num_rows;  // total, padded with rows that belong to no sequence; 0: no padding
  // Maximum rows of a sequence that share a pass over its context although each is planned as a
  // sequence of its own, as drafts are; 1: none. Kernels then give each row the bits that it has
  // alone (cuda::max_shared_rows).
  int64_t shared_rows;
};

struct AttentionPlan {
  int num_seqs;
  int num_rows;
  int table_width;
  std::vector<int32_t> positions;     // [num_rows]
  std::vector<int32_t> slots;         // [num_rows]
  std::vector<int32_t> block_tables;  // [num_seqs, table_width]
  std::vector<int32_t> context_lens;  // [num_seqs]
  std::vector<int32_t> query_starts;  // [num_seqs + 1]
  std::vector<paged::WorkItem> work_items;
  std::vector<paged::MergeItem> merge_items;
  std::vector<int32_t> bounds;  // [3, num_rows], including the positions; empty if there are none
};

// Returns nothing for invalid numbers.
std::optional<AttentionPlan> plan_attention(const PlanSequences& seqs, const PlanRules& rules);

}  // namespace mlx_paged
