// Copyright © 2026 the mlx_paged authors. Apache-2.0.

#include <metal_stdlib>

#include "kernel_table.h"

using namespace metal;

// Copies the key and the value of each token to its slot, in place. A token's heads lie one after
// the other on both sides, so this moves bytes: 16 a thread, whatever the dtype.
// grid: (chunks of a token / 256 rounded up, tokens).
kernel void write_kv(
    device const uint4* keys [[buffer(0)]], device const uint4* values [[buffer(1)]],
    device const int* slot_mapping [[buffer(2)]], device uint4* key_pool [[buffer(3)]],
    device uint4* value_pool [[buffer(4)]], constant paged::WriteParams& params [[buffer(5)]],
    uint3 group_id [[threadgroup_position_in_grid]], uint3 group_size [[threads_per_threadgroup]],
    uint thread_id [[thread_index_in_threadgroup]]) {
  int chunk = group_id.x * group_size.x + thread_id;
  ulong token = group_id.y;
  int slot = slot_mapping[token];
  if (slot < 0 || chunk >= params.key_chunks + params.value_chunks) {
    return;
  }
  if (chunk < params.key_chunks) {
    key_pool[ulong(slot) * params.key_chunks + chunk] = keys[token * params.key_chunks + chunk];
  } else {
    chunk -= params.key_chunks;
    value_pool[ulong(slot) * params.value_chunks + chunk] =
        values[token * params.value_chunks + chunk];
  }
}
