// Copyright © 2026 the mlx_paged authors. Apache-2.0.
//
// Maps a token of a sequence to its place in a pool [num_blocks, block_size, num_kv_heads, dim].

#pragma once

#include <metal_stdlib>

#include "attention_variant.h"
#include "kernel_table.h"

using namespace metal;

namespace paged {

// The block table of a sequence. The block size is a power of two.
struct BlockTable {
  device const int* blocks;
  int shift;

  METAL_FUNC ulong slot(int token) const thread {
    return (ulong(blocks[token >> shift]) << shift) + ulong(token & ((1 << shift) - 1));
  }
};

// Positions of keys that a query row sees: [begin, end).
struct KeyRange {
  int begin;
  int end;
};

METAL_FUNC KeyRange
keys_of_row(device const int* positions, int row, constant AttentionParams& params) {
  RowBounds bounds = bounds_of_row(positions, row, params.options);
  KeyRange keys;
  keys.begin = max(bounds.first, 0);
  keys.end = bounds.last + 1;
  return keys;
}

// Keys of an item that any of the rows [row_begin, row_end) sees.
METAL_FUNC KeyRange keys_of_rows(
    WorkItem item, device const int* positions, int row_begin, int row_end,
    constant AttentionParams& params) {
  KeyRange seen = keys_of_row(positions, row_begin, params);
  for (int row = row_begin + 1; row < row_end; row++) {
    KeyRange keys = keys_of_row(positions, row, params);
    seen.begin = min(seen.begin, keys.begin);
    seen.end = max(seen.end, keys.end);
  }
  seen.begin = max(seen.begin, item.first_block << params.block_shift);
  seen.end = min(seen.end, item.last_block << params.block_shift);
  return seen;
}

}  // namespace paged
