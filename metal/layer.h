// Copyright © 2026 the mlx_paged authors. Apache-2.0.
//
// Layer operations around attention, fused into few kernels: each reads its input once and writes
// what the next one needs. All compute in fp32 and round where separate operations would have
// rounded, so results are the same.

#pragma once

#include <metal_stdlib>

#include "kernel_table.h"
#include "language.h"
#include "vector_load.h"

using namespace metal;

// Computes sum = x + residual and out = sum / sqrt(mean(sum^2) + eps) * weight, row by row. The sum
// stays in registers; without a residual it is not written.
// grid: rows.
template <typename T, typename Result = paged::InPlace>
PAGED_KERNEL(paged::NORM_THREADS)
add_rms_norm(
    device const T* x [[buffer(0)]], device const T* residual [[buffer(1)]],
    device const T* weight [[buffer(2)]], device T* sum [[buffer(3)]], device T* out [[buffer(4)]],
    constant paged::NormParams& params [[buffer(5)]], threadgroup float* parts PAGED_SCRATCH,
    PAGED_THREAD_POSITION, PAGED_SIMD_POSITION) {
  using namespace paged;
  constexpr int CHUNK = chunk_size<T>();
  ulong first = ulong(group_id.x) * params.row_chunks;
  float values[NORM_CHUNKS][CHUNK];
  float squares = 0.0f;
  PAGED_UNROLL
  for (int i = 0; i < NORM_CHUNKS; i++) {
    int chunk = int(thread_id) + i * int(group_size.x);
    if (chunk < params.row_chunks) {
      unpack(((device const uint4*)x)[first + chunk], values[i], T(0.0f));
      if (params.has_residual) {
        float added[CHUNK];
        unpack(((device const uint4*)residual)[first + chunk], added, T(0.0f));
        PAGED_UNROLL
        for (int e = 0; e < CHUNK; e++) {
          values[i][e] = rounded<T>(values[i][e] + added[e]);
        }
        ((device uint4*)sum)[first + chunk] = pack(values[i], T(0.0f));
      }
      PAGED_UNROLL
      for (int e = 0; e < CHUNK; e++) {
        squares += values[i][e] * values[i][e];
      }
    }
  }
  squares = simd_sum(squares);
  if (lane == 0) {
    parts[simd_id] = squares;
  }
  threadgroup_barrier(mem_flags::mem_threadgroup);
  float total = 0.0f;
  for (int i = 0; i < int(group_size.x) / 32; i++) {
    total += parts[i];
  }
  float factor = 1.0f / sqrt(total / float(params.row_chunks * CHUNK) + params.eps);
  PAGED_UNROLL
  for (int i = 0; i < NORM_CHUNKS; i++) {
    int chunk = int(thread_id) + i * int(group_size.x);
    if (chunk < params.row_chunks) {
      float weights[CHUNK];
      unpack(((device const uint4*)weight)[chunk], weights, T(0.0f));
      PAGED_UNROLL
      for (int e = 0; e < CHUNK; e++) {
        values[i][e] *= factor * weights[e];
      }
      Result::write((device uint4*)out + first, chunk, pack(values[i], T(0.0f)));
    }
  }
}

// Computes cosines and sines of position * scale * inv_freq, [rows, 2, half_dims].
// grid: rows * half_dims / 256 rounded up.
template <typename T>
PAGED_KERNEL(paged::DATA_THREADS)
rope_rotations(
    device const int* positions [[buffer(0)]], device const T* inv_freqs [[buffer(1)]],
    device T* out [[buffer(2)]], constant paged::RotationParams& params [[buffer(3)]],
    PAGED_THREAD_POSITION) {
  int index = int(group_id.x * group_size.x + thread_id);
  if (index >= params.num_rows * params.half_dims) {
    return;
  }
  int row = index / params.half_dims;
  int pair = index % params.half_dims;
  float angle = float(positions[row]) * params.scale * inv_freqs[pair];
  out[2 * row * params.half_dims + pair] = precise::cos(angle);
  out[(2 * row + 1) * params.half_dims + pair] = precise::sin(angle);
}

namespace paged {

// A head being loaded, normalized if the layer has head norms.
template <typename T>
struct HeadOfRow {
  device const T* from;
  device const T* weight;
  bool has_norm;
  float factor;

  METAL_FUNC void norm(int dim, float eps, int lane) thread {
    if (has_norm) {
      float squares = 0.0f;
      for (int d = lane; d < dim; d += 32) {
        float value = float(from[d]);
        squares += value * value;
      }
      factor = 1.0f / sqrt(simd_sum(squares) / float(dim) + eps);
    }
  }

  METAL_FUNC float element(int d) const thread {
    float value = float(from[d]);
    return has_norm ? rounded<T>(value * (factor * float(weight[d]))) : value;
  }
};

}  // namespace paged

