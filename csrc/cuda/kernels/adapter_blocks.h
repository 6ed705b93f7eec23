// Copyright © 2026 the mlx_paged authors. Apache-2.0.
//
// The first half of LoRA: hidden = x @ a[adapter].T. The first blocks of a product's grid compute
// it while the others read the product's weight; those then add the second half
// (linear_adapters.h).

#pragma once

#include "linear_adapters.h"
#include "shared_memory.h"

namespace mlx_paged::cuda {

// One block's unit of work: some rows of x, eight at a time, by sixteen rows of `a` for one target,
// over one part of the columns. WARPS warps multiply, taking turns at steps of 32 columns, and each
// sums its steps in order.
template <typename T, int WARPS>
struct AdapterBlock {
  static constexpr int kRanks = kAdapterRanks;  // the rows of an mma
  static constexpr int kRows = kAdapterRows;    // its columns
  static constexpr int kNone = 0x7fffffff;
  static constexpr int kStepsAtOnce = 4;
  static_assert(WARPS * 32 * sizeof(float4) <= 8 * 1024);  // of shared memory

  const LinearParams& params;
  const AdapterOperands<T>& operands;
  int target;
  int first_rank;
  int first_row;
  int end_row;
  int part;

  __device__ __forceinline__
  AdapterBlock(const LinearParams& params, const AdapterOperands<T>& operands)
      : params(params), operands(operands) {
    const int rows = params.adapters.rows_of_unit;
    const int row_tiles = (params.num_rows + rows - 1) / rows;
    const int rank_tiles = (params.adapters.rank + kRanks - 1) / kRanks;
    int unit = blockIdx.x;
    part = unit % kAdapterParts;
    unit /= kAdapterParts;
    first_row = unit % row_tiles * rows;
    end_row = min(first_row + rows, params.num_rows);
    unit /= row_tiles;
    first_rank = unit % rank_tiles * kRanks;
    target = unit / rank_tiles;
  }

  // Computes the unit, if there is one. `chunk_of(row, i)` returns eight columns of a row of x.
  // Called by all threads.
  template <typename ChunkOf>
  __device__ __forceinline__ void run(const T* x, float4* sums_of_warps, ChunkOf chunk_of) const {
    paged::let_next_kernel_begin();
    const bool exists = int(blockIdx.x) < params.adapters.num_units;
    const int warp = threadIdx.x / 32;
    for (int row = first_row; exists && warp < WARPS && row < end_row; row += kRows) {
      fetch(row);
    }
    paged::wait_for_kernel_before();
    if (!exists) {
      return;
    }
#pragma unroll 1
    for (int row = first_row; row < end_row; row += kRows) {
      if (warp < WARPS) {
        sums_of_warps[threadIdx.x] = multiply(x, row, warp, chunk_of);
      }
      __syncthreads();
      if (warp == 0) {
        float4 sum = sums_of_warps[threadIdx.x];
#pragma unroll
        for (int w = 1; w < WARPS; w++) {
          sum = sum_of(sum, sums_of_warps[32 * w + threadIdx.x]);
        }
        store(row, sum);
      }
      __syncthreads();
    }
    if (threadIdx.x == 0) {
      finished_blocks(params, operands).add();
    }
  }

 private:
  struct Steps {
    int begin;
    int end;
  };

  // The part's steps of 32 columns.
  __device__ __forceinline__ Steps steps() const {
    const int all = params.k / kLinearStep;
    const int of_part = (all + kAdapterParts - 1) / kAdapterParts;
    return {part * of_part, min((part + 1) * of_part, all)};
  }

  __device__ __forceinline__ int adapter_of(int row) const {
    const int adapter = row < params.num_rows ? operands.adapters[row] : -1;
    return adapter >= 0 && adapter < params.adapters.count ? adapter : -1;
  }

  // The next adapter after `adapter` of the rows from `row` on; kNone after the last one. Called by
  // whole warps.
  __device__ __forceinline__ int adapter_after(int adapter, int row) const {
    const int ours = adapter_of(row + threadIdx.x % kRows);
    return __reduce_min_sync(~0u, ours > adapter ? ours : kNone);
  }

