// Copyright © 2026 the mlx_paged authors. Apache-2.0.
//
// Pairs of a row and one of its experts that are sorted by expert: their work items
// (expert_items.h), and their rows.

#pragma once

#include "dependent_launch.h"
#include "linear_math.h"
#include "ordered_rows.h"

namespace mlx_paged::cuda {

// Finds the first of `count` sorted numbers that is at least `value`.
__device__ __forceinline__ int lower_bound(const unsigned int* sorted, int count, unsigned value) {
  int first = 0;
  while (count > 0) {
    const int half = count / 2;
    const bool is_less = sorted[first + half] < value;
    first = is_less ? first + half + 1 : first;
    count = is_less ? count - half - 1 : half;
  }
  return first;
}

// Writes items of up to `item_rows` rows, then empty ones. Experts out of range belong to no item.
// One block, with a thread for each expert and one more; as many ints of shared memory.
__global__ void __launch_bounds__(kMaxSortedExperts + 1) sorted_items_entry(
    const unsigned int* experts, int* items, const __grid_constant__ SortedItemsParams params) {
  paged::begin_after_kernel_before();
  extern __shared__ __align__(1024) unsigned char shared[];
  int* firsts = reinterpret_cast<int*>(shared);
  const int expert = threadIdx.x;
  const int num_experts = params.num_experts;
  if (expert <= num_experts) {
    firsts[expert] = lower_bound(experts, params.num_rows, expert);
  }
  __syncthreads();
  if (expert >= num_experts) {
    return;
  }
  // Never negative: even where the experts are not sorted, bounds ascend.
  auto items_of = [&](int of) {
    return (firsts[of + 1] - firsts[of] + params.item_rows - 1) / params.item_rows;
  };
  int item = 0;
  for (int other = 0; other < expert; other++) {
    item += items_of(other);
  }
  auto write = [&](int first, int count) {
    items[3 * item] = expert;
    items[3 * item + 1] = first;
    items[3 * item + 2] = count;
    item++;
  };
  for (int first = firsts[expert]; first < firsts[expert + 1]; first += params.item_rows) {
    write(first, min(firsts[expert + 1] - first, params.item_rows));
  }
  while (expert == num_experts - 1 && item < params.max_items) {
    write(0, 0);
  }
}

// Gathers each pair's row of x, in code order. Grid: pairs.
template <int RUN, int APART>
__global__ void sorted_rows_entry(
    const uint4* x, const unsigned int* pairs, uint4* out,
    const __grid_constant__ SortedRowsParams params) {
  paged::begin_after_kernel_before();
  const uint4* from = x + size_t(pairs[blockIdx.x] / params.top_k) * params.x_stride;
  uint4* to = out + size_t(blockIdx.x) * params.row_chunks;
  for (int i = threadIdx.x; i < params.row_chunks; i += blockDim.x) {
    InOrder<RUN, APART>::write(to, i, from[i]);
  }
}

}  // namespace mlx_paged::cuda
