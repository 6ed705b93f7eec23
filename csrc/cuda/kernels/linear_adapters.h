// Copyright © 2026 the mlx_paged authors. Apache-2.0.
//
// Adds LoRA adapters (metal/lora.h) to a product's sums before they are written, which saves
// another kernel's pass over the results: sums += (x @ a[adapter].T) @ b[adapter]. The grid's first
// blocks compute x @ a.T (adapter_units.h). A row's update depends only on that row.

#pragma once

#include "finished_blocks.h"
#include "linear_finish.h"
#include "shared_memory.h"

namespace mlx_paged::cuda {

template <typename T>
struct AdapterOperands {
  float* hidden;                  // x @ a.T: [targets, rows, adapter_parts(k), rank]
  const int* adapters;            // [rows]; no adapter if outside of [0, count)
  unsigned int* finished;         // the count of FinishedBlocks
  const T* a[kLinearMaxWeights];  // [count, rank, k] for each target
  const T* b[kLinearMaxWeights];  // [count, rank, n] for each weight
};

// Index of a part of a row's hidden values.
__device__ __forceinline__ size_t
hidden_index(const LinearParams& params, int target, int row, int part) {
  const size_t at = size_t(target * params.num_rows + row) * adapter_parts(params.k) + part;
  return at * params.adapters.rank;
}

// The adapter of a row of x; -1: none, or no such row. Reads past the first-level cache: before the
// wait for earlier kernels, it might keep what they are about to overwrite.
__device__ __forceinline__ int adapter_of_row(
    const LinearParams& params, const int* adapters, int row) {
  const int adapter = row < params.num_rows ? __ldcg(adapters + row) : -1;
  return adapter < params.adapters.count ? max(adapter, -1) : -1;
}

// Synchronizes the blocks that multiply by `a` with those that wait for them.
template <typename T>
__device__ __forceinline__ FinishedBlocks
finished_blocks(const LinearParams& params, const AdapterOperands<T>& operands) {
  const int num_others = gridDim.x - params.adapters.num_blocks;
  return {operands.finished, params.adapters.num_workers, num_others};
}

// threadIdx.x, hidden from the compiler, which would otherwise keep values derived from it in
// registers during the product, where none are to spare.
__device__ __forceinline__ int thread_of_block() {
  int this_thread = threadIdx.x;
  asm volatile("" : "+r"(this_thread));
  return this_thread;
}

// Adds adapters to a tile of ROWS weight rows, which the blocks of a cluster share, for up to
// ROWS_OF_X rows of x, RANKS ranks at once. This is an update of finish_rows.
template <typename T, int ROWS, int ROWS_OF_X, int THREADS, int RANKS>
struct AddedAdapters {
  static constexpr int kBytes = 2 * ROWS_OF_X * kAdapterMaxRank * 4;  // of shared memory
  using Four = unsigned long long;                                    // four elements of b

  const LinearParams& params;
  const AdapterOperands<T>& operands;
  int which;  // index of the weight
  int tile;
  unsigned int memory;  // address of kBytes, for hidden values, [gate or up][row][rank]
  bool has_begun = false;
  int adapter = -1;  // of the row that begin() was called for
  Four of_first[RANKS];
  Four of_mates[RANKS];

  // Prefetches the tile's columns of b for the adapters of all rows, each by one warp of the
  // cluster. A step may still compute `adapters`; a wrong prefetch does no harm. Called by all
  // threads of the block of rank `rank_of_block`; WARPS warps from number FIRST on fetch.
  template <int FIRST, int WARPS>
  __device__ __forceinline__ void fetch(int rank_of_block, int num_ranks) const {
    const int warp = thread_of_block() / 32 - FIRST;
    if (params.adapters.count == 0 || warp < 0 || warp >= WARPS) {
      return;
    }
    constexpr int kRuns = 2;  // of columns: gate and up, or the halves of a head
    const int lane = thread_of_block() % 32;
    const TileRow run = row_of_tile<ROWS, ROWS>(params, tile, lane % kRuns * (ROWS / kRuns));
    const int weight = run.is_up ? 1 : which;
    const int n = of_weight(params.n, weight);
    const T* b = of_weight(operands.b, weight) + run.of_weight;
    const bool exists = target_of(weight) >= 0 && run.of_weight < n;
    int number = 0;
#pragma unroll 1
    for (int first = 0; first < params.num_rows; first += 32) {
      const int adapter = adapter_of_row(params, operands.adapters, first + lane);
      const unsigned int same = __match_any_sync(~0u, adapter);
      unsigned int left = __ballot_sync(~0u, adapter >= 0 && lane == __ffs(int(same)) - 1);
#pragma unroll 1
      for (; left != 0; left &= left - 1, number++) {
        const int id = __shfl_sync(~0u, adapter, __ffs(int(left)) - 1);
        const bool is_ours =
            (number & (num_ranks * WARPS - 1)) == rank_of_block * WARPS + warp && exists;
#pragma unroll 1
        for (int rank = lane / kRuns; is_ours && rank < params.adapters.rank; rank += 32 / kRuns) {
          paged::fetch_to_l2(b + (size_t(id) * params.adapters.rank + rank) * n);
        }
      }
    }
  }

