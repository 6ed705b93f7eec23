// Copyright © 2026 the mlx_paged authors. Apache-2.0.
//
// Attention of a prefill chunk in 16 bits on NVIDIA's tensor cores: FlashAttention-2 (Dao 2023)
// over the pool. As in paged_prefill the rows of the score matrix are query rows x heads of a
// group, and a warp keeps its sixteen rows, their scores and results in registers; but all sixteen
// rows of an mma are in use, and tiles are copied while the one before is worked on.

#pragma once

#include "attention_arguments.h"
#include "attention_output.h"
#include "dependent_launch.h"
#include "kv_tiles.h"
#include "prefill_state.h"
#include "query_tile.h"

namespace paged {

// The keys that any of an item's rows sees, as `keys_of_rows`; but the lanes divide the rows.
__device__ __forceinline__ KeyRange keys_of_tile(
    const QueryTile& ours, const int* positions, const AttentionParams& params, int lane) {
  KeyRange seen = {0x7fffffff, 0};
  for (int row = ours.row(0) + lane; row <= ours.row(ours.num_queries - 1); row += 32) {
    KeyRange keys = keys_of_row(positions, row, params);
    seen.begin = min(seen.begin, keys.begin);
    seen.end = max(seen.end, keys.end);
  }
#pragma unroll
  for (int mask = 1; mask < 32; mask *= 2) {
    seen.begin = min(seen.begin, __shfl_xor_sync(0xffffffffu, seen.begin, mask));
    seen.end = max(seen.end, __shfl_xor_sync(0xffffffffu, seen.end, mask));
  }
  seen.begin = max(seen.begin, ours.item.first_block << ours.table.shift);
  seen.end = min(seen.end, ours.item.last_block << ours.table.shift);
  return seen;
}

}  // namespace paged

// grid: (work items, KV heads, tiles of 16 WARPS queries).
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

  Partials partials = partials_at(workspace, params.num_partials, params.num_q_heads, DIM);
#pragma unroll
  for (int e = 0; e < 2; e++) {
    int q = first_query + lane / 4 + 8 * e;
    if (q >= ours.num_queries) {
      continue;
    }
    size_t at = ours.result(q);
    if (ours.whole()) {
      float sink = params.has_sinks ? sinks[ours.head(q)] : 0.0f;
      float factor = state.state[e].normaliser(params.has_sinks, sink);
#pragma unroll
      for (int c = 0; c < DIM / 8; c++) {
        *reinterpret_cast<unsigned int*>(out + at * DIM + c * 8 + lane % 4 * 2) =
            pack(state.result[c][2 * e] * factor, state.result[c][2 * e + 1] * factor, T(0.0f));
      }
      continue;
    }
#pragma unroll
    for (int c = 0; c < DIM / 8; c++) {
      float* to = partials.values + at * DIM + c * 8 + lane % 4 * 2;
      asm volatile("st.global.v2.f32 [%0], {%1, %2};" ::"l"(to), "f"(state.result[c][2 * e]),
                   "f"(state.result[c][2 * e + 1])
                   : "memory");
    }
    if (lane % 4 == 0) {
      partials.maxima[at] = state.state[e].maximum;
      partials.sums[at] = state.state[e].sum;
    }
  }
}
