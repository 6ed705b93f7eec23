// Copyright © 2026 the mlx_paged authors. Apache-2.0.
//
// paged_prefill_tensor for sm_90a, with the same bits. Four producer warps have the copy engine
// fill a ring with tiles of keys and values; consumer warps multiply in warpgroups
// (FlashAttention-3, Shah et al. 2024).

#pragma once

#include "attention_arguments.h"
#include "dependent_launch.h"
#include "prefill_state.h"
#include "prefill_tile.h"
#include "prefill_together.h"

// WARPS: consumer warps, besides four producer warps. Grid: (work items, KV heads, tiles
// of 16 WARPS queries).
template <typename T, int DIM, int WARPS>
__global__ void __launch_bounds__(32 * (WARPS + paged::WGMMA_WARPS), 1) prefill_wgmma_entry(
    ATTENTION_PARAMETERS, const __grid_constant__ mlx_paged::cuda::PoolMaps maps) {
#ifdef PAGED_HAS_WGMMA
  using namespace mlx_paged::cuda;
  using namespace paged;
  // Three warpgroups have 168 registers per thread each: too few for consumers, more than producers
  // need.
  constexpr bool MOVES_REGISTERS = WARPS > WGMMA_WARPS;
  constexpr int QUERIES = WARPS * PREFILL_TENSOR_QUERIES;
  extern __shared__ __align__(1024) unsigned char shared[];
  const TileRing<DIM, WARPS> tiles(shared_address(shared));
  let_next_kernel_begin();

  if (threadIdx.x == 0) {
    tiles.begin();
  }
  __syncthreads();
  QueryTile ours = query_tile(
      work_items[blockIdx.x], block_tables, params, blockIdx.y, int(blockIdx.z) * QUERIES, QUERIES);
  if (ours.num_queries <= 0) {
    wait_for_kernel_before();
    return;
  }
  int warp = threadIdx.x / 32;
  int lane = threadIdx.x % 32;
  int first_query = warp * PREFILL_TENSOR_QUERIES;
  KeyRange seen = keys_of_tile(ours, positions, params, lane);
  int first = seen.begin / PREFILL_BOX_TOKENS * PREFILL_BOX_TOKENS;
  wait_for_kernel_before();
  if (warp >= WARPS) {
    if constexpr (MOVES_REGISTERS) {
      leave_registers<24>();
    }
    tiles.fill(maps, ours.table, seen, first, ours.kv_head, warp - WARPS, lane);
    return;
  }
  if constexpr (MOVES_REGISTERS) {
    take_registers<240>();
  }

  auto query_of = [&](int q) -> const T* {
    return first_query + q < ours.num_queries ? queries + ours.query(first_query + q) * DIM
                                              : nullptr;
  };
  // Queries past the last see everything, so that their warp masks no tile because of them.
  auto keys_of = [&](int q) -> KeyRange {
    if (first_query + q >= ours.num_queries) {
      return seen;
    }
    KeyRange keys = keys_of_row(positions, ours.row(first_query + q), params);
    return {max(keys.begin, seen.begin), min(keys.end, seen.end)};
  };
  PrefillState<T, DIM> state(query_of, keys_of, lane);
  attend_together(state, tiles, seen, first, params, lane);
  state.join_lanes();
  write_prefill(state, ours, first_query, per_head, out, workspace, params, lane);
#endif
}
