// Copyright © 2026 the mlx_paged authors. Apache-2.0.
//
// The first half of LoRA: hidden = x @ a[adapter].T, divided into units that the first blocks of a
// product's grid compute; all blocks then add the second half (linear_adapters.h). A step is short,
// and each launch starts with a cold instruction cache, so this is short code: every part of it
// exists once, and what it reads is under way before it is needed.

#pragma once

#include "linear_adapters.h"
#include "shared_memory.h"

namespace mlx_paged::cuda {

// Up to eight rows of x with one adapter. Each lane holds the row that it reads.
struct AdapterTile {
  static constexpr int kNone = -1;
  int adapter;  // kNone: there is no such tile
  int row;      // of x, for lane / 4; the last one instead of rows past the end
  int num_rows;
};

// The adapters of rows `lane` and `lane` + 32.
struct RowAdapters {
  int of_row[2];

  __device__ __forceinline__
  RowAdapters(const LinearParams& params, const int* adapters, int lane) {
#pragma unroll
    for (int i = 0; i < 2; i++) {
      of_row[i] = adapter_of_row(params, adapters, lane + 32 * i);
    }
  }

  __device__ __forceinline__ bool are(const RowAdapters& others) const {
    return __all_sync(~0u, of_row[0] == others.of_row[0] && of_row[1] == others.of_row[1]);
  }
};

// Finds tile `tile` among all rows: those of 32 rows that have the same adapter follow each other,
// in the order of their first rows. Called by whole warps.
__device__ __forceinline__ AdapterTile
find_adapter_tile(const RowAdapters& adapters, int num_rows, int tile, int lane) {
  static_assert(kLinearMaxRows == 64);
#pragma unroll 1
  for (int first = 0; first < num_rows; first += 32) {
    const int adapter = first == 0 ? adapters.of_row[0] : adapters.of_row[1];
    const unsigned int same = __match_any_sync(~0u, adapter);
    const int place = __popc(same & ((1u << lane) - 1));  // among rows with this adapter
    const int tiles =
        adapter >= 0 && place == 0 ? (__popc(same) + kAdapterRows - 1) / kAdapterRows : 0;
    int up_to_here = tiles;
#pragma unroll
    for (int apart = 1; apart < 32; apart *= 2) {
      const int before = __shfl_up_sync(~0u, up_to_here, apart);
      up_to_here += lane >= apart ? before : 0;
    }
    const int total = __shfl_sync(~0u, up_to_here, 31);
    if (tile >= total) {
      tile -= total;
      continue;
    }
    const int first_tile = __shfl_sync(~0u, up_to_here - tiles, __ffs(int(same)) - 1);
    const bool is_in_tile = adapter >= 0 && first_tile + place / kAdapterRows == tile;
    unsigned int rows = __ballot_sync(~0u, is_in_tile);
    AdapterTile found;
    found.num_rows = __popc(rows);
    found.adapter = __shfl_sync(~0u, adapter, __ffs(int(rows)) - 1);
#pragma unroll
    for (int i = 1; i < kAdapterRows; i++) {
      const unsigned int others = rows & (rows - 1);
      rows = i <= lane / 4 && others != 0 ? others : rows;
    }
    found.row = first + __ffs(int(rows)) - 1;
    return found;
  }
  return {AdapterTile::kNone, 0, 0};
}

// One unit: a tile of rows by sixteen rows of `a` for one target, over one part of the columns.
// WARPS warps multiply, taking turns at steps of 32 columns; STEPS steps of a warp are under way at
// once.
template <typename T, int WARPS, int STEPS>
struct AdapterUnits {
  static_assert(kAdapterRanks == 16 && kAdapterRows == 8);  // the rows and columns of an mma

  const LinearParams& params;
  const AdapterOperands<T>& operands;
  int this_thread = thread_of_block();

  // Computes this block's share of the units and reports its end. `chunk_of(row, i)` returns eight
  // columns of a row of x. `begin()` is called after the previous kernel has ended, if there is a
  // unit. Called by the first WARPS warps. `sums`: adapter_sum_bytes(WARPS) of shared memory.
  template <typename ChunkOf, typename Begin>
  __device__ __forceinline__ void run(
      const T* x, float4* sums, ChunkOf chunk_of, Begin begin) const {
    const int warp = this_thread / 32;
    bool has_waited = false;
#pragma unroll 1
    for (int i = blockIdx.x; i < params.adapters.num_units; i += params.adapters.num_workers) {
      const Unit unit = unit_of(i);
      float sum[4] = {};
      const AdapterTile tile = multiply(sum, unit, x, warp, has_waited, chunk_of, begin);
      if (i != int(blockIdx.x)) {
        barrier_of_warps<WARPS>();  // The sums have been read.
      }
      sums[this_thread] = make_float4(sum[0], sum[1], sum[2], sum[3]);
      barrier_of_warps<WARPS>();
      if (warp == 0) {
        store(unit, tile, sums);
      }
      has_waited = true;
    }
    paged::wait_for_kernel_before();
    if (warp == 0) {
      __syncwarp();
      if (this_thread == 0) {
        finished_blocks(params, operands).add();
      }
      __syncwarp();  // Instructions of whole warps may follow.
    }
  }

 private:
  struct Unit {
    int tile;
    int part;
    int target;
    int first_rank;
  };

