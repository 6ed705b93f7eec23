// Copyright © 2026 the mlx_paged authors. Apache-2.0.
//
// Decode attention of int8 keys, and int8 or int4 values, on tensor cores. Work is divided as in
// paged_decode_tensor.h.

#pragma once

#include <climits>

#include "paged_decode_tensor.h"
#include "quantised_state.h"

namespace paged {

template <int DIM, int COLUMNS>
using QuantisedResults = WarpResults<
    DIM, COLUMNS * TENSOR_QUERIES, quantised_result_bytes(DIM, COLUMNS* TENSOR_QUERIES)>;

}  // namespace paged

template <typename T, int DIM, int COLUMNS, int VALUES>
__global__ void __launch_bounds__(32 * paged::tensor_warps(DIM), paged::quantised_blocks(COLUMNS))
    decode_quantised_entry(ATTENTION_PARAMETERS) {
  using namespace paged;
  constexpr int STEP = tensor_warps(DIM) * TENSOR_TOKENS;
  extern __shared__ __align__(128) unsigned char shared[];
  wait_for_kernel_before();
  let_next_kernel_begin();

  int kv_head = blockIdx.x % params.num_kv_heads;
  WorkItem item = work_items[blockIdx.x / params.num_kv_heads];
  int num_rows = item.row_end - item.row_begin;
  if (num_rows < params.min_rows || num_rows > params.max_rows) {
    return;
  }
  int warp = threadIdx.x / 32;
  int lane = threadIdx.x % 32;
  int heads = params.num_q_heads / params.num_kv_heads;  // of a group
  int num_queries = num_rows * heads;
  BlockTable table = {block_tables + size_t(item.sequence) * params.max_blocks, params.block_shift};
  KeyRange seen = keys_of_rows(item, positions, item.row_begin, item.row_end, params);
  auto block_of = [&](int token) -> int {
    return token < seen.end ? table.blocks[token >> table.shift] : 0;
  };
  int first = seen.begin / TENSOR_TOKENS * TENSOR_TOKENS + warp * TENSOR_TOKENS;
  int block = block_of(first);
  int next_block = block_of(first + STEP);
  CachePolicy policy = evict_first();
  QuantisedTile<DIM, VALUES> tile;
  auto load = [&](int block, int token) {
    tile.load(
        reinterpret_cast<const unsigned char*>(key_pool),
        reinterpret_cast<const unsigned char*>(value_pool), block, table.shift, params.num_kv_heads,
        kv_head, token, seen, policy, lane);
  };
  if (first < seen.end) {
    load(block, first);
  }
  auto query_of = [&](int q) -> const T* {
    size_t row = size_t(item.row_begin + q / heads) * params.num_q_heads;
    return q < num_queries ? queries + (row + kv_head * heads + q % heads) * DIM : nullptr;
  };
  auto keys_of = [&](int q) -> KeyRange {
    if (q >= num_queries) {
      return {0, 0};
    }
    KeyRange keys = keys_of_row(positions, item.row_begin + q / heads, params);
    return {max(keys.begin, seen.begin), min(keys.end, seen.end)};
  };
  QuantisedState<T, DIM, COLUMNS, VALUES> state(query_of, keys_of, lane);
  for (; first < seen.end; first += STEP) {
    QuantisedTile<DIM, VALUES> now = tile;
    if (first + STEP < seen.end) {
      int block = next_block;
      next_block = block_of(first + 2 * STEP);
      load(block, first + STEP);
    }
    state.attend(now, first, params, lane);
  }
  join_sums(state.state);

  QuantisedResults<DIM, COLUMNS> meeting = {shared};
#pragma unroll
  for (int n = 0; n < COLUMNS; n++) {
#pragma unroll
    for (int e = 0; e < 2; e++) {
      int q = n * TENSOR_QUERIES + 2 * (lane % 4) + e;
#pragma unroll
      for (int s = 0; s < DIM / 16; s++) {
        float* to = meeting.result(warp, q) + state.dim_of(s, lane);
        to[0] = state.result[n][s][e];
        to[1] = state.result[n][s][2 + e];
      }
      if (lane < 4) {
        meeting.maximum(warp, q) = state.state[n][e].maximum;
        meeting.sum(warp, q) = state.state[n][e].sum;
      }
    }
  }
  __syncthreads();
  write_results<T, DIM>(meeting, item, num_queries, heads, kv_head, sinks, out, workspace, params);
}