// Normalizes and rotates a row's queries and keys; writes queries to `out`, and keys and values to
// their pool slots. A SIMD-group handles one head: queries first, then keys, then values.
// grid: (rows, heads / ROPE_SIMD_GROUPS rounded up).
template <typename T>
PAGED_KERNEL(32 * paged::ROPE_SIMD_GROUPS)
rope_write(
    device const T* queries [[buffer(0)]], device const T* keys [[buffer(1)]],
    device const T* values [[buffer(2)]], device const float* rotations [[buffer(3)]],
    device const int* slot_mapping [[buffer(4)]], device const T* query_weight [[buffer(5)]],
    device const T* key_weight [[buffer(6)]], device T* out [[buffer(7)]],
    device T* key_pool [[buffer(8)]], device T* value_pool [[buffer(9)]],
    constant paged::RopeParams& params [[buffer(10)]],
    uint3 group_id [[threadgroup_position_in_grid]], PAGED_SIMD_POSITION) {
  using namespace paged;
  ulong row = group_id.x;
  int head = int(group_id.y) * ROPE_SIMD_GROUPS + int(simd_id);
  int key_head = head - params.num_q_heads;
  int value_head = key_head - params.num_kv_heads;
  if (value_head >= params.num_kv_heads) {
    return;
  }
  int slot = key_head < 0 ? 0 : slot_mapping[row];
  if (slot < 0) {
    return;
  }
  if (value_head >= 0) {
    device const T* from = values + row * params.value_stride + value_head * params.value_dim;
    device T* to = value_pool + (ulong(slot) * params.num_kv_heads + value_head) * params.value_dim;
    for (int d = int(lane); d < params.value_dim; d += 32) {
      to[d] = from[d];
    }
    return;
  }
  HeadOfRow<T> ours;
  device T* to;
  if (key_head < 0) {
    ours.from = queries + row * params.query_stride + head * params.key_dim;
    ours.weight = query_weight;
    ours.has_norm = params.has_query_norm;
    ours.norm(params.key_dim, params.query_eps, lane);
    to = out + (row * params.num_q_heads + head) * params.key_dim;
  } else {
    ours.from = keys + row * params.key_stride + key_head * params.key_dim;
    ours.weight = key_weight;
    ours.has_norm = params.has_key_norm;
    ours.norm(params.key_dim, params.key_eps, lane);
    to = key_pool + (ulong(slot) * params.num_kv_heads + key_head) * params.key_dim;
  }
  device const float* cosines = rotations + 2 * row * params.half_dims;
  device const float* sines = cosines + params.half_dims;
  for (int pair = int(lane); pair < params.half_dims; pair += 32) {
    int i = params.traditional ? 2 * pair : pair;
    int j = params.traditional ? 2 * pair + 1 : pair + params.half_dims;
    float a = ours.element(i);
    float b = ours.element(j);
    to[i] = T(a * cosines[pair] - b * sines[pair]);
    to[j] = T(a * sines[pair] + b * cosines[pair]);
  }
  for (int d = 2 * params.half_dims + int(lane); d < params.key_dim; d += 32) {
    to[d] = T(ours.element(d));
  }
}

// Computes silu(gate) * up. Both can be parts of wider rows.
// grid: (rows, chunks of a row / 256 rounded up).
template <typename T>
PAGED_KERNEL(paged::DATA_THREADS)
silu_mul(
    device const T* gate [[buffer(0)]], device const T* up [[buffer(1)]],
    device T* out [[buffer(2)]], constant paged::SiluParams& params [[buffer(3)]],
    PAGED_THREAD_POSITION) {
  using namespace paged;
  constexpr int CHUNK = chunk_size<T>();
  RowChunk at = row_chunk(group_id, group_size, thread_id);
  if (at.chunk >= params.row_chunks) {
    return;
  }
  float gates[CHUNK];
  float values[CHUNK];
  unpack(((device const uint4*)gate)[at.row * params.gate_stride + at.chunk], gates, T(0.0f));
  unpack(((device const uint4*)up)[at.row * params.up_stride + at.chunk], values, T(0.0f));
  PAGED_UNROLL
  for (int e = 0; e < CHUNK; e++) {
    values[e] *= gates[e] / (1.0f + precise::exp(-gates[e]));
  }
  ((device uint4*)out)[at.row * params.row_chunks + at.chunk] = pack(values, T(0.0f));
}

// Gathers rows of a table, such as token embeddings. Negative indices count from the end; rows out
// of range become NaN.
// grid: (rows, chunks of a row / 256 rounded up).
template <typename T>
PAGED_KERNEL(paged::DATA_THREADS)
gather_rows(
    device const T* table [[buffer(0)]], device const int* rows [[buffer(1)]],
    device T* out [[buffer(2)]], constant paged::RowParams& params [[buffer(3)]],
    PAGED_THREAD_POSITION) {
  paged::RowChunk at = paged::row_chunk(group_id, group_size, thread_id);
  if (at.chunk >= params.row_chunks) {
    return;
  }
  int from = rows[at.row];
  from += from < 0 ? params.num_rows : 0;
  uint4 values = uint4(0x7fc07fc0u);  // NaN in every dtype
  if (from >= 0 && from < params.num_rows) {
    values = ((device const uint4*)table)[ulong(from) * params.row_chunks + at.chunk];
  }
  ((device uint4*)out)[at.row * params.row_chunks + at.chunk] = values;
}
