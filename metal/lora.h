// Copyright © 2026 the mlx_paged authors. Apache-2.0.
//
// Low-rank adapters: base + (x @ a[adapter].T) @ b[adapter] with an adapter per row. A row's sums
// do not depend on other rows.

#pragma once

#include <metal_stdlib>

#include "kernel_table.h"
#include "language.h"
#include "vector_load.h"

using namespace metal;

// Computes hidden = x @ a[adapter].T in fp32. Rows without an adapter are not written.
// grid: (rank / SIMD-groups rounded up, rows).
template <typename T>
PAGED_KERNEL(paged::LORA_THREADS)
lora_down(
    device const T* x [[buffer(0)]], device const int* adapters [[buffer(1)]],
    device const T* a [[buffer(2)]], device float* hidden [[buffer(3)]],
    constant paged::LoraParams& params [[buffer(4)]],
    uint3 group_id [[threadgroup_position_in_grid]], PAGED_SIMD_POSITION) {
  using namespace paged;
  constexpr int CHUNK = chunk_size<T>();
  int column = int(group_id.x) * (LORA_THREADS / 32) + int(simd_id);
  ulong row = group_id.y;
  int adapter = adapters[row];
  if (column >= params.rank || adapter < 0 || adapter >= params.num_adapters) {
    return;
  }
  device const uint4* values = (device const uint4*)(x + row * params.k);
  device const uint4* weights =
      (device const uint4*)(a + (ulong(adapter) * params.rank + column) * params.k);
  float sum = 0.0f;
  for (int chunk = int(lane); chunk < params.k / CHUNK; chunk += 32) {
    float v[CHUNK];
    float w[CHUNK];
    unpack(values[chunk], v, T(0.0f));
    unpack(weights[chunk], w, T(0.0f));
    PAGED_UNROLL
    for (int e = 0; e < CHUNK; e++) {
      sum += v[e] * w[e];
    }
  }
  sum = simd_sum(sum);
  if (lane == 0) {
    hidden[row * params.rank + column] = sum;
  }
}

// Computes out = base + hidden @ b[adapter]; copies rows without an adapter.
// grid: (n / LORA_THREADS rounded up, rows).
template <typename T>
PAGED_KERNEL(paged::LORA_THREADS)
lora_up(
    device const T* base [[buffer(0)]], device const float* hidden [[buffer(1)]],
    device const int* adapters [[buffer(2)]], device const T* b [[buffer(3)]],
    device T* out [[buffer(4)]], constant paged::LoraParams& params [[buffer(5)]],
    PAGED_THREAD_POSITION) {
  int column = int(group_id.x * group_size.x + thread_id);
  ulong row = group_id.y;
  if (column >= params.n) {
    return;
  }
  ulong at = row * params.n + column;
  int adapter = adapters[row];
  if (adapter < 0 || adapter >= params.num_adapters) {
    out[at] = base[at];
    return;
  }
  device const T* weights = b + ulong(adapter) * params.rank * params.n + column;
  float sum = 0.0f;
  for (int r = 0; r < params.rank; r++) {
    sum += hidden[row * params.rank + r] * float(weights[ulong(r) * params.n]);
  }
  out[at] = T(float(base[at]) + sum);
}
