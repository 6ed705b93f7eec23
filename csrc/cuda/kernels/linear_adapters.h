// Copyright © 2026 the mlx_paged authors. Apache-2.0.
//
// Adds LoRA adapters (metal/lora.h) to a product's sums before they are written, which saves
// another kernel's pass over the results: sums += (x @ a[adapter].T) @ b[adapter]. The grid's first
// blocks compute x @ a.T (adapter_blocks.h). A row's update depends only on that row.

#pragma once

#include "finished_blocks.h"
#include "linear_finish.h"
#include "shared_memory.h"
#include "tensor_core.h"

namespace mlx_paged::cuda {

template <typename T>
struct AdapterOperands {
  float* hidden;                  // x @ a.T: [targets, rows, adapter_parts(k), rank]
  const int* adapters;            // [rows]; no adapter if outside of [0, count)
  unsigned int* finished;         // the count of FinishedBlocks
  const T* a[kLinearMaxWeights];  // [count, rank, k] for each target
  const T* b[kLinearMaxWeights];  // [count, rank, n] for each weight
};

// Synchronizes the blocks that multiply by `a` with those that wait for them.
template <typename T>
__device__ __forceinline__ FinishedBlocks
finished_blocks(const LinearParams& params, const AdapterOperands<T>& operands) {
  const int num_others = gridDim.x - params.adapters.num_blocks;
  return {operands.finished, params.adapters.num_units, num_others};
}

// threadIdx.x, hidden from the compiler, which would otherwise keep values derived from it in
// registers during the product, where none are to spare.
__device__ __forceinline__ int thread_of_block() {
  int this_thread = threadIdx.x;
  asm volatile("" : "+r"(this_thread));
  return this_thread;
}

// Adds adapters to a tile of ROWS weight rows, which the blocks of a cluster share.
template <typename T, int ROWS, int TILES, int WARPS>
struct AddedAdapters {
  static constexpr int kRanks = 16;           // at once: the columns of an mma
  static constexpr int kSlots = 8;            // adapters at once
  static constexpr int kBlocks = ROWS / 16;   // of weight rows: the rows of an mma
  static constexpr int kRowsOfX = 8 * TILES;  // with padding
  static constexpr int kPairs = kRanks / 2;   // of hidden values
  static constexpr int kHiddenBytes = 2 * kRowsOfX * kPairs * 8;
  static constexpr int kSlotBytes = kRanks * ROWS * 2;
  static constexpr int kBytes = kHiddenBytes + kSlots * kSlotBytes;  // of shared memory

  const LinearParams& params;
  const AdapterOperands<T>& operands;
  int which;  // index of the weight
  int tile;
  int rank_of_block;  // in the cluster
  int num_ranks;
  unsigned int ids = 0;  // address of the rows' adapters in shared memory; 0: not there yet
  int this_thread = thread_of_block();

  // Copies the rows' adapters to shared memory, kAdapterIdBytes. Called by a warp.
  __device__ __forceinline__ void keep_adapters(unsigned int to) const {
#pragma unroll
    for (int i = 0; i < kLinearMaxRows; i += 32) {
      store_shared_word(to + (i + this_thread % 32) * 4, adapter_of(i + this_thread % 32));
    }
  }

  // Prefetches the tile's columns of b. A step may still compute `adapters`; a wrong prefetch does
  // no harm. Called by whole warps, the first `num_warps` of the block.
  __device__ __forceinline__ void fetch(int warp, int num_warps) const {
    constexpr int kRuns = 4;  // of columns, each within a line
    int number = 0;
    for_some([&](int first, unsigned int some) {
      each(first, some, [&](int adapter, int) {
        if (number++ % num_warps != warp) {
          return;
        }
        for (int i = this_thread % 32; i < params.adapters.rank * kRuns; i += 32) {
          const Columns at = columns_of(i % kRuns * (ROWS / kRuns));
          if (at.exist) {
            paged::fetch_to_l2(at.of_rank(adapter, i / kRuns, params));
          }
        }
      });
    });
  }

  // Starts to copy what add() needs first to `memory`, kBytes of shared memory, after the grid's
  // first blocks. Called by all threads.
  __device__ __forceinline__ void begin(unsigned int memory) const {
    bool begins = true;
    for_some([&](int first, unsigned int some) {
      if (begins) {
        copy_matrices(memory + kHiddenBytes, first, some, 0);
        stage_hidden(memory, 0);
      }
      begins = false;
    });
  }

  // Adds to `results`, [row of x][row of the tile] with `pitch` floats between rows, which warps
  // may have written since the last barrier. Called by all threads, after begin().
  __device__ __forceinline__ void add(float* results, int pitch, unsigned int memory) const {
    const unsigned int slots = memory + kHiddenBytes;
    bool begins = true;
    for (int rank = 0; rank < params.adapters.rank; rank += kRanks) {
      for_some([&](int first, unsigned int some) {
        if (!begins) {
          __syncthreads();  // The shared memory has been read.
          copy_matrices(slots, first, some, rank);
          stage_hidden(memory, rank);
        }
        begins = false;
        paged::wait_for_copies<0>();
        __syncthreads();
        multiply(results, pitch, memory, first, some);
      });
    }
  }

