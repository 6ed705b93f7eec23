// Copyright © 2026 the mlx_paged authors. Apache-2.0.

#include <metal_stdlib>

#include "kernel_table.h"

using namespace metal;

// Zeros an output of which the attention kernels will write only some rows.
// grid: chunks of 16 bytes / 256 rounded up.
kernel void fill_zero(
    device uint4* out [[buffer(0)]], constant paged::FillParams& params [[buffer(1)]],
    uint3 group_id [[threadgroup_position_in_grid]], uint3 group_size [[threads_per_threadgroup]],
    uint thread_id [[thread_index_in_threadgroup]]) {
  int chunk = group_id.x * group_size.x + thread_id;
  if (chunk < params.num_chunks) {
    out[chunk] = uint4(0);
  }
}
