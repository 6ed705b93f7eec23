// Copyright © 2026 the mlx_paged authors. Apache-2.0.

#pragma once

#include <metal_stdlib>

#include "kernel_table.h"

using namespace metal;

// Makes a dense copy of an array whose elements do not lie one after the other, or do not begin at
// a multiple of 16 bytes. The other kernels read nothing else. Rare: pools and activations do.
// grid: (elements of the last two dims / 256 rounded up, second dim, first dim).
template <typename T>
kernel void copy_strided(
    device const T* in [[buffer(0)]], device T* out [[buffer(1)]],
    constant paged::StridedParams& params [[buffer(2)]],
    uint3 group_id [[threadgroup_position_in_grid]], uint3 group_size [[threads_per_threadgroup]],
    uint3 grid [[threadgroups_per_grid]], uint thread_id [[thread_index_in_threadgroup]]) {
  long element = long(group_id.x) * group_size.x + thread_id;
  long row_size = long(params.shape_2) * params.shape_3;
  if (element >= row_size) {
    return;
  }
  long from = group_id.z * params.stride_0 + group_id.y * params.stride_1 +
              element / params.shape_3 * params.stride_2 +
              element % params.shape_3 * params.stride_3;
  out[(ulong(group_id.z) * grid.y + group_id.y) * row_size + element] = in[from];
}
