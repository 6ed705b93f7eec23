// Copyright © 2026 the mlx_paged authors. Apache-2.0.

#include "decode_plan.h"

#include <algorithm>
#include <bit>
#include <limits>
#include <numeric>

namespace mlx_paged {

namespace {

int64_t ceil_div(int64_t n, int64_t m) {
  return (n + m - 1) / m;
}

int64_t in_strides(int64_t size) {
  int64_t stride = std::max(16, 1 << std::max(0, int(std::bit_width(uint64_t(size))) - 3));
  return ceil_div(size, stride) * stride;
}

// As `tokens_per_piece` of plan.py.
int64_t longest_piece(int64_t tokens, const DecodePlanRules& rules) {
  int64_t longest = std::max(ceil_div(tokens, rules.most_pieces), rules.shortest_piece);
  bool halves = tokens > longest && 2 * tokens <= longest * rules.most_half_pieces;
  return halves ? longest / 2 : longest;
}

struct Item {
  int row;
  int64_t first_block;
  int64_t end_block;
  int64_t num_tokens;  // from the first block on
  int64_t num_splits;
};

}  // namespace

std::optional<DecodePlan> plan_decodes(
    const int32_t* tables, int num_rows, int table_width, const int64_t* num_blocks,
    const int64_t* context_lens, const DecodePlanRules& rules) {
  int block_size = rules.block_size;
  std::vector<Item> items(num_rows);
  for (int i = 0; i < num_rows; i++) {
    int64_t len = context_lens[i];
    if (len < 1 || len > std::numeric_limits<int32_t>::max() || num_blocks[i] > table_width ||
        num_blocks[i] * block_size < len) {
      return std::nullopt;
    }
    int64_t first = rules.window ? std::max<int64_t>(len - rules.window, 0) / block_size : 0;
    int64_t end = ceil_div(len, block_size);
    int64_t tokens = len - first * block_size;
    int64_t splits = ceil_div(tokens, longest_piece(tokens, rules));
    items[i] = {i, first, end, tokens, std::min(splits, end - first)};
  }
  // (The longest first.)
  std::stable_sort(items.begin(), items.end(), [](const Item& a, const Item& b) {
    return a.num_tokens > b.num_tokens;
  });

  DecodePlan plan;
  plan.num_rows = num_rows;
  plan.table_width = int(rules.pads ? in_strides(table_width) : table_width);
  plan.positions.resize(num_rows);
  plan.slots.resize(num_rows);
  plan.context_lens.resize(num_rows);
  plan.query_starts.resize(num_rows + 1);
  std::iota(plan.query_starts.begin(), plan.query_starts.end(), 0);
  plan.block_tables.resize(size_t(num_rows) * plan.table_width);
  for (int i = 0; i < num_rows; i++) {
    const int32_t* table = tables + int64_t(i) * table_width;
    int position = int(context_lens[i]) - 1;
    plan.positions[i] = position;
    plan.context_lens[i] = position + 1;
    plan.slots[i] = table[position / block_size] * block_size + position % block_size;
    std::copy_n(table, table_width, plan.block_tables.begin() + int64_t(i) * plan.table_width);
  }
  int num_partials = 0;
  for (const auto& item : items) {
    int64_t blocks = item.end_block - item.first_block;
    bool is_split = item.num_splits > 1;
    for (int64_t piece = 0; piece < item.num_splits; piece++) {
      int64_t begin = item.first_block + piece * blocks / item.num_splits;
      int64_t end = item.first_block + (piece + 1) * blocks / item.num_splits;
      int partial = is_split ? num_partials + int(piece) : -1;
      plan.work_items.insert(
          plan.work_items.end(), {item.row, item.row, item.row + 1, int(begin), int(end), partial});
    }
    if (is_split) {
      plan.merge_items.insert(
          plan.merge_items.end(), {item.row, item.row + 1, num_partials, int(item.num_splits)});
      num_partials += int(item.num_splits);
    }
  }
  if (rules.pads) {
    plan.work_items.resize(in_strides(int64_t(plan.work_items.size()) / 6) * 6);
    plan.merge_items.resize(in_strides(int64_t(plan.merge_items.size()) / 4) * 4);
  }
  return plan;
}

}  // namespace mlx_paged
