// Copyright © 2026 the mlx_paged authors. Apache-2.0.
//
// Work items of expert products, and the order of their kernels.
//
// A mixture launches products twice. The first launch waits for the router before it lets the
// second start, so the second can read its items before its own wait, and load weights while the
// first ends.

#pragma once

#include "copy_ring.h"
#include "linear_finish.h"

namespace mlx_paged::cuda {

#if !defined(__CUDA_ARCH__) || __CUDA_ARCH__ >= 900

// Adjacent pairs (token, expert) of one expert; see route_experts in metal/experts.h.
struct ExpertItem {
  int expert;
  int first;  // index of the first pair
  int count;  // 0: nothing to do
};

// Waits until the items are known and returns this block's. Called by all threads.
__device__ __forceinline__ ExpertItem
begin_item(const ExpertProductParams& params, const int* items) {
  if (params.is_first) {
    paged::wait_for_kernel_before();
  }
  paged::let_next_kernel_begin();
  const int* item = items + 3 * (blockIdx.x / params.num_tiles);
  return {item[0], item[1], item[2]};
}

// The rows of x that each lane of a warp copies.
template <int TILES>
struct RowsOfLane {
  static constexpr int kMaxRows = (8 * TILES + 31) / 32;
  int rows[kMaxRows];

  __device__ __forceinline__ RowsOfLane(
      const ExpertProductParams& params, const ExpertItem& item, const int* sorted_pairs,
      int lane) {
#pragma unroll
    for (int i = 0; i < kMaxRows; i++) {
      const int at = lane + 32 * i;
      const bool exists = params.is_first && at < item.count;
      rows[i] = exists ? sorted_pairs[item.first + at] / params.top_k : 0;
    }
  }

  // Calls copy(at, row) for row `at` of the item, which is row `row` of x.
  template <typename Copy>
  __device__ __forceinline__ void for_each(const ExpertItem& item, int lane, Copy copy) const {
#pragma unroll
    for (int i = 0; i < kMaxRows; i++) {
      const int at = lane + 32 * i;
      if (at < item.count) {
        copy(at, rows[i]);
      }
    }
  }
};

// LinearParts of a launch: gate, if it is gated, and up.
#define EXPERT_PARTS                                                                        \
  {                                                                                         \
    {nullptr, bias_0, out, params.product.n[0], params.product.has_bias[0] != 0},           \
        {nullptr, bias_1, nullptr, params.product.n[0], params.product.has_bias[1] != 0}, { \
      nullptr, nullptr, nullptr, 0, false                                                   \
    }                                                                                       \
  }

// Finishes the outputs of an item. `parts`: those of the whole launch.
template <typename T, int ROWS, typename Sums>
__device__ __forceinline__ void finish_item(
    const ExpertProductParams& params, const ExpertItem& item, const int* sorted_pairs, int tile,
    LinearPart<T> (&parts)[kLinearMaxWeights], int num_threads, Sums sums_of) {
#pragma unroll
  for (int i = 0; i < 2; i++) {
    parts[i].bias += size_t(item.expert) * params.product.n[0];
  }
  const bool is_first = params.is_first;
  finish_rows<T, ROWS, ROWS>(
      params.product, parts, 0, tile, static_cast<const T*>(nullptr), nullptr, nullptr,
      [=](int at) {
        const int index = item.first + at;
        return is_first ? index : sorted_pairs[index];
      },
      item.count, threadIdx.x, num_threads, sums_of);
}

#endif

}  // namespace mlx_paged::cuda