 private:
  // Calls body(first, some) for the adapters of the rows, at most kSlots at a time: bit i of `some`
  // stands for adapter `first` + i.
  template <typename Body>
  __device__ __forceinline__ void for_some(Body body) const {
    if (!params.is_gated && target_of(which) < 0) {
      return;
    }
#pragma unroll 1
    for (int first = 0; first < params.adapters.count; first += 32) {
      unsigned int found = 0;
      for (int at = this_thread % 32; at < params.num_rows; at += 32) {
        const unsigned int bit = adapter_of(at) - first;
        found |= bit < 32 ? 1u << bit : 0;
      }
      unsigned int left = __reduce_or_sync(~0u, found);
#pragma unroll 1
      while (left != 0) {
        unsigned int some = 0;
        for (int i = 0; i < kSlots && left != 0; i++) {
          some |= left & (~left + 1);
          left &= left - 1;
        }
        body(first, some);
      }
    }
  }

  // Calls body(adapter, slot) for each of `some`.
  template <typename Body>
  __device__ __forceinline__ static void each(int first, unsigned int some, Body body) {
#pragma unroll 1
    for (int slot = 0; some != 0; some &= some - 1, slot++) {
      body(first + __ffs(int(some)) - 1, slot);
    }
  }

  // The adapter of a row of x; -1: none.
  __device__ __forceinline__ int adapter_of(int at) const {
    if (ids != 0) {
      return int(load_shared_word(ids + at * 4));
    }
    const int adapter = at < params.num_rows ? operands.adapters[at] : -1;
    return adapter >= 0 && adapter < params.adapters.count ? adapter : -1;
  }

  // Selects by comparison, as part_of does.
  template <typename V>
  __device__ __forceinline__ static V of_weight(const V (&all)[kLinearMaxWeights], int weight) {
    return weight == 0 ? all[0] : weight == 1 ? all[1] : all[2];
  }

  __device__ __forceinline__ int target_of(int weight) const {
    return of_weight(params.adapters.target, weight);
  }

  // Adjacent columns of b.
  struct Columns {
    const T* b;
    int n;
    bool exist;

    __device__ __forceinline__ const T* of_rank(
        int adapter, int rank, const LinearParams& params) const {
      return b + (size_t(adapter) * params.adapters.rank + rank) * n;
    }
  };

  // The columns for rows of the tile from `row` on.
  __device__ __forceinline__ Columns columns_of(int row) const {
    const TileRow at = row_of_tile<ROWS, ROWS>(params, tile, row);
    const int weight = at.is_up ? 1 : which;
    const int n = of_weight(params.n, weight);
    const bool exist = target_of(weight) >= 0 && at.of_weight < n;
    return {of_weight(operands.b, weight) + (exist ? at.of_weight : 0), n, exist};
  }

  // True if this block of the cluster adds to these sixteen rows of the tile.
  __device__ __forceinline__ bool is_ours(int block) const {
    return block % num_ranks == rank_of_block;
  }

  // Starts copies of rows of b from `first_rank` on: [slot][rank][row of the tile].
  __device__ __forceinline__ void copy_matrices(
      unsigned int slots, int first, unsigned int some, int first_rank) const {
    constexpr int kChunks = ROWS / 8;  // of a row of b; each thread copies the same one
    constexpr int kStride = 32 * WARPS / kChunks;
    static_assert(32 * WARPS % kChunks == 0);
    const int chunk = this_thread % kChunks;
    if (is_ours(chunk / 2)) {
      const Columns at = columns_of(8 * chunk);
      each(first, some, [&](int adapter, int slot) {
        for (int i = this_thread / kChunks; i < kRanks; i += kStride) {
          const bool exists = at.exist && first_rank + i < params.adapters.rank;
          const T* from = at.of_rank(adapter, exists ? first_rank + i : 0, params);
          const unsigned int to = slots + slot * kSlotBytes;
          paged::copy_async(to + paged::tile_offset<kChunks>(i, chunk), from, exists);
        }
      });
    }
    paged::commit_copies();
  }

  // Writes hidden values from `first_rank` on, [gate or up][row of x][pair], as two numbers of 16
  // bits: together they are nearly as exact as fp32. A thread's loads of several parts are under
  // way at once.
  __device__ __forceinline__ void stage_hidden(unsigned int memory, int first_rank) const {
    constexpr int kFours = kRanks / 4;  // of hidden values
    constexpr int kItems = 2 * kRowsOfX * kFours;
    constexpr int kItemsOfThread = (kItems + 32 * WARPS - 1) / (32 * WARPS);
    float4 sums[kItemsOfThread];
    const float* from[kItemsOfThread];
#pragma unroll
    for (int j = 0; j < kItemsOfThread; j++) {
      const int i = this_thread + 32 * WARPS * j;
      const int at = i / kFours % kRowsOfX;
      const int rank = first_rank + i % kFours * 4;
      const bool is_second = i >= kRowsOfX * kFours;
      const int target = is_second && !params.is_gated ? -1 : target_of(is_second ? 1 : which);
      const bool exists = target >= 0 && at < params.num_rows && rank < params.adapters.rank;
      const size_t first_part = size_t(target * params.num_rows + at) * adapter_parts(params.k);
      from[j] = exists ? operands.hidden + first_part * params.adapters.rank + rank : nullptr;
    }
    add_parts(sums, from);
#pragma unroll
    for (int j = 0; j < kItemsOfThread; j++) {
      const int i = this_thread + 32 * WARPS * j;
      if (i < kItems) {
        stage_pair(memory + 16 * i, sums[j].x, sums[j].y);
        stage_pair(memory + 16 * i + 8, sums[j].z, sums[j].w);
      }
    }
  }

