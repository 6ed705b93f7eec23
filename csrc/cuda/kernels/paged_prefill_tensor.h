// Copyright © 2026 the mlx_paged authors. Apache-2.0.
//
// Attention of a prefill chunk in 16 bits on NVIDIA's tensor cores: FlashAttention-2 (Dao 2023)
// over the pool. As in paged_prefill, rows of the score matrix are query rows x heads per group,
// and a warp keeps its sixteen rows, their scores and results in registers. Unlike there, all
// sixteen rows of an mma are used, and tiles are copied while the previous ones are processed.

#pragma once

#include "attention_arguments.h"
#include "dependent_launch.h"
#include "kv_tiles.h"
#include "prefill_state.h"
#include "prefill_tile.h"

// Grid: (work items, KV heads, tiles of 16 WARPS queries).
template <typename T, int DIM, int WARPS>
__global__ void __launch_bounds__(32 * WARPS) prefill_tensor_entry(ATTENTION_PARAMETERS) {
  using namespace paged;
  constexpr int QUERIES = WARPS * PREFILL_TENSOR_QUERIES;
  typedef KVTiles<T, DIM, 32 * WARPS> Tiles;
  extern __shared__ __align__(128) unsigned char shared[];

  begin_after_kernel_before();
  QueryTile ours = query_tile(
      work_items[blockIdx.x], block_tables, params, blockIdx.y, int(blockIdx.z) * QUERIES, QUERIES);
  if (ours.num_queries <= 0) {
    return;
  }
  int lane = threadIdx.x % 32;
  int first_query = threadIdx.x / 32 * PREFILL_TENSOR_QUERIES;
  KeyRange seen = keys_of_tile(ours, positions, params, lane);
  int first = seen.begin / 16 * 16;
  Tiles tiles(
      shared, key_pool, value_pool, ours.table, seen, params.num_kv_heads, ours.kv_head, first);

  auto query_of = [&](int q) -> const T* {
    return first_query + q < ours.num_queries ? queries + ours.query(first_query + q) * DIM
                                              : nullptr;
  };
  auto keys_of = [&](int q) -> KeyRange {
    if (first_query + q >= ours.num_queries) {
      return {0, 0};
    }
    KeyRange keys = keys_of_row(positions, ours.row(first_query + q), params);
    return {max(keys.begin, seen.begin), min(keys.end, seen.end)};
  };
  PrefillState<T, DIM> state(query_of, keys_of, lane);
  for (; first < seen.end; first += Tiles::TOKENS) {
    unsigned int tile = tiles.advance();
    if (state.sees(first)) {
      state.attend(tile, first, params, lane);
    }
  }
  state.join_lanes();

  write_prefill(state, ours, first_query, per_head, out, workspace, params, lane);
}
