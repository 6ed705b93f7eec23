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
// sums its steps in order. While it multiplies kStepsAtOnce, as many are on their way.
template <typename T, int WARPS>
struct AdapterBlock {
  static constexpr int kRanks = kAdapterRanks;  // the rows of an mma
  static constexpr int kRows = kAdapterRows;    // its columns
  static constexpr int kNone = 0x7fffffff;
  static constexpr int kStepsAtOnce = 2;
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
    part = unit % adapter_parts(params.k);
    unit /= adapter_parts(params.k);
    first_row = unit % row_tiles * rows;
    end_row = min(first_row + rows, params.num_rows);
    unit /= row_tiles;
    first_rank = unit % rank_tiles * kRanks;
    target = unit / rank_tiles;
  }

  // Computes the unit, if there is one. `chunk_of(row, i)` returns eight columns of a row of x.
  // Called by all threads. A step may still compute `adapters` at first, so what is loaded for
  // them then is only a guess.
  template <typename ChunkOf>
  __device__ __forceinline__ void run(const T* x, float4* sums_of_warps, ChunkOf chunk_of) const {
    paged::let_next_kernel_begin();
    const bool exists = int(blockIdx.x) < params.adapters.num_units;
    const int warp = threadIdx.x / 32;
    const bool multiplies = exists && warp < WARPS;
    Matrix a{};
    int guess = kNone;
    if (multiplies) {
      const Adapters guessed = load_adapters();
      guess = guessed.after(-1, 0);
      if (guess != kNone) {
        load(a, guess, steps().begin + warp);
      }
      for (int group = 0; first_row + kRows * group < end_row; group++) {
        fetch(guessed, group);
      }
    }
    paged::wait_for_kernel_before();
    if (!exists) {
      return;
    }
    const Adapters adapters = load_adapters();
#pragma unroll 1
    for (int group = 0; first_row + kRows * group < end_row; group++) {
      if (warp < WARPS) {
        sums_of_warps[threadIdx.x] = multiply(x, adapters, group, warp, a, guess, chunk_of);
        guess = kNone;
      }
      __syncthreads();
      if (warp == 0) {
        float4 sum = sums_of_warps[threadIdx.x];
#pragma unroll
        for (int w = 1; w < WARPS; w++) {
          sum = sum_of(sum, sums_of_warps[32 * w + threadIdx.x]);
        }
        store(first_row + kRows * group, sum);
      }
      __syncthreads();
    }
    if (threadIdx.x == 0) {
      finished_blocks(params, operands).add();
    }
    __syncwarp();  // Instructions of whole warps may follow.
  }

 private:
  struct Steps {
    int begin;
    int end;
  };

  // The part's steps of 32 columns.
  __device__ __forceinline__ Steps steps() const {
    const int all = params.k / kLinearStep;
    const int of_part = (all + adapter_parts(params.k) - 1) / adapter_parts(params.k);
    return {part * of_part, min((part + 1) * of_part, all)};
  }

  // The adapters of the unit's rows `lane` and `lane` + 32; -1: none. Groups have eight rows. Used
  // by whole warps.
  struct Adapters {
    int of_row[kLinearMaxRows / 32];

    __device__ __forceinline__ int at(int group, int row) const {
      return __shfl_sync(~0u, group < 4 ? of_row[0] : of_row[1], 8 * (group % 4) + row);
    }

    // The next one of a group after `adapter`; kNone after the last one.
    __device__ __forceinline__ int after(int adapter, int group) const {
      const int ours = at(group, threadIdx.x % kRows);
      return __reduce_min_sync(~0u, ours > adapter ? ours : kNone);
    }
  };

  __device__ __forceinline__ Adapters load_adapters() const {
    Adapters found;
#pragma unroll
    for (int i = 0; i < kLinearMaxRows / 32; i++) {
      const int row = first_row + 32 * i + threadIdx.x % 32;
      const int adapter = row < end_row ? operands.adapters[row] : -1;
      found.of_row[i] = adapter < params.adapters.count ? max(adapter, -1) : -1;
    }
    return found;
  }

  // Row `row` of `a` for the unit, the last one instead of those that do not exist.
  __device__ __forceinline__ const T* row_of_a(int adapter, int row) const {
    const T* a = target == 0 ? operands.a[0] : target == 1 ? operands.a[1] : operands.a[2];
    const int rank = min(first_rank + row, params.adapters.rank - 1);
    return a + (size_t(adapter) * params.adapters.rank + rank) * params.k;
  }

  // Prefetches the part of `a` for a group of rows.
  __device__ __forceinline__ void fetch(const Adapters& adapters, int group) const {
    constexpr int kColumnsOfLine = 128 / sizeof(T);
    const int begin = steps().begin * kLinearStep;
    const int lines = ((steps().end * kLinearStep - begin) + kColumnsOfLine - 1) / kColumnsOfLine;
    int adapter = adapters.after(-1, group);
    for (; adapter != kNone; adapter = adapters.after(adapter, group)) {
      for (int i = threadIdx.x; i < kRanks * lines; i += 32 * WARPS) {
        paged::fetch_to_l2(row_of_a(adapter, i % kRanks) + begin + i / kRanks * kColumnsOfLine);
      }
    }
  }

  // A lane's operands of some steps: two rows of `a`, and one of x.
  struct Matrix {
    Eight lows[kStepsAtOnce];
    Eight highs[kStepsAtOnce];
  };

  // The chunk of a lane for step `i` from `begin` on, the last one instead of those of other parts.
  __device__ __forceinline__ int chunk_of_step(int begin, int i) const {
    return min(begin + WARPS * i, steps().end - 1) * 4 + threadIdx.x % 4;
  }

  __device__ __forceinline__ void load(Matrix& to, int adapter, int begin) const {
    const int row = threadIdx.x % 32 / 4;
    const Eight* low = reinterpret_cast<const Eight*>(row_of_a(adapter, row));
    const Eight* high = reinterpret_cast<const Eight*>(row_of_a(adapter, row + 8));
#pragma unroll
    for (int i = 0; i < kStepsAtOnce; i++) {
      to.lows[i] = low[chunk_of_step(begin, i)];
      to.highs[i] = high[chunk_of_step(begin, i)];
    }
  }

  template <typename ChunkOf>
  __device__ __forceinline__ void load(
      Eight (&to)[kStepsAtOnce], const T* row, int begin, ChunkOf chunk_of) const {
#pragma unroll
    for (int i = 0; i < kStepsAtOnce; i++) {
      to[i] = chunk_of(row, chunk_of_step(begin, i));
    }
  }

  // Returns a warp's sums for a group of rows: of ranks r and r + 8 and rows 2c and 2c + 1 for lane
  // 4 r + c. `a`: the operands of the first steps if the group's first adapter is `guess`.
  template <typename ChunkOf>
  __device__ __forceinline__ float4 multiply(
      const T* x, const Adapters& adapters, int group, int warp, Matrix& a, int guess,
      ChunkOf chunk_of) const {
    const int lane = threadIdx.x % 32;
    const int of_lane = min(first_row + kRows * group + lane / 4, params.num_rows - 1);
    const T* row = x + size_t(of_lane) * params.x_stride;
    const int end = steps().end;
    int begin = steps().begin + warp;
    if (begin >= end) {
      return make_float4(0.0f, 0.0f, 0.0f, 0.0f);
    }
    Eight xs[kStepsAtOnce];
    load(xs, row, begin, chunk_of);
    const int first_adapter = adapters.after(-1, group);
    int adapter = first_adapter;
    if (adapter == kNone) {
      return make_float4(0.0f, 0.0f, 0.0f, 0.0f);
    }
    if (adapter != guess) {
      load(a, adapter, begin);
    }
    const int chosen[2] = {adapters.at(group, lane % 4 * 2), adapters.at(group, lane % 4 * 2 + 1)};
    float kept[4] = {};
#pragma unroll 1
    while (true) {
      int next = adapters.after(adapter, group);
      int next_begin = begin;
      if (next == kNone) {
        next = first_adapter;
        next_begin += WARPS * kStepsAtOnce;
      }
      Matrix later;
      Eight later_xs[kStepsAtOnce];
      if (next_begin < end) {
        load(later, next, next_begin);
        load(later_xs, row, next_begin, chunk_of);
      }
      float sums[4] = {kept[0], kept[1], kept[2], kept[3]};
#pragma unroll
      for (int i = 0; i < kStepsAtOnce; i++) {
        const bool is_ours = begin + WARPS * i < end;
        multiply_step<T>(sums, a.lows[i], a.highs[i], is_ours ? xs[i] : make_uint4(0, 0, 0, 0));
      }
#pragma unroll
      for (int i = 0; i < 4; i++) {
        kept[i] = chosen[i % 2] == adapter ? sums[i] : kept[i];
      }
      if (next_begin >= end) {
        return make_float4(kept[0], kept[1], kept[2], kept[3]);
      }
      a = later;
#pragma unroll
      for (int i = 0; i < kStepsAtOnce; i++) {
        xs[i] = later_xs[i];
      }
      adapter = next;
      begin = next_begin;
    }
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
        const size_t at = size_t(target * params.num_rows + row) * adapter_parts(params.k) + part;
        operands.hidden[at * params.adapters.rank + rank] = sums[i];
      }
    }
  }
};

}  // namespace mlx_paged::cuda
