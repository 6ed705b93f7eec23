// Copyright © 2026 the mlx_paged authors. Apache-2.0.
//
// Joins the partials of rows that were split, as metal/merge.h does, with a thread block for a row
// and a query head. The kernel runs alone, between two that wait for it, so what counts is how
// often it waits for memory: the first values are under way before the maxima are known, and blocks
// are so small that all of them are on the GPU at once.

#pragma once

#include "../merge_shape.h"
#include "attention_output.h"
#include "params.h"
#include "softmax_state.h"
#include "tensor_core.h"

namespace paged {

// The values of the next splits of a warp, 4 elements a lane and vector.
template <int V_DIM>
struct SplitValues {
  static constexpr int VECTORS = (V_DIM + 127) / 128;

  float4 values[MERGE_AT_ONCE][VECTORS];

  __device__ __forceinline__ static int element(int vector, int lane) {
    return vector * 128 + lane * 4;
  }

  // `at(split)` is the workspace row of a split; those from `end` on are zeros.
  template <typename At>
  __device__ __forceinline__ void load(const float* rows, At at, int split, int end, int lane) {
#pragma unroll
    for (int i = 0; i < MERGE_AT_ONCE; i++) {
      int of = split + i * MERGE_WARPS;
#pragma unroll
      for (int v = 0; v < VECTORS; v++) {
        values[i][v] = make_float4(0.0f, 0.0f, 0.0f, 0.0f);
        if (of < end && element(v, lane) < V_DIM) {
          values[i][v] = paged::load(rows + at(of) * V_DIM + element(v, lane), evict_first());
        }
      }
    }
  }

  __device__ __forceinline__ void add_to(float4 (&sum)[VECTORS], int i, float factor) const {
#pragma unroll
    for (int v = 0; v < VECTORS; v++) {
      sum[v].x = fmaf(values[i][v].x, factor, sum[v].x);
      sum[v].y = fmaf(values[i][v].y, factor, sum[v].y);
      sum[v].z = fmaf(values[i][v].z, factor, sum[v].z);
      sum[v].w = fmaf(values[i][v].w, factor, sum[v].w);
    }
  }
};

// The softmax of a whole row: lanes take a split each. All lanes return it.
template <typename At>
__device__ __forceinline__ SoftmaxState
join_splits(const float* maxima, const float* sums, At at, int num_splits, int lane) {
  SoftmaxState joined;
  joined.clear();
  for (int split = lane; split < num_splits; split += 32) {
    float other = maxima[at(split)];
    float maximum = fmaxf(joined.maximum, other);
    joined.sum =
        joined.sum * rescale(joined.maximum, maximum) + sums[at(split)] * rescale(other, maximum);
    joined.maximum = maximum;
  }
  float maximum = metal::simd_max(joined.maximum);
  joined.sum = metal::simd_sum(joined.sum * rescale(joined.maximum, maximum));
  joined.maximum = maximum;
  return joined;
}

}  // namespace paged

// grid: (merge items x query heads, most rows of an item).
template <typename T, int V_DIM>
__global__ void __launch_bounds__(32 * paged::MERGE_WARPS) merge_splits_entry(
    const paged::MergeItem* __restrict__ merge_items, const float* __restrict__ workspace,
    const float* __restrict__ sinks, T* __restrict__ out,
    const __grid_constant__ paged::MergeParams params) {
  using namespace paged;
  typedef SplitValues<V_DIM> Values;
  __shared__ __align__(16) float sums_of_warps[MERGE_WARPS][V_DIM];

  int head = blockIdx.x % params.num_q_heads;
  MergeItem item = merge_items[blockIdx.x / params.num_q_heads];
  int num_rows = item.row_end - item.row_begin;
  int row = blockIdx.y;
  if (row >= num_rows) {
    return;
  }
  int warp = threadIdx.x / 32;
  int lane = threadIdx.x % 32;
  size_t num_partials = size_t(params.num_partials) * params.num_q_heads;
  const float* maxima = workspace + num_partials * V_DIM;
  auto at = [&](int split) -> size_t {
    return size_t(item.partial_begin + split * num_rows + row) * params.num_q_heads + head;
  };

  Values next;
  next.load(workspace, at, warp, item.num_splits, lane);
  SoftmaxState joined = join_splits(maxima, maxima + num_partials, at, item.num_splits, lane);
  float4 sum[Values::VECTORS] = {};
  for (int split = warp; split < item.num_splits;) {
    float factors[MERGE_AT_ONCE];
#pragma unroll
    for (int i = 0; i < MERGE_AT_ONCE; i++) {
      int of = min(split + i * MERGE_WARPS, item.num_splits - 1);  // past the last: times zero
      factors[i] = rescale(maxima[at(of)], joined.maximum);
    }
#pragma unroll
    for (int i = 0; i < MERGE_AT_ONCE; i++) {
      next.add_to(sum, i, factors[i]);
    }
    split += MERGE_WARPS * MERGE_AT_ONCE;
    next.load(workspace, at, split, item.num_splits, lane);
  }
#pragma unroll
  for (int v = 0; v < Values::VECTORS; v++) {
    if (Values::element(v, lane) < V_DIM) {
      *reinterpret_cast<float4*>(&sums_of_warps[warp][Values::element(v, lane)]) = sum[v];
    }
  }
  __syncthreads();

  float sink = params.has_sinks ? sinks[head] : 0.0f;
  float normaliser = joined.normaliser(params.has_sinks, sink);
  T* result = out + (size_t(item.row_begin + row) * params.num_q_heads + head) * V_DIM;
  for (int d = threadIdx.x; d < V_DIM; d += 32 * MERGE_WARPS) {
    float total = 0.0f;
#pragma unroll
    for (int w = 0; w < MERGE_WARPS; w++) {
      total += sums_of_warps[w][d];
    }
    result[d] = T(total * normaliser);
  }
}
