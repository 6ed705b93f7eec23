// Copyright © 2026 the mlx_paged authors. Apache-2.0.
//
// Attention of 64 queries by a warpgroup (warpgroup.h), sixteen per warp. The tensor cores multiply
// a tile's weights by its values while the warps turn the next tile's logits into weights.

#pragma once

#include "../tensor_shape.h"
#include "copy_ring.h"
#include "prefill_state.h"
#include "shared_memory.h"
#include "warpgroup.h"

namespace paged {

#ifdef PAGED_HAS_WGMMA

// Ring of tiles of 64 tokens in shared memory: keys in parts of 64 dims, then values likewise, in
// the layout that warpgroup products read (warpgroup.h).
template <int DIM, int WARPS>
struct TileRing {
  static constexpr int TOKENS = PREFILL_TENSOR_TOKENS;
  static constexpr int STAGES = prefill_wgmma_stages(DIM);
  static constexpr int PART = prefill_wgmma_part();  // 64 dims
  static constexpr int VALUES = PART * (DIM / 64);   // offset of the values
  static constexpr int BOX = PREFILL_BOX_TOKENS * 64 * 2;
  static constexpr int BOXES = TOKENS / PREFILL_BOX_TOKENS;  // per part

  unsigned int tiles;  // address in shared memory
  mlx_paged::cuda::CopyRing<STAGES> ring;

  __device__ __forceinline__ explicit TileRing(unsigned int tiles)
      : tiles(tiles), ring{tiles + prefill_wgmma_barriers(DIM)} {}

  __device__ __forceinline__ unsigned int tile(int turn) const {
    return tiles + turn % STAGES * (2 * VALUES);
  }

  // Initializes the barriers. One thread calls it before any other use.
  __device__ __forceinline__ void begin() const { ring.begin(WARPS, BOXES); }

  // Copies the tiles of `seen`; the first starts at token `first`, a multiple of 16. BOXES warps
  // call it; warp `box` copies tokens [16 box, 16 box + 16) of each tile, which lie in one block of
  // the pool.
  __device__ __forceinline__ void fill(
      const mlx_paged::cuda::PoolMaps& maps, BlockTable table, KeyRange seen, int first,
      int kv_head, int box, int lane) const {
    const CachePolicy policy = evict_normal();  // other items of the sequence read it too
    int slot = 0;                               // of the box in 32 tiles, one per lane
    for (int turn = 0; first < seen.end; turn++, first += TOKENS) {
      int token = first + box * PREFILL_BOX_TOKENS;
      if (turn % 32 == 0) {
        int ahead = token + lane * TOKENS;
        slot = ahead < seen.end ? int(table.slot(ahead)) : 0;
      }
      int row = __shfl_sync(0xffffffffu, slot, turn % 32);
      if (lane != 0) {
        continue;
      }
      int stage = turn % STAGES;
      bool exists = token < seen.end;
      ring.expect(stage, turn / STAGES, exists ? 2 * (DIM / 64) * BOX : 0);
#pragma unroll
      for (int part = 0; part < DIM / 64 && exists; part++) {
        unsigned int to = tile(turn) + part * PART + box * BOX;
        int column = kv_head * DIM + part * 64;
        ring.copy(stage, to, &maps.keys, column, row, policy);
        ring.copy(stage, to + VALUES, &maps.values, column, row, policy);
      }
    }
  }

  // Waits for a turn's tile, which starts at token `first`. Called by all consumer warps. Zeros
  // values of tokens outside `seen`, because 0 x NaN would reach the results; their logits are
  // masked.
  __device__ __forceinline__ void wait(int turn, int first, KeyRange seen) const {
    ring.wait_until_full(turn % STAGES, turn / STAGES);
    if (first < seen.begin || first + TOKENS > seen.end) {
      constexpr int PIECES = 64 * 2 / 16;  // of a token in a part
#pragma unroll 1
      for (int i = threadIdx.x; i < TOKENS * (DIM / 8); i += 32 * WARPS) {
        int token = first + i / PIECES % TOKENS;
        if (token < seen.begin || token >= seen.end) {
          mlx_paged::cuda::clear_shared(tile(turn) + VALUES + i * 16);
        }
      }
      mlx_paged::cuda::show_to_products();
      asm volatile("bar.sync 1, %0;" ::"n"(32 * WARPS) : "memory");
    }
  }