  // Tiles come last, since the last ones may not exist.
  __device__ __forceinline__ Unit unit_of(int i) const {
    const int parts = adapter_parts(params.k);
    const int rank_tiles = (params.adapters.rank + kAdapterRanks - 1) / kAdapterRanks;
    Unit unit;
    unit.part = i % parts;
    i /= parts;
    unit.first_rank = i % rank_tiles * kAdapterRanks;
    i /= rank_tiles;
    unit.target = i % params.adapters.num_targets;
    unit.tile = i / params.adapters.num_targets;
    return unit;
  }

  // A lane's operands of some steps: two rows of `a`, and one of x.
  struct Operands {
    Eight lows[STEPS];
    Eight highs[STEPS];
    Eight xs[STEPS];
  };

  // Adds a warp's products to `sum`: of ranks r and r + 8 and rows 2c and 2c + 1 of the tile for
  // lane 4 r + c. Returns the tile.
  template <typename ChunkOf, typename Begin>
  __device__ __forceinline__ AdapterTile multiply(
      float (&sum)[4], const Unit& unit, const T* x, int warp, bool has_waited, ChunkOf chunk_of,
      Begin begin) const {
    const int num_steps = params.k / kLinearStep;
    const int of_part = (num_steps + adapter_parts(params.k) - 1) / adapter_parts(params.k);
    const int end = min((unit.part + 1) * of_part, num_steps);
    Operands loaded;
    AdapterTile tile{};
    int step = unit.part * of_part + warp;
    // An earlier kernel may still compute `adapters`, so before the wait they are only a guess.
    RowAdapters adapters(params, operands.adapters, this_thread % 32);
    bool is_sure = has_waited;
    bool is_found = false;
#pragma unroll 1
    while (true) {
      if (!is_found) {
        tile = find_adapter_tile(adapters, params.num_rows, unit.tile, this_thread % 32);
        is_found = true;
      }
      const bool exists = tile.adapter != AdapterTile::kNone;
      if (exists) {
        load_a(loaded, unit, tile, step, end);
      }
      if (!has_waited) {
        paged::wait_for_kernel_before();
        begin();
        has_waited = true;
      }
      if (exists) {
        load_x(loaded, tile, x, step, end, chunk_of);
      }
      if (!is_sure) {
        const RowAdapters found(params, operands.adapters, this_thread % 32);
        is_sure = true;
        is_found = found.are(adapters);
        adapters = found;
        if (!is_found) {
          continue;
        }
      }
      if (exists) {
#pragma unroll
        for (int i = 0; i < STEPS; i++) {
          if (step + WARPS * i < end) {
            multiply_step<T>(sum, loaded.lows[i], loaded.highs[i], loaded.xs[i]);
          }
        }
      }
      step += WARPS * STEPS;
      if (step >= end || !exists) {
        return tile;
      }
    }
  }

  // Loads a lane's operands from step `step` on.
  __device__ __forceinline__ void load_a(
      Operands& to, const Unit& unit, const AdapterTile& tile, int step, int end) const {
    const T* a = unit.target == 0   ? operands.a[0]
                 : unit.target == 1 ? operands.a[1]
                                    : operands.a[2];
    const int lane = this_thread % 32;
    const int num_ranks = params.adapters.rank;
    // The last rank instead of those past the end.
    auto row_of = [&](int row) {
      const int rank = tile.adapter * num_ranks + min(unit.first_rank + row, num_ranks - 1);
      return reinterpret_cast<const Eight*>(a + size_t(rank) * params.k) + 4 * step + lane % 4;
    };
    const Eight* low = row_of(lane / 4);
    const Eight* high = row_of(lane / 4 + 8);
#pragma unroll
    for (int i = 0; i < STEPS; i++) {
      if (step + WARPS * i < end) {
        to.lows[i] = low[4 * WARPS * i];
        to.highs[i] = high[4 * WARPS * i];
      }
    }
  }

  template <typename ChunkOf>
  __device__ __forceinline__ void load_x(
      Operands& to, const AdapterTile& tile, const T* x, int step, int end,
      ChunkOf chunk_of) const {
    const T* row = x + size_t(tile.row) * params.x_stride;
#pragma unroll
    for (int i = 0; i < STEPS; i++) {
      if (step + WARPS * i < end) {
        to.xs[i] = chunk_of(row, 4 * (step + WARPS * i) + this_thread % 4);
      }
    }
  }

  // Adds the warps' sums in order and writes them. Called by the first warp.
  __device__ __forceinline__ void store(
      const Unit& unit, const AdapterTile& tile, const float4* sums) const {
    float4 sum = sums[this_thread];
#pragma unroll
    for (int w = 1; w < WARPS; w++) {
      sum = sum_of(sum, sums[32 * w + this_thread]);
    }
    const float values[4] = {sum.x, sum.y, sum.z, sum.w};
    const int lane = this_thread % 32;
#pragma unroll
    for (int i = 0; i < 4; i++) {
      const int of_tile = lane % 4 * 2 + i % 2;
      const int row = __shfl_sync(~0u, tile.row, 4 * of_tile);
      const int rank = unit.first_rank + lane / 4 + i / 2 * 8;
      if (of_tile < tile.num_rows && rank < params.adapters.rank) {
        operands.hidden[hidden_index(params, unit.target, row, unit.part) + rank] = values[i];
      }
    }
  }
};

}  // namespace mlx_paged::cuda
