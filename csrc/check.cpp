// Copyright © 2026 the mlx_paged authors. Apache-2.0.

#include "check.h"

#include <cstdlib>
#include <set>
#include <sstream>
#include <stdexcept>
#include <string>

namespace mlx_paged {

namespace {
template <typename... Parts>
void require(bool ok, const Parts&... parts) {
  if (!ok) {
    std::ostringstream message;
    (message << ... << parts);
    throw std::out_of_range(message.str());
  }
}
}  // namespace

bool check_enabled() {
  const char* value = std::getenv("MLX_PAGED_CHECK");
  return value && std::string(value) == "1";
}

void check_slots(const int32_t* slots, int count, int64_t num_slots) {
  std::set<int32_t> written;
  for (int i = 0; i < count; i++) {
    require(
        slots[i] >= -1 && slots[i] < num_slots, "[write_kv] slot_mapping[", i,
        "] must be -1 or in [0, ", num_slots, ") but got ", slots[i]);
    require(
        slots[i] == -1 || written.insert(slots[i]).second, "[write_kv] slot_mapping[", i,
        "] must be a slot of its own but slot ", slots[i], " is written twice");
  }
}

void check_block_pairs(const int32_t* pairs, int count, int num_blocks) {
  std::set<int32_t> destinations;
  for (int i = 0; i < 2 * count; i++) {
    require(
        pairs[i] >= 0 && pairs[i] < num_blocks, "[copy_blocks] block_pairs[", i / 2, ", ", i % 2,
        "] must be in [0, ", num_blocks, ") but got ", pairs[i]);
    require(
        i % 2 == 0 || destinations.insert(pairs[i]).second, "[copy_blocks] block_pairs[", i / 2,
        ", 1] must be a block of its own but block ", pairs[i], " is a destination twice");
  }
  for (int i = 0; i < count; i++) {
    require(
        !destinations.count(pairs[2 * i]), "[copy_blocks] block_pairs[", i,
        ", 0] must not be a destination but block ", pairs[2 * i], " is");
  }
}

void check_block_table(
    const char* op, const int32_t* table, int row, int begin, int end, int max_blocks,
    int num_blocks) {
  require(
      begin >= 0 && begin <= end && end <= max_blocks, "[", op, "] the blocks of row ", row,
      " must be in [0, ", max_blocks, "] but got [", begin, ", ", end, ")");
  for (int i = begin; i < end; i++) {
    require(
        table[i] >= 0 && table[i] < num_blocks, "[", op, "] block_tables[", row, ", ", i,
        "] must be in [0, ", num_blocks, ") but got ", table[i]);
  }
}

void check_context_len(int row, int context_len, int64_t room) {
  require(
      context_len >= 0 && context_len <= room, "[gather_kv] context_lens[", row,
      "] must be in [0, ", room, "] but got ", context_len);
}

void check_work_items(
    const int32_t* items, int count, const int32_t* tables, int num_seqs, int max_blocks,
    int num_rows, int num_blocks) {
  for (int i = 0; i < count; i++) {
    const int32_t* w = items + 6 * i;
    require(
        w[1] >= 0 && w[1] <= w[2] && w[2] <= num_rows, "[paged_attention] the rows of work_items[",
        i, "] must be in [0, ", num_rows, "] but got [", w[1], ", ", w[2], ")");
    if (w[1] == w[2]) {
      continue;
    }
    require(
        w[0] >= 0 && w[0] < num_seqs, "[paged_attention] the sequence of work_items[", i,
        "] must be in [0, ", num_seqs, ") but got ", w[0]);
    check_block_table(
        "paged_attention", tables + int64_t(w[0]) * max_blocks, w[0], w[3], w[4], max_blocks,
        num_blocks);
  }
}

}  // namespace mlx_paged
