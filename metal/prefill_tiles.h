// Copyright © 2026 the mlx_paged authors. Apache-2.0.
//
// Tiles of keys and values in threadgroup memory, which all SIMD-groups of a prefill kernel share.

#pragma once

#include <metal_stdlib>

#include "attention_shape.h"
#include "matrix_tile.h"
#include "pool_codes.h"
#include "query_tile.h"

using namespace metal;

namespace paged {

// Loads TOKENS keys and values of the KV head, from token `first` on, with THREADS threads; rows
// from `end` on are zeros. Rows are prefill_pitch() apart. The scales of a quantized token follow
// its key. The first barrier waits for threads that still read the previous tiles.
template <typename T, int TOKENS, int K_DIM, int V_DIM, int THREADS>
METAL_FUNC void load_tiles(
    threadgroup T* key_tile, threadgroup T* value_tile, device const T* key_pool,
    device const T* value_pool, QueryTile ours, int first, int end,
    constant AttentionParams& params, uint thread_id) {
  constexpr int K_PITCH = prefill_pitch(K_DIM, sizeof(T));
  constexpr int V_PITCH = prefill_pitch(V_DIM, sizeof(T));
  TileLoader<T, TOKENS, K_DIM, THREADS> keys;
  TileLoader<T, TOKENS, V_DIM, THREADS> values;
  if (PAGED_QUANTIZED(params)) {
    keys.load_quantized(
        (device const uchar*)key_pool, key_format(params), K_DIM, params.num_kv_heads, ours.kv_head,
        ours.table, first, end, {0, K_DIM}, thread_id);
    values.load_quantized(
        (device const uchar*)value_pool, value_format(params), V_DIM, params.num_kv_heads,
        ours.kv_head, ours.table, first, end, {0, V_DIM}, thread_id);
  } else {
    keys.load(
        key_pool, K_DIM, params.num_kv_heads, ours.kv_head, ours.table, first, end, {0, K_DIM},
        thread_id);
    values.load(
        value_pool, V_DIM, params.num_kv_heads, ours.kv_head, ours.table, first, end, {0, V_DIM},
        thread_id);
  }
  threadgroup_barrier(mem_flags::mem_threadgroup);  // The previous tiles have been read.
  keys.store(key_tile, K_PITCH, key_format(params), thread_id);
  values.store(value_tile, V_PITCH, value_format(params), thread_id);
  if (has_scales(params) && int(thread_id) < TOKENS) {
    threadgroup T* scales = key_tile + int(thread_id) * K_PITCH + K_DIM;
    load_scales(
        (threadgroup float*)scales, (device const uchar*)key_pool, (device const uchar*)value_pool,
        K_DIM, V_DIM, ours.table, first + int(thread_id), end, ours.kv_head, params);
  }
  threadgroup_barrier(mem_flags::mem_threadgroup);
}

}  // namespace paged
