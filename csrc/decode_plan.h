// Copyright © 2026 the mlx_paged authors. Apache-2.0.
//
// The plan of a step in which every sequence has one row: what `build_plan` of
// mlx_paged/model/plan.py gives, which says why, in a fraction of its time. Python knows the
// constants, and plans everything else.

#pragma once

#include <cstdint>
#include <optional>
#include <vector>

namespace mlx_paged {

struct DecodePlanRules {
  int block_size;
  int64_t window;            // 0: none
  int64_t shortest_piece;    // tokens
  int64_t most_pieces;       // of a context
  int64_t most_half_pieces;  // of a context of several that are half as long
  bool pads;                 // sizes to strides, so that they change seldom
};

struct DecodePlan {
  int num_rows;
  int table_width;
  std::vector<int32_t> positions;     // [num_rows]
  std::vector<int32_t> slots;         // [num_rows]
  std::vector<int32_t> block_tables;  // [num_rows, table_width]
  std::vector<int32_t> context_lens;  // [num_rows]
  std::vector<int32_t> query_starts;  // [num_rows + 1]
  std::vector<int32_t> work_items;    // [, 6]
  std::vector<int32_t> merge_items;   // [, 4]
};

// For block tables [num_rows, table_width] whose rows have `num_blocks` blocks each. None for
// numbers that are no plan.
std::optional<DecodePlan> plan_decodes(
    const int32_t* tables, int num_rows, int table_width, const int64_t* num_blocks,
    const int64_t* context_lens, const DecodePlanRules& rules);

}  // namespace mlx_paged
