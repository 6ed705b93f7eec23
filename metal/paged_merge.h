// Copyright © 2026 the mlx_paged authors. Apache-2.0.
//
// Merges the partials of rows that were split over several work items. A SIMD-group handles one row
// and one query head; the splits are few and their partials are still in the cache.

#pragma once

#include <metal_stdlib>

#include "attention_output.h"
#include "attention_shape.h"
#include "kernel_table.h"
#include "language.h"
#include "softmax_state.h"

using namespace metal;

// grid: (merge items, query heads / MERGE_SIMD_GROUPS rounded up, maximum rows per item).
template <typename T, int V_DIM>
PAGED_KERNEL(32 * paged::MERGE_SIMD_GROUPS)
paged_merge(
    device const paged::MergeItem* merge_items [[buffer(0)]],
    device const float* workspace [[buffer(1)]], device const float* per_head [[buffer(2)]],
    device T* out [[buffer(3)]], constant paged::MergeParams& params [[buffer(4)]],
    uint3 group_id [[threadgroup_position_in_grid]], PAGED_SIMD_POSITION) {
  using namespace paged;
  constexpr int PAIRS = ceil_div(V_DIM, 64);  // pairs of values per lane

  MergeItem item = merge_items[group_id.x];
  int num_rows = item.row_end - item.row_begin;
  int row = group_id.z;
  int head = int(group_id.y) * MERGE_SIMD_GROUPS + int(simd_id);
  if (row >= num_rows || head >= params.num_q_heads) {
    return;
  }
  ulong rows = ulong(params.num_partials) * params.num_q_heads;
  device const float* maxima = workspace + rows * V_DIM;
  device const float* sums = maxima + rows;

  SoftmaxState joined;
  joined.clear();
  for (int split = lane; split < item.num_splits; split += 32) {
    ulong partial = ulong(item.partial_begin + split * num_rows + row) * params.num_q_heads + head;
    float maximum = max(joined.maximum, maxima[partial]);
    joined.sum = joined.sum * rescale(joined.maximum, maximum) +
                 sums[partial] * rescale(maxima[partial], maximum);
    joined.maximum = maximum;
  }
  float maximum = simd_max(joined.maximum);
  joined.sum = simd_sum(joined.sum * rescale(joined.maximum, maximum));
  joined.maximum = maximum;

  float2 values[PAIRS];
  PAGED_UNROLL
  for (int i = 0; i < PAIRS; i++) {
    values[i] = float2(0.0f);
  }
  for (int split = 0; split < item.num_splits; split++) {
    ulong partial = ulong(item.partial_begin + split * num_rows + row) * params.num_q_heads + head;
    float factor = rescale(maxima[partial], maximum);
    PAGED_UNROLL
    for (int i = 0; i < PAIRS; i++) {
      int element = i * 64 + 2 * int(lane);
      if (element < V_DIM) {
        values[i] += factor * *(device const float2*)(workspace + partial * V_DIM + element);
      }
    }
  }

  float normalizer = joined.normalizer(per_head, head, params.options);
  device T* result = out + (ulong(item.row_begin + row) * params.num_q_heads + head) * V_DIM;
  PAGED_UNROLL
  for (int i = 0; i < PAIRS; i++) {
    int element = i * 64 + 2 * int(lane);
    if (element < V_DIM) {
      result[element] = T(values[i].x * normalizer);
      result[element + 1] = T(values[i].y * normalizer);
    }
  }
}
