// Copyright © 2026 the mlx_paged authors. Apache-2.0.
//
// Decode attention for quantized pools on tensor cores. Divides its work like
// paged_decode_tensor.h.

#pragma once

#include "paged_decode_tensor.h"
#include "quantised_state.h"

// KEYS, VALUES: formats.
template <typename T, int DIM, int COLUMNS, int KEYS, int VALUES>
__global__ void __launch_bounds__(
    32 * paged::quantised_warps(DIM), paged::quantised_blocks(KEYS, DIM, COLUMNS))
    decode_quantised_entry(ATTENTION_PARAMETERS) {
  using namespace paged;
  constexpr int STEP = quantised_warps(DIM) * QUANTISED_TOKENS;
  constexpr int QUERIES = COLUMNS * TENSOR_QUERIES;
  typedef CodeRing<KEYS, VALUES, DIM> Ring;
  typedef WarpResults<DIM, QUERIES, quantised_ring_bytes(KEYS, VALUES, DIM, QUERIES)> Results;
  extern __shared__ __align__(128) unsigned char shared[];
  begin_after_kernel_before();

  int kv_head = blockIdx.x % params.num_kv_heads;
  WorkItem item = work_items[blockIdx.x / params.num_kv_heads];
  int num_rows = item.row_end - item.row_begin;
  if (num_rows < params.min_rows || num_rows > params.max_rows) {
    return;
  }
  int warp = threadIdx.x / 32;
  int lane = threadIdx.x % 32;
  int heads = params.num_q_heads / params.num_kv_heads;  // per group
  int num_queries = num_rows * heads;
  BlockTable table = {block_tables + size_t(item.sequence) * params.max_blocks, params.block_shift};
  auto seen_of = [&]() -> KeyRange {
    return keys_of_rows(item, positions, item.row_begin, item.row_end, params);
  };

  Results meeting = {shared};
  // Without a window, the first token is known before the rows' positions are loaded.
  int begin = params.options.window == WHOLE_CONTEXT ? item.first_block << params.block_shift : seen_of().begin;
  int first = begin / QUANTISED_TOKENS * QUANTISED_TOKENS + warp * QUANTISED_TOKENS;
  Ring ring(
      meeting.ring(warp), reinterpret_cast<const unsigned char*>(key_pool),
      reinterpret_cast<const unsigned char*>(value_pool), table,
      item.last_block << params.block_shift, seen_of, params.num_kv_heads, kv_head, first, STEP,
      lane);
  KeyRange seen = ring.seen();
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
  QuantisedState<T, DIM, COLUMNS, KEYS, VALUES> state(query_of, keys_of, lane);
  for (; first < seen.end; first += STEP) {
    state.attend(ring.advance(lane), first, seen, params, lane);
  }
  join_sums(state.state);
  wait_for_copies<0>();
  __syncwarp();  // The last tile has been read.

#pragma unroll
  for (int n = 0; n < COLUMNS; n++) {
#pragma unroll
    for (int e = 0; e < 2; e++) {
      int q = n * TENSOR_QUERIES + 2 * (lane % 4) + e;
#pragma unroll
      for (int s = 0; s < DIM / 16; s++) {
        float2 both = {state.result[n][s][e], state.result[n][s][2 + e]};
        *reinterpret_cast<float2*>(meeting.result(warp, q) + state.dim_of(s, lane)) = both;
      }
      if (lane < 4) {
        meeting.maximum(warp, q) = state.state[n][e].maximum;
        meeting.sum(warp, q) = state.state[n][e].sum;
      }
    }
  }
  __syncthreads();
  write_results<T, DIM>(meeting, item, num_queries, heads, kv_head, per_head, out, workspace, params);
}
