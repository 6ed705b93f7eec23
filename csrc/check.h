// Copyright © 2026 the mlx_paged authors. Apache-2.0.
//
// MLX_PAGED_CHECK=1: block ids and slots are compared with the pool before a kernel may follow
// them. Their values exist only when the graph runs, so graph construction cannot see them, and a
// kernel that trusted a wrong one would read or overwrite foreign memory.

#pragma once

#include <cstdint>

namespace mlx_paged {

bool check_enabled();

// Each throws std::out_of_range (Python: IndexError) that names the row and the id.
void check_slots(const int32_t* slots, int count, int64_t num_slots);
void check_block_pairs(const int32_t* pairs, int count, int num_blocks);
void check_block_table(
    const char* op, const int32_t* table, int row, int begin, int end, int max_blocks,
    int num_blocks);
void check_context_len(int row, int context_len, int64_t room);
void check_work_items(
    const int32_t* items, int count, const int32_t* tables, int num_seqs, int max_blocks,
    int num_rows, int num_blocks);

}  // namespace mlx_paged
