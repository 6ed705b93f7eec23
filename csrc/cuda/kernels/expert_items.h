// Copyright © 2026 the mlx_paged authors. Apache-2.0.
//
// Products of rows with their experts: what a block serves, and how kernels follow each other.
//
// A mixture has two launches of products. The first one waits for the router's launch before it
// lets the next begin. So the second one knows its items before it waits, and its weights are under
// way while the first one ends.

#pragma once

#include "copy_ring.h"
#include "linear_finish.h"

namespace mlx_paged::cuda {

#if !defined(__CUDA_ARCH__) || __CUDA_ARCH__ >= 900

// Pairs of one expert, side by side (route_experts in metal/experts.h).
struct ExpertItem {
  int expert;
  int first;  // place
  int count;  // 0: the block has nothing to do
};

// Returns when the item is known. By all threads.
__device__ __forceinline__ ExpertItem
begin_item(const ExpertProductParams& params, const int* items) {
  if (params.is_first) {
    paged::wait_for_kernel_before();
  }
  paged::let_next_kernel_begin();
  const int* item = items + 3 * (blockIdx.x / params.num_tiles);
  return {item[0], item[1], item[2]};
}

// The rows of x that a lane of a warp copies.
template <int TILES>
struct RowsOfLane {
  static constexpr int kMost = (8 * TILES + 31) / 32;
  int rows[kMost];

  __device__ __forceinline__ RowsOfLane(
      const ExpertProductParams& params, const ExpertItem& item, const int* sorted_pairs,
      int lane) {
#pragma unroll
    for (int i = 0; i < kMost; i++) {
      const int at = lane + 32 * i;
      const bool exists = params.is_first && at < item.count;
      rows[i] = exists ? sorted_pairs[item.first + at] / params.top_k : 0;
    }
  }

  // copy(at, row): row `at` of the item, which is row `row` of x.
  template <typename Copy>
  __device__ __forceinline__ void each(const ExpertItem& item, int lane, Copy copy) const {
#pragma unroll
    for (int i = 0; i < kMost; i++) {
      const int at = lane + 32 * i;
      if (at < item.count) {
        copy(at, rows[i]);
      }
    }
  }
};

// Parts of one launch: gate's, if it is gated, and up's.
#define EXPERT_PARTS                                                                        \
  {                                                                                         \
    {nullptr, bias_0, out, params.product.n[0], params.product.has_bias[0] != 0},           \
        {nullptr, bias_1, nullptr, params.product.n[0], params.product.has_bias[1] != 0}, { \
      nullptr, nullptr, nullptr, 0, false                                                   \
    }                                                                                       \
  }

// Finishes the outputs of an item. `parts`: of the whole launch.
template <typename T, int ROWS, typename Sums>
__device__ __forceinline__ void finish_item(
    const ExpertProductParams& params, const ExpertItem& item, const int* sorted_pairs, int tile,
    LinearPart<T> (&parts)[kLinearMostWeights], int num_threads, Sums sums_of) {
#pragma unroll
  for (int i = 0; i < 2; i++) {
    parts[i].bias += size_t(item.expert) * params.product.n[0];
  }
  const bool is_first = params.is_first;
  finish_rows<T, ROWS, ROWS>(
      params.product, parts, 0, tile, static_cast<const T*>(nullptr), nullptr, nullptr,
      [=](int at) {
        const int place = item.first + at;
        return is_first ? place : sorted_pairs[place];
      },
      item.count, threadIdx.x, num_threads, sums_of);
}

#endif

}  // namespace mlx_paged::cuda
