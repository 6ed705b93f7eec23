// Copyright © 2026 the mlx_paged authors. Apache-2.0.
//
// A thread block's share of a prefill chunk: the keys that its queries see, and the output of
// results.

#pragma once

#include "attention_output.h"
#include "prefill_state.h"
#include "query_tile.h"

namespace paged {

// keys_of_rows for the rows of a tile, divided among the lanes.
__device__ __forceinline__ KeyRange
keys_of_tile(const QueryTile& ours, const int* positions, const AttentionParams& params, int lane) {
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

// Writes the rows of a warp's queries, or their partials. `first_query`: the warp's first query
// within the tile.
template <typename T, int DIM>
__device__ __forceinline__ void write_prefill(
    const PrefillState<T, DIM>& state, const QueryTile& ours, int first_query,
    const float* per_head, T* out, float* workspace, const AttentionParams& params, int lane) {
  Partials partials = partials_at(workspace, params.num_partials, params.num_q_heads, DIM);
#pragma unroll
  for (int e = 0; e < 2; e++) {
    int q = first_query + lane / 4 + 8 * e;
    if (q >= ours.num_queries) {
      continue;
    }
    size_t at = ours.result(q);
    if (ours.whole()) {
      float factor = state.state[e].normalizer(per_head, ours.head(q), params.options);
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

}  // namespace paged
