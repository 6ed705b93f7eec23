// Copyright © 2026 the mlx_paged authors. Apache-2.0.

#include <metal_stdlib>

#include "block_table.h"
#include "kernel_table.h"

using namespace metal;

// Dense [num_seqs, num_kv_heads, max_context_len, dim] keys or values of whole sequences, zeros
// past each context. Moves bytes: 16 a thread, whatever the dtype.
// grid: (chunks of a head's tokens / 256 rounded up, KV heads, sequences).
kernel void gather_kv(
    device const uint4* pool [[buffer(0)]], device const int* block_tables [[buffer(1)]],
    device const int* context_lens [[buffer(2)]], device uint4* dense [[buffer(3)]],
    constant paged::GatherParams& params [[buffer(4)]],
    uint3 group_id [[threadgroup_position_in_grid]], uint3 group_size [[threads_per_threadgroup]],
    uint thread_id [[thread_index_in_threadgroup]]) {
  int index = group_id.x * group_size.x + thread_id;
  int token = index / params.head_chunks;
  int chunk = index % params.head_chunks;
  if (token >= params.max_context_len) {
    return;
  }
  int head = group_id.y;
  ulong sequence = group_id.z;
  uint4 bytes = uint4(0);
  if (token < context_lens[sequence]) {
    paged::BlockTable table = {block_tables + sequence * params.max_blocks, params.block_shift};
    bytes = pool[(table.slot(token) * params.num_kv_heads + head) * params.head_chunks + chunk];
  }
  ulong row = (sequence * params.num_kv_heads + head) * params.max_context_len + token;
  dense[row * params.head_chunks + chunk] = bytes;
}
