// Copyright © 2026 the mlx_paged authors. Apache-2.0.
//
// Decode attention for quantized pools on tensor cores. Divides its work like
// paged_decode_tensor.h.

#pragma once

#include "paged_decode_tensor.h"
#include "quantized_state.h"

// KEYS, VALUES: formats.
template <typename T, int DIM, int COLUMNS, int KEYS, int VALUES>
__global__ void __launch_bounds__(
    32 * paged::quantized_warps(DIM), paged::quantized_blocks(KEYS, DIM, COLUMNS))
    decode_quantized_entry(ATTENTION_PARAMETERS) {
  using namespace paged;
  constexpr int STEP = quantized_warps(DIM) * QUANTIZED_TOKENS;
  constexpr int QUERIES = COLUMNS * TENSOR_QUERIES;
  typedef CodeRing<KEYS, VALUES, DIM> Ring;
  typedef WarpResults<DIM, QUERIES, quantized_ring_bytes(KEYS, VALUES, DIM, QUERIES)> Results;
  extern __shared__ __align__(128) unsigned char shared[];
  begin_after_kernel_before();

  DecodeBlock block(work_items, block_tables, params);
  if (!block.is_served) {
    return;
  }
  int warp = threadIdx.x / 32;
  int lane = threadIdx.x % 32;
  Results meeting = {shared};
  int first = block.first_token<QUANTIZED_TOKENS>(positions, params);
  Ring ring(
      meeting.ring(warp), reinterpret_cast<const unsigned char*>(key_pool),
      reinterpret_cast<const unsigned char*>(value_pool), block.table,
      block.item.last_block << params.block_shift, [&] { return block.keys(positions, params); },
      params.num_kv_heads, block.kv_head, first, STEP, lane);
  KeyRange seen = ring.seen();
  QuantizedState<T, DIM, COLUMNS, KEYS, VALUES> state(
      [&](int q) { return block.query<DIM>(q, queries, params); },
      [&](int q) { return block.keys_of(q, seen, positions, params); }, lane);
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
  write_results<T, DIM>(meeting, block, per_head, out, workspace, params);
}