  __device__ __forceinline__ bool begins() const { return params.adapters.count > 0 && !has_begun; }

  // Starts to load b. The first call waits for the grid's first blocks meanwhile, and for the
  // cluster. Called by all threads.
  __device__ __forceinline__ void begin(
      int row, bool exists, const FourSums& first, const FourSums& mates, bool has_mates) {
    if (params.adapters.count == 0) {
      return;
    }
    adapter = exists ? adapter_of_row(params, operands.adapters, row) : -1;
    load(of_first, first, 0, true);
    load(of_mates, mates, 0, has_mates);
    if (!has_begun) {
      if (threadIdx.x == THREADS - 32) {
        finished_blocks(params, operands).wait();
      }
      __syncthreads();
      stage();
      cluster_barrier();
      has_begun = true;
    }
  }

  __device__ __forceinline__ void add(int row, FourSums& first, FourSums& mates, bool has_mates) {
    add(first, of_first, row, true);
    add(mates, of_mates, row, has_mates);
  }

 private:
  // Copies the sums of hidden values to shared memory. Called by all threads.
  __device__ __forceinline__ void stage() const {
    const int fours = params.adapters.rank / 4;
    const int num_targets = params.is_gated ? 2 : 1;
#pragma unroll 1
    for (int i = threadIdx.x; i < num_targets * params.num_rows * fours; i += THREADS) {
      const int of_row = i / fours;
      const int four = i - of_row * fours;
      const bool is_second = of_row >= params.num_rows;
      const int row = is_second ? of_row - params.num_rows : of_row;
      const int target = target_of(is_second ? 1 : which);
      if (target < 0) {
        continue;
      }
      const float4* from = reinterpret_cast<const float4*>(
          operands.hidden + hidden_index(params, target, row, 0) + 4 * four);
      float4 sum = sum_of(sum_of(from[0], from[fours]), sum_of(from[2 * fours], from[3 * fours]));
      if (adapter_parts(params.k) == kAdapterMaxParts) {
        from += 4 * fours;
        sum = sum_of(
            sum, sum_of(sum_of(from[0], from[fours]), sum_of(from[2 * fours], from[3 * fours])));
      }
      store_shared(
          hidden_of(is_second, row) + 16 * four, {__float_as_uint(sum.x), __float_as_uint(sum.y),
                                                  __float_as_uint(sum.z), __float_as_uint(sum.w)});
    }
  }

  // Selects by comparison, as part_of does.
  template <typename V>
  __device__ __forceinline__ static V of_weight(const V (&all)[kLinearMaxWeights], int weight) {
    return weight == 0 ? all[0] : weight == 1 ? all[1] : all[2];
  }

  __device__ __forceinline__ int target_of(int weight) const {
    return of_weight(params.adapters.target, weight);
  }

  __device__ __forceinline__ unsigned int hidden_of(bool is_second, int row) const {
    const int at = is_second ? ROWS_OF_X + row : row;
    return memory + at * params.adapters.rank * 4;
  }

  // True if the adapter changes these sums.
  __device__ __forceinline__ bool changes(const FourSums& sums) const {
    return adapter >= 0 && target_of(sums.weight) >= 0;
  }

  // Loads ranks from `first` on.
  __device__ __forceinline__ void load(
      Four (&bs)[RANKS], const FourSums& at, int first, bool exists) const {
    if (!exists || !changes(at)) {
      return;
    }
    const int n = of_weight(params.n, at.weight);
    const T* b = of_weight(operands.b, at.weight) + at.column +
                 size_t(adapter * params.adapters.rank + first) * n;
#pragma unroll
    for (int r = 0; r < RANKS; r++) {
      if (r < 8 || first + 8 < params.adapters.rank) {  // Ranks are multiples of eight.
        bs[r] = *reinterpret_cast<const Four*>(b + r * n);
      }
    }
  }

  // `bs`: the first ranks.
  __device__ __forceinline__ void add(FourSums& to, Four (&bs)[RANKS], int row, bool exists) const {
    if (!exists || !changes(to)) {
      return;
    }
    unsigned int hidden = hidden_of(params.is_gated && to.weight == 1, row);
#pragma unroll 1
    for (int first = 0;; hidden += 4 * RANKS) {
#pragma unroll
      for (int r = 0; r < RANKS; r += 4) {
        if (r < 8 || first + 8 < params.adapters.rank) {
          const Eight four = load_shared(hidden + 4 * r);
          add(to.sums, four.x, bs[r]);
          add(to.sums, four.y, bs[r + 1]);
          add(to.sums, four.z, bs[r + 2]);
          add(to.sums, four.w, bs[r + 3]);
        }
      }
      first += RANKS;
      if (first >= params.adapters.rank) {
        return;
      }
      load(bs, to, first, true);
    }
  }

  __device__ __forceinline__ static void add(float4& sum, unsigned int hidden, const Four& b) {
    const float h = __uint_as_float(hidden);
    const T* values = reinterpret_cast<const T*>(&b);
    sum.x += h * as_float(values[0]);
    sum.y += h * as_float(values[1]);
    sum.z += h * as_float(values[2]);
    sum.w += h * as_float(values[3]);
  }
};

}  // namespace mlx_paged::cuda
