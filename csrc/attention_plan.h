// Copyright © 2026 the mlx_paged authors. Apache-2.0.
//
// The plan of a step: where each row's key goes, and which blocks the attention of which rows
// reads. mlx_paged/model/plan.py says what the numbers are and checks them; here they are made, in
// a fraction of NumPy's time. The GPU waits for nothing else as often.

#pragma once

#include <cstdint>
#include <optional>
#include <vector>

namespace mlx_paged {

// Items of up to so many query rows are decodes and drafts to verify, those of more are prefill
// chunks: other kernels serve them, and their contexts are split in another way.
constexpr int kMostDraftRows = 8;

struct PlanSequences {
  int count;
  int table_width;
  const int32_t* tables;        // [count, table_width]
  const int64_t* num_blocks;    // [count], of each table
  const int64_t* context_lens;  // [count]
  const int64_t* query_lens;    // [count]
  // [2, num_rows]: the first and the last position of the span that each row sees as a whole, as
  // Python has checked them; nullptr: no row has one.
  const int32_t* bounds;
  int num_bounds;  // rows of `bounds`
};

struct PlanRules {
  int block_size;
  int64_t window;         // 0: none
  int64_t rows_per_item;  // at most
  int64_t split_tokens;   // of a piece of a context, about; 0: as the device needs
  bool on_gpu;
  bool pads;     // sizes of what depends on contexts to strides, so that they change seldom
  int num_rows;  // with rows of no sequence at the end; 0: those of the sequences
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
  std::vector<int32_t> work_items;    // [, 6]
  std::vector<int32_t> merge_items;   // [, 4]
  std::vector<int32_t> bounds;        // [3, num_rows], with the positions; empty: there are none
};

// None for numbers that are no plan.
std::optional<AttentionPlan> plan_attention(const PlanSequences& seqs, const PlanRules& rules);

}  // namespace mlx_paged
