// Copyright © 2026 the mlx_paged authors. Apache-2.0.

#include "check.h"

#include <algorithm>
#include <cstdint>
#include <cstdlib>
#include <set>
#include <sstream>
#include <stdexcept>
#include <string>

#include "ops.h"

namespace mlx_paged {

namespace {

bool check_enabled() {
  const char* value = std::getenv("MLX_PAGED_CHECK");
  return value && std::string(value) == "1";
}

template <typename... Parts>
void require(bool ok, const Parts&... parts) {
  if (!ok) {
    std::ostringstream message;
    (message << ... << parts);
    throw std::out_of_range(message.str());
  }
}

// The entries [begin, end) of a row of block_tables.
void require_blocks(
    const char* op, const mx::array& tables, int row, int begin, int end, int num_blocks) {
  int max_blocks = tables.shape(1);
  require(
      begin >= 0 && begin <= end && end <= max_blocks, "[", op, "] the blocks of row ", row,
      " must be in [0, ", max_blocks, "] but got [", begin, ", ", end, ")");
  const int32_t* table = tables.data<int32_t>() + int64_t(row) * max_blocks;
  for (int i = begin; i < end; i++) {
    require(
        table[i] >= 0 && table[i] < num_blocks, "[", op, "] block_tables[", row, ", ", i,
        "] must be in [0, ", num_blocks, ") but got ", table[i]);
  }
}

// The rows of a work or merge item.
void require_rows(const char* items, int i, int begin, int end, int num_rows) {
  require(
      begin >= 0 && begin <= end && end <= num_rows, "[paged_attention] the rows of ", items, "[",
      i, "] must be in [0, ", num_rows, "] but got [", begin, ", ", end, ")");
}

}  // namespace

void check_write_kv(const std::vector<mx::array>& inputs, mx::Stream stream) {
  if (!check_enabled()) {
    return;
  }
  mx::synchronize(stream);
  const auto& pool = inputs[0];
  const int32_t* slots = inputs[4].data<int32_t>();
  int64_t num_slots = int64_t(pool.shape(0)) * pool.shape(1);
  std::set<int32_t> written;
  for (int i = 0; i < inputs[4].shape(0); i++) {
    require(
        slots[i] >= -1 && slots[i] < num_slots, "[write_kv] slot_mapping[", i,
        "] must be -1 or in [0, ", num_slots, ") but got ", slots[i]);
    require(
        slots[i] == -1 || written.insert(slots[i]).second, "[write_kv] slot_mapping[", i,
        "] must be a slot of its own but slot ", slots[i], " is written twice");
  }
}

void check_copy_blocks(const std::vector<mx::array>& inputs, mx::Stream stream) {
  if (!check_enabled()) {
    return;
  }
  mx::synchronize(stream);
  const int32_t* pairs = inputs.back().data<int32_t>();
  int count = inputs.back().shape(0);
  int num_blocks = inputs[0].shape(0);
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

void check_gather_kv(const std::vector<mx::array>& inputs, int max_context_len, mx::Stream stream) {
  if (!check_enabled()) {
    return;
  }
  mx::synchronize(stream);
  const auto& pool = inputs[0];
  const auto& tables = inputs[2];
  const int32_t* context_lens = inputs[3].data<int32_t>();
  int block_size = pool.shape(1);
  int64_t room = int64_t(tables.shape(1)) * block_size;
  for (int i = 0; i < tables.shape(0); i++) {
    require(
        context_lens[i] >= 0 && context_lens[i] <= room, "[gather_kv] context_lens[", i,
        "] must be in [0, ", room, "] but got ", context_lens[i]);
    int used = (std::min(context_lens[i], max_context_len) + block_size - 1) / block_size;
    require_blocks("gather_kv", tables, i, 0, used, pool.shape(0));
  }
}

void check_paged_attention(const std::vector<mx::array>& inputs, mx::Stream stream) {
  if (!check_enabled()) {
    return;
  }
  mx::synchronize(stream);
  int num_rows = inputs[0].shape(0);
  int num_blocks = inputs[1].shape(0);
  const auto& tables = inputs[4];
  const auto* work = reinterpret_cast<const WorkItem*>(inputs[5].data<int32_t>());
  const auto* merges = reinterpret_cast<const MergeItem*>(inputs[6].data<int32_t>());
  int num_partials = 0;
  for (int i = 0; i < inputs[5].shape(0); i++) {
    const WorkItem& item = work[i];
    require_rows("work_items", i, item.row_begin, item.row_end, num_rows);
    if (item.row_begin == item.row_end) {
      continue;
    }
    require(
        item.sequence >= 0 && item.sequence < tables.shape(0),
        "[paged_attention] the sequence of work_items[", i, "] must be in [0, ", tables.shape(0),
        ") but got ", item.sequence);
    require_blocks(
        "paged_attention", tables, item.sequence, item.first_block, item.last_block, num_blocks);
    num_partials = std::max(num_partials, item.partial_begin + item.row_end - item.row_begin);
  }
  for (int i = 0; i < inputs[6].shape(0); i++) {
    const MergeItem& item = merges[i];
    require_rows("merge_items", i, item.row_begin, item.row_end, num_rows);
    int64_t end = item.partial_begin + int64_t(item.num_splits) * (item.row_end - item.row_begin);
    require(
        item.partial_begin >= 0 && item.num_splits >= 0 && end <= num_partials,
        "[paged_attention] the partials of merge_items[", i, "] must be in [0, ", num_partials,
        "] but got [", item.partial_begin, ", ", end, ")");
  }
}

}  // namespace mlx_paged
