// Copyright © 2026 the mlx_paged authors. Apache-2.0.
//
// From a token of a sequence to its place in a pool [num_blocks, block_size, num_kv_heads, dim].

#pragma once

#include <metal_stdlib>

#include "attention_options.h"
#include "kernel_table.h"

using namespace metal;

namespace paged {

// The block size is a power of two.
struct BlockTable {
  device const int* blocks;
  int shift;

  METAL_FUNC ulong slot(int token) const thread {
    return (ulong(blocks[token >> shift]) << shift) + ulong(token & ((1 << shift) - 1));
  }
};

// Positions of the keys that a query row sees: [begin, end).
struct KeyRange {
  int begin;
  int end;
};

// The same: positions of the first, which may be negative, and of the last.
struct RowBounds {
  int first;
  int last;
};

// `positions` is [num_rows], or with bounds [3, num_rows]: a row sees what its position and the
// window let it see, and from its first to its last bound.
METAL_FUNC RowBounds
bounds_of_row(device const int* positions, int row, constant AttentionParams& params) {
  RowBounds bounds;
  bounds.last = positions[row];
  bounds.first = PAGED_HAS_WINDOW(params) ? bounds.last - params.window + 1 : 0;
  if (PAGED_HAS_BOUNDS(params)) {
    bounds.first = min(bounds.first, positions[params.bounded_rows + row]);
    bounds.last = max(bounds.last, positions[2 * params.bounded_rows + row]);
  }
  return bounds;
}

METAL_FUNC KeyRange
keys_of_row(device const int* positions, int row, constant AttentionParams& params) {
  RowBounds bounds = bounds_of_row(positions, row, params);
  KeyRange keys;
  keys.begin = max(bounds.first, 0);
  keys.end = bounds.last + 1;
  return keys;
}

// Bounds of a row that does not exist.
METAL_FUNC RowBounds no_keys() {
  RowBounds bounds;
  bounds.first = 0;
  bounds.last = -1;
  return bounds;
}

// Without bounds the last one alone is needed: a register less a row.
METAL_FUNC bool sees(RowBounds row, int token, constant AttentionParams& params) {
  if (PAGED_HAS_BOUNDS(params)) {
    return token <= row.last && (!PAGED_HAS_WINDOW(params) || token >= row.first);
  }
  return token <= row.last && (!PAGED_HAS_WINDOW(params) || token > row.last - params.window);
}

// The keys of an item that any of the rows [row_begin, row_end) sees.
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