  // Adds the parts of hidden values pairwise, as a tree.
  template <int COUNT>
  __device__ __forceinline__ void add_parts(
      float4 (&sums)[COUNT], const float* const (&from)[COUNT]) const {
    static_assert(kAdapterParts == 4 && kAdapterMaxParts == 8);
    add_four_parts(sums, from, 0);
    if (adapter_parts(params.k) == kAdapterMaxParts) {
      float4 more[COUNT];
      add_four_parts(more, from, kAdapterParts);
#pragma unroll
      for (int j = 0; j < COUNT; j++) {
        sums[j] = sum_of(sums[j], more[j]);
      }
    }
  }

  template <int COUNT>
  __device__ __forceinline__ void add_four_parts(
      float4 (&sums)[COUNT], const float* const (&from)[COUNT], int first) const {
    float4 parts[4][COUNT];
#pragma unroll
    for (int p = 0; p < 4; p++) {
#pragma unroll
      for (int j = 0; j < COUNT; j++) {
        const float* of_part = from[j] + (first + p) * params.adapters.rank;
        parts[p][j] = from[j] ? *reinterpret_cast<const float4*>(of_part)
                              : make_float4(0.0f, 0.0f, 0.0f, 0.0f);
      }
    }
#pragma unroll
    for (int j = 0; j < COUNT; j++) {
      sums[j] = sum_of(sum_of(parts[0][j], parts[1][j]), sum_of(parts[2][j], parts[3][j]));
    }
  }

  __device__ __forceinline__ static void stage_pair(unsigned int to, float a, float b) {
    const float rest_of_a = a - as_float(rounded<T>(a));
    const float rest_of_b = b - as_float(rounded<T>(b));
    store_shared_word(to, paged::pack(a, b, T(0.0f)));
    store_shared_word(to + 4, paged::pack(rest_of_a, rest_of_b, T(0.0f)));
  }

  // Multiplies all rows of x by sixteen of the tile, once for each of their adapters; rows with
  // another one ignore the sums.
  __device__ __forceinline__ void multiply(
      float* results, int pitch, unsigned int memory, int first, unsigned int some) const {
    const int lane = this_thread % 32;
    const unsigned int slots = memory + kHiddenBytes;
    for (int block = this_thread / 32; block < kBlocks; block += WARPS) {
      if (!is_ours(block)) {
        continue;
      }
      const bool is_up = row_of_tile<ROWS, ROWS>(params, tile, 16 * block).is_up;
      const int of_lane = lane / 4 * kPairs + lane % 4;
      unsigned int pairs = memory + ((is_up ? kRowsOfX * kPairs : 0) + of_lane) * 8;
      int chosen[TILES][2];
      paged::FragmentB hidden[TILES];
      paged::FragmentB rest[TILES];
#pragma unroll
      for (int t = 0; t < TILES; t++, pairs += 8 * kPairs * 8) {
        chosen[t][0] = adapter_of(8 * t + lane % 4 * 2);
        chosen[t][1] = adapter_of(8 * t + lane % 4 * 2 + 1);
        load_shared_pair(pairs, hidden[t][0], rest[t][0]);
        load_shared_pair(pairs + kPairs / 2 * 8, hidden[t][1], rest[t][1]);
      }
      const unsigned int b_of_lane =
          slots + paged::tile_offset<ROWS / 8>(lane / 16 * 8 + lane % 8, 2 * block + lane / 8 % 2);
      float* of_block = results + lane % 4 * 2 * pitch + 16 * block + lane / 4;
      each(first, some, [&](int adapter, int slot) {
        paged::FragmentA b;
        paged::load_matrices_transposed(b, b_of_lane + slot * kSlotBytes);
#pragma unroll
        for (int t = 0; t < TILES; t++) {
          if (!__any_sync(~0u, chosen[t][0] == adapter || chosen[t][1] == adapter)) {
            continue;
          }
          float sums[4] = {};
          paged::multiply_accumulate(sums, b, rest[t], T(0.0f));
          paged::multiply_accumulate(sums, b, hidden[t], T(0.0f));
#pragma unroll
          for (int i = 0; i < 4; i++) {
            if (chosen[t][i % 2] == adapter) {
              of_block[(8 * t + i % 2) * pitch + i / 2 * 8] += sums[i];
            }
          }
        }
      });
    }
  }
};

}  // namespace mlx_paged::cuda
