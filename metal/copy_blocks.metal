// Copyright © 2026 the mlx_paged authors. Apache-2.0.

#include <metal_stdlib>

#include "kernel_table.h"
#include "language.h"

using namespace metal;

// Copies whole blocks of one pool, for each pair (source, destination), in place. Four chunks of 16
// bytes a thread, all loaded before the first is stored.
// grid: (chunks of a block / 1024 rounded up, pairs).
kernel void copy_blocks(
    device const int2* block_pairs [[buffer(0)]], device uint4* pool [[buffer(1)]],
    constant paged::CopyParams& params [[buffer(2)]],
    uint3 group_id [[threadgroup_position_in_grid]], uint3 group_size [[threads_per_threadgroup]],
    uint thread_id [[thread_index_in_threadgroup]]) {
  constexpr int LOADS = 4;
  int2 pair = block_pairs[group_id.y];
  device const uint4* source = pool + ulong(pair.x) * params.block_chunks;
  device uint4* destination = pool + ulong(pair.y) * params.block_chunks;
  int first = int(group_id.x * group_size.x) * LOADS + int(thread_id);
  uint4 chunks[LOADS];
  PAGED_UNROLL
  for (int i = 0; i < LOADS; i++) {
    int chunk = first + i * int(group_size.x);
    if (chunk < params.block_chunks) {
      chunks[i] = source[chunk];
    }
  }
  PAGED_UNROLL
  for (int i = 0; i < LOADS; i++) {
    int chunk = first + i * int(group_size.x);
    if (chunk < params.block_chunks) {
      destination[chunk] = chunks[i];
    }
  }
}