  __device__ __forceinline__ void release(int turn, int lane) const {
    ring.release(turn % STAGES, lane);
  }
};

// Starts logits = Q K^T.
template <typename T, int DIM>
__device__ __forceinline__ void start_logits(
    FragmentD (&logits)[PREFILL_TENSOR_TOKENS / 8], const PrefillState<T, DIM>& state,
    unsigned int keys) {
  using namespace mlx_paged::cuda;
#pragma unroll
  for (int c = 0; c < DIM / 16; c++) {
    unsigned int key = first_columns(keys + c / 4 * prefill_wgmma_part()) + c % 4 * kNextColumns;
    if (c == 0) {
      start_product<true, false>(logits, state.query[c], key, T(0.0f));
    } else {
      start_product<false, false>(logits, state.query[c], key, T(0.0f));
    }
  }
  commit_products();
}

// Starts results += P V.
template <typename T, int DIM>
__device__ __forceinline__ void start_results(
    PrefillState<T, DIM>& state, const FragmentA (&weights)[PREFILL_TENSOR_TOKENS / 16],
    unsigned int values) {
  using namespace mlx_paged::cuda;
  unsigned int value = first_rows(values, prefill_wgmma_part());
#pragma unroll
  for (int n = 0; n < PREFILL_TENSOR_TOKENS / 16; n++) {
    start_product<false, true>(state.result, weights[n], value + n * kNextRows, T(0.0f));
  }
  commit_products();
}

// Adds the tiles of `seen`; the first starts at token `first`. All consumer warps call it
// uniformly. With conditional products or waits, or a product in flight from one turn to the next,
// the compiler would serialize all products.
template <typename T, int DIM, int WARPS>
__device__ __forceinline__ void attend_together(
    PrefillState<T, DIM>& state, const TileRing<DIM, WARPS>& tiles, KeyRange seen, int first,
    const AttentionParams& params, int lane) {
  using namespace mlx_paged::cuda;
  constexpr int TOKENS = PREFILL_TENSOR_TOKENS;
  if (first >= seen.end) {
    return;
  }
  FragmentD logits[TOKENS / 8];
  FragmentA weights[TOKENS / 16];
  float factors[2];
  auto pack_all = [&]() {
#pragma unroll
    for (int n = 0; n < TOKENS / 16; n++) {
      PrefillState<T, DIM>::pack_weights(weights[n], logits, n);
    }
  };
  int num_turns = (seen.end - first + TOKENS - 1) / TOKENS;
  auto wait = [&](int turn) {
    if (turn < num_turns) {
      tiles.wait(turn, first + turn * TOKENS, seen);
    }
  };

  wait(0);
  begin_products();
  start_logits(logits, state, tiles.tile(0));
  wait(1);
  wait_for_products<0>(logits);
  state.softmax(logits, factors, first, params, lane);
  pack_all();
  for (int turn = 1; turn < num_turns; turn++) {
    begin_products();
    start_logits(logits, state, tiles.tile(turn));
    start_results(state, weights, tiles.tile(turn - 1) + TileRing<DIM, WARPS>::VALUES);
    wait_for_products<1>(logits);
    take_product(logits);
    state.softmax(logits, factors, first + turn * TOKENS, params, lane);
    // Comes before the next line, which the assembler would otherwise move above the softmax.
    wait(turn + 1);
    wait_for_products<0>(state.result);
    tiles.release(turn - 1, lane);
    state.scale_results(factors);
    pack_all();
  }
  begin_products();
  start_results(state, weights, tiles.tile(num_turns - 1) + TileRing<DIM, WARPS>::VALUES);
  wait_for_products<0>(state.result);
}

#endif

}  // namespace paged
