// Copyright © 2026 the mlx_paged authors. Apache-2.0.
//
// Merges the partials of split rows like metal/paged_merge.h, with one warp per row and query head.
// The kernel runs alone between two that wait for it, so its time is the number of waits for
// memory: it loads all values of up to a dozen splits before it knows their maxima.

#pragma once

#include "../tensor_shape.h"
#include "attention_output.h"
#include "dependent_launch.h"
#include "kernel_table.h"
#include "softmax_state.h"
#include "tensor_core.h"

namespace paged {

// Values of the next splits, 4 elements per lane and vector, and one maximum per lane. If 16 lanes
// suffice for a row, the warp's halves take alternate splits.
template <int V_DIM>
struct SplitValues {
  static constexpr int VECTORS = (V_DIM + 127) / 128;
  static constexpr int HALVES = V_DIM <= 64 ? 2 : 1;
  static constexpr int EACH = MERGE_VECTORS / VECTORS / HALVES;  // splits per half
  static constexpr int AT_ONCE = EACH * HALVES;
  static_assert(AT_ONCE <= 32);

  float4 values[EACH][VECTORS];
  float maximum;

  __device__ __forceinline__ static int half(int lane) { return HALVES == 2 ? lane / 16 : 0; }
  __device__ __forceinline__ static int element(int vector, int lane) {
    return vector * 128 + (HALVES == 2 ? lane % 16 : lane) * 4;
  }

  // `at(split)` returns the workspace row of a split; splits from `end` on become zeros.
  template <typename At>
  __device__ __forceinline__ void load(
      const float* rows, const float* maxima, At at, int first, int end, int lane) {
#pragma unroll
    for (int i = 0; i < EACH; i++) {
      int split = first + i * HALVES + half(lane);
#pragma unroll
      for (int v = 0; v < VECTORS; v++) {
        values[i][v] = make_float4(0.0f, 0.0f, 0.0f, 0.0f);
        if (split < end && element(v, lane) < V_DIM) {
          values[i][v] = paged::load(rows + at(split) * V_DIM + element(v, lane), evict_first());
        }
      }
    }
    maximum = first + lane < end ? maxima[at(first + lane)] : -INFINITY;
  }

  // Adds all loaded splits relative to `joined`, the maximum of the whole row.
  __device__ __forceinline__ void add_to(float4 (&sum)[VECTORS], float joined, int lane) const {
    float factors = rescale(maximum, joined);
#pragma unroll
    for (int i = 0; i < EACH; i++) {
      float factor = __shfl_sync(0xffffffffu, factors, i * HALVES + half(lane));
#pragma unroll
      for (int v = 0; v < VECTORS; v++) {
        sum[v].x = fmaf(values[i][v].x, factor, sum[v].x);
        sum[v].y = fmaf(values[i][v].y, factor, sum[v].y);
        sum[v].z = fmaf(values[i][v].z, factor, sum[v].z);
        sum[v].w = fmaf(values[i][v].w, factor, sum[v].w);
      }
    }
  }
};

// Computes the softmax of a whole row, one split per lane at a time, and returns it in all lanes.
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

// Four elements written by one store.
template <typename T>
struct alignas(4 * sizeof(T)) FourOf {
  T values[4];
};

}  // namespace paged

// Grid: (merge items x blocks of query heads, maximum rows per item).
template <typename T, int V_DIM>
__global__ void __launch_bounds__(32 * paged::MERGE_HEADS) merge_splits_entry(
    const paged::MergeItem* __restrict__ merge_items, const float* workspace,
    const float* __restrict__ per_head, T* out, const __grid_constant__ paged::MergeParams params) {
  using namespace paged;
  typedef SplitValues<V_DIM> Values;
  int blocks = (params.num_q_heads + MERGE_HEADS - 1) / MERGE_HEADS;
  int head = blockIdx.x % blocks * MERGE_HEADS + threadIdx.x / 32;
  MergeItem item = merge_items[blockIdx.x / blocks];
  begin_after_kernel_before();
  int num_rows = item.row_end - item.row_begin;
  int row = blockIdx.y;
  if (row >= num_rows || head >= params.num_q_heads) {
    return;
  }
  int lane = threadIdx.x % 32;
  size_t num_partials = size_t(params.num_partials) * params.num_q_heads;
  const float* maxima = workspace + num_partials * V_DIM;
  auto at = [&](int split) -> size_t {
    return size_t(item.partial_begin + split * num_rows + row) * params.num_q_heads + head;
  };

  Values next;
  next.load(workspace, maxima, at, 0, item.num_splits, lane);
  SoftmaxState joined = join_splits(maxima, maxima + num_partials, at, item.num_splits, lane);
  float4 sum[Values::VECTORS] = {};
  for (int first = 0;;) {
    next.add_to(sum, joined.maximum, lane);
    first += Values::AT_ONCE;
    if (first >= item.num_splits) {
      break;
    }
    next.load(workspace, maxima, at, first, item.num_splits, lane);
  }

  float normalizer = joined.normalizer(per_head, head, params.options);
  T* result = out + (size_t(item.row_begin + row) * params.num_q_heads + head) * V_DIM;
#pragma unroll
  for (int v = 0; v < Values::VECTORS; v++) {
    float total[4] = {sum[v].x, sum[v].y, sum[v].z, sum[v].w};
    FourOf<T> rounded;
#pragma unroll
    for (int i = 0; i < 4; i++) {
      if (Values::HALVES == 2) {
        total[i] += __shfl_xor_sync(0xffffffffu, total[i], 16);
      }
      rounded.values[i] = T(total[i] * normalizer);
    }
    if (Values::half(lane) == 0 && Values::element(v, lane) < V_DIM) {
      *reinterpret_cast<FourOf<T>*>(result + Values::element(v, lane)) = rounded;
    }
  }
}