  // Row `row` of `a` for the unit, the last one instead of those that do not exist.
  __device__ __forceinline__ const T* row_of_a(int adapter, int row) const {
    const T* a = target == 0 ? operands.a[0] : target == 1 ? operands.a[1] : operands.a[2];
    const int rank = min(first_rank + row, params.adapters.rank - 1);
    return a + (size_t(adapter) * params.adapters.rank + rank) * params.k;
  }

  // Prefetches the part of `a` for rows from `row` on. A step may still compute `adapters`; a wrong
  // prefetch does no harm.
  __device__ __forceinline__ void fetch(int row) const {
    constexpr int kColumnsOfLine = 128 / sizeof(T);
    const int begin = steps().begin * kLinearStep;
    const int lines = ((steps().end * kLinearStep - begin) + kColumnsOfLine - 1) / kColumnsOfLine;
    int adapter = adapter_after(-1, row);
    for (; adapter != kNone; adapter = adapter_after(adapter, row)) {
      for (int i = threadIdx.x; i < kRanks * lines; i += 32 * WARPS) {
        paged::fetch_to_l2(row_of_a(adapter, i % kRanks) + begin + i / kRanks * kColumnsOfLine);
      }
    }
  }

  // Returns a warp's sums for rows from `first` on: of ranks r and r + 8 and rows 2c and 2c + 1 for
  // lane 4 r + c.
  template <typename ChunkOf>
  __device__ __forceinline__ float4
  multiply(const T* x, int first, int warp, ChunkOf chunk_of) const {
    const int lane = threadIdx.x % 32;
    const Steps steps = this->steps();
    const T* row = x + size_t(min(first + lane / 4, params.num_rows - 1)) * params.x_stride;
    const int chosen[2] = {adapter_of(first + lane % 4 * 2), adapter_of(first + lane % 4 * 2 + 1)};
    float kept[4] = {};
#pragma unroll 1
    for (int adapter = adapter_after(-1, first); adapter != kNone;
         adapter = adapter_after(adapter, first)) {
      const Eight* low = reinterpret_cast<const Eight*>(row_of_a(adapter, lane / 4));
      const Eight* high = reinterpret_cast<const Eight*>(row_of_a(adapter, lane / 4 + 8));
      float sums[4] = {};
#pragma unroll 1
      for (int begin = steps.begin + warp; begin < steps.end; begin += WARPS * kStepsAtOnce) {
        Eight lows[kStepsAtOnce];
        Eight highs[kStepsAtOnce];
        Eight xs[kStepsAtOnce];
#pragma unroll
        for (int i = 0; i < kStepsAtOnce; i++) {
          const int step = begin + WARPS * i;
          const int chunk = min(step, steps.end - 1) * 4 + lane % 4;
          lows[i] = low[chunk];
          highs[i] = high[chunk];
          xs[i] = chunk_of(row, chunk);
          if (step >= steps.end) {
            xs[i] = make_uint4(0, 0, 0, 0);
          }
        }
#pragma unroll
        for (int i = 0; i < kStepsAtOnce; i++) {
          multiply_step<T>(sums, lows[i], highs[i], xs[i]);
        }
      }
#pragma unroll
      for (int i = 0; i < 4; i++) {
        kept[i] = chosen[i % 2] == adapter ? sums[i] : kept[i];
      }
    }
    return make_float4(kept[0], kept[1], kept[2], kept[3]);
  }

  // Writes the sums of a lane for rows from `first` on.
  __device__ __forceinline__ void store(int first, float4 sum) const {
    const float sums[4] = {sum.x, sum.y, sum.z, sum.w};
    const int lane = threadIdx.x % 32;
#pragma unroll
    for (int i = 0; i < 4; i++) {
      const int rank = first_rank + lane / 4 + i / 2 * 8;
      const int row = first + lane % 4 * 2 + i % 2;
      if (rank < params.adapters.rank && row < params.num_rows) {
        const size_t at = size_t(target * params.num_rows + row) * kAdapterParts + part;
        operands.hidden[at * params.adapters.rank + rank] = sums[i];
      }
    }
  }
};

}  // namespace mlx_paged::cuda
