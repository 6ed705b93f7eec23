// Copyright © 2026 the mlx_paged authors. Apache-2.0.
//
// Decode attention for few query heads per KV head, on the vector units. A threadgroup serves one
// work item and one KV head: every key and value is read once for all QUERIES (= query rows x heads
// per group) of the item.
//
// TOKEN_LANES lanes share a token, 16 bytes each, so a SIMD-group reads several tokens at once. It
// processes UNROLL such steps together to keep their loads in flight. Each set of TOKEN_LANES lanes
// keeps its own softmax; they are merged at the end.

#pragma once

#include <metal_stdlib>

#include "attention_output.h"
#include "attention_shape.h"
#include "block_table.h"
#include "kernel_table.h"
#include "language.h"
#include "pool_codes.h"
#include "query_tile.h"
#include "softmax_state.h"
#include "vector_load.h"

using namespace metal;

namespace paged {

// One lane's share of the queries and results.
template <typename T, int K_DIM, int V_DIM, int QUERIES, int LOADS>
struct DecodeLane {
  static constexpr constant int CHUNK = chunk_size<T>();
  static constexpr constant int TOKEN_LANES = decode_token_lanes(K_DIM, V_DIM, CHUNK);
  static constexpr constant int TOKENS = 32 / TOKEN_LANES;  // per SIMD-group at once
  static constexpr constant int K_CHUNKS = decode_lane_chunks(K_DIM, CHUNK, TOKEN_LANES);
  static constexpr constant int V_CHUNKS = decode_lane_chunks(V_DIM, CHUNK, TOKEN_LANES);
  static constexpr constant int UNROLL = decode_unroll(K_CHUNKS, LOADS);

  float query[QUERIES][K_CHUNKS * CHUNK];
  float value[QUERIES][V_CHUNKS * CHUNK];
  SoftmaxState state[QUERIES];
  AttentionRow rows[QUERIES];

  // Chunk c of lane `index` among TOKEN_LANES lies at element (c * TOKEN_LANES + index) * CHUNK.
  METAL_FUNC static int element(int c, int index) { return (c * TOKEN_LANES + index) * CHUNK; }

  METAL_FUNC void load_query(device const T* elements, int q, int index, AttentionRow row) thread {
    PAGED_UNROLL
    for (int c = 0; c < K_CHUNKS; c++) {
      uint4 chunk = uint4(0);
      if (element(c, index) < K_DIM) {
        chunk = *(device const uint4*)(elements + element(c, index));
      }
      unpack(chunk, query[q] + c * CHUNK, T(0));
    }
    PAGED_UNROLL
    for (int d = 0; d < V_CHUNKS * CHUNK; d++) {
      value[q][d] = 0.0f;
    }
    state[q].clear();
    rows[q] = row;
  }

  // Loads a lane's CHUNKS chunks of a token's codes. One lane loads the scale for all lanes that
  // share it. Returns the int8 scale; a missing token has zeros with zero scales.
  template <int DIM, int CHUNKS>
  METAL_FUNC static float load_quantized(
      device const uchar* pool, BlockTable table, int token, bool exists, int kv_head, int format,
      constant AttentionParams& params, uint lane, thread uint4* chunks) {
    constexpr int GROUP_LANES = CODE_GROUP / CHUNK;
    int index = lane % TOKEN_LANES;
    CodeOffsets offsets = {0, 0};
    if (exists) {
      offsets = code_offsets(table, token, params.num_kv_heads, kv_head, format, DIM);
    }
    PAGED_UNROLL
    for (int c = 0; c < CHUNKS; c++) {
      bool here = exists && element(c, index) < DIM;
      chunks[c] = uint4(0);
      if (here) {
        chunks[c] = load_codes<T>(pool, offsets, element(c, index), format);
      }
      if (format == FORMAT_INT4) {
        uint group = 0;
        if (here && index % GROUP_LANES == 0) {
          group = load_group(pool, offsets, element(c, index));
        }
        chunks[c].z = simd_shuffle(group, ushort(int(lane) - index % GROUP_LANES));
      }
    }
    float scale = 0.0f;
    if (format == FORMAT_INT8) {
      if (exists && index == 0) {
        scale = load_scale(pool, offsets);
      }
      scale = simd_shuffle(scale, ushort(int(lane) - index));
    }
    return scale;
  }

  // Adds UNROLL steps of TOKENS tokens from `first` on; tokens from `end` on are masked.
  METAL_FUNC void attend(
      device const T* key_pool, device const T* value_pool, BlockTable table, int first, int end,
      int kv_head, constant AttentionParams& params, uint lane) thread {
    int index = lane % TOKEN_LANES;
    uint4 k[UNROLL][K_CHUNKS];
    uint4 v[UNROLL][V_CHUNKS];
    float k_scale[UNROLL];  // of int8
    float v_scale[UNROLL];
    int tokens[UNROLL];
    PAGED_UNROLL
    for (int u = 0; u < UNROLL; u++) {
      int token = first + u * TOKENS + int(lane) / TOKEN_LANES;
      bool exists = token < end;
      tokens[u] = token;
      if (PAGED_QUANTIZED(params)) {
        k_scale[u] = load_quantized<K_DIM, K_CHUNKS>(
            (device const uchar*)key_pool, table, token, exists, kv_head, key_format(params),
            params, lane, k[u]);
        v_scale[u] = load_quantized<V_DIM, V_CHUNKS>(
            (device const uchar*)value_pool, table, token, exists, kv_head, value_format(params),
            params, lane, v[u]);
        continue;
      }
      ulong head = 0;
      if (exists) {
        head = table.slot(token) * params.num_kv_heads + kv_head;
      }
      PAGED_UNROLL
      for (int c = 0; c < K_CHUNKS; c++) {
        k[u][c] = uint4(0);
        if (exists && element(c, index) < K_DIM) {
          k[u][c] = *(device const uint4*)(key_pool + head * K_DIM + element(c, index));
        }
      }
      PAGED_UNROLL
      for (int c = 0; c < V_CHUNKS; c++) {
        v[u][c] = uint4(0);
        if (exists && element(c, index) < V_DIM) {
          v[u][c] = *(device const uint4*)(value_pool + head * V_DIM + element(c, index));
        }
      }
    }

    float weights[UNROLL][QUERIES];
    PAGED_UNROLL
    for (int u = 0; u < UNROLL; u++) {
      float dots[QUERIES] = {};
      PAGED_UNROLL
      for (int c = 0; c < K_CHUNKS; c++) {
        float key[CHUNK];
        if (PAGED_QUANTIZED(params)) {
          unpack_codes<T>(k[u][c], key, key_format(params));
        } else {
          unpack(k[u][c], key, T(0));
        }
        PAGED_UNROLL
        for (int q = 0; q < QUERIES; q++) {
          PAGED_UNROLL
          for (int d = 0; d < CHUNK; d++) {
            dots[q] = fma(query[q][c * CHUNK + d], key[d], dots[q]);
          }
        }
      }
      PAGED_UNROLL
      for (int q = 0; q < QUERIES; q++) {
        PAGED_UNROLL
        for (ushort offset = TOKEN_LANES / 2; offset > 0; offset /= 2) {
          dots[q] += simd_shuffle_xor(dots[q], offset);
        }
        if (key_format(params) == FORMAT_INT8) {
          dots[q] *= k_scale[u];
        }
        bool seen = visible(rows[q], tokens[u], params.options) && tokens[u] < end;
        weights[u][q] = seen ? logit(dots[q], tokens[u], rows[q], params.options) : -INFINITY;
      }
    }

    PAGED_UNROLL
    for (int q = 0; q < QUERIES; q++) {
      float maximum = state[q].maximum;
      PAGED_UNROLL
      for (int u = 0; u < UNROLL; u++) {
        maximum = max(maximum, weights[u][q]);
      }
      float factor = rescale(state[q].maximum, maximum);
      state[q].maximum = maximum;
      state[q].sum *= factor;
      PAGED_UNROLL
      for (int d = 0; d < V_CHUNKS * CHUNK; d++) {
        value[q][d] *= factor;
      }
      PAGED_UNROLL
      for (int u = 0; u < UNROLL; u++) {
        weights[u][q] = weight(weights[u][q], maximum);
        state[q].sum += weights[u][q];
        if (value_format(params) == FORMAT_INT8) {
          weights[u][q] *= v_scale[u];
        }
      }
    }

    PAGED_UNROLL
    for (int u = 0; u < UNROLL; u++) {
      PAGED_UNROLL
      for (int c = 0; c < V_CHUNKS; c++) {
        float values[CHUNK];
        if (PAGED_QUANTIZED(params)) {
          unpack_codes<T>(v[u][c], values, value_format(params));
        } else {
          unpack(v[u][c], values, T(0));
        }
        PAGED_UNROLL
        for (int q = 0; q < QUERIES; q++) {
          PAGED_UNROLL
          for (int d = 0; d < CHUNK; d++) {
            value[q][c * CHUNK + d] = fma(weights[u][q], values[d], value[q][c * CHUNK + d]);
          }
        }
      }
    }
  }

  // Merges query q's softmaxes of all lanes that hold the same elements.
  METAL_FUNC void join_lanes(int q) thread {
    PAGED_UNROLL
    for (ushort offset = TOKEN_LANES; offset < 32; offset *= 2) {
      float other = simd_shuffle_xor(state[q].maximum, offset);
      float maximum = max(state[q].maximum, other);
      float factor = rescale(state[q].maximum, maximum);
      float other_factor = rescale(other, maximum);
      float other_sum = simd_shuffle_xor(state[q].sum, offset);
      state[q].sum = state[q].sum * factor + other_sum * other_factor;
      state[q].maximum = maximum;
      PAGED_UNROLL
      for (int d = 0; d < V_CHUNKS * CHUNK; d++) {
        float other_value = simd_shuffle_xor(value[q][d], offset);
        value[q][d] = value[q][d] * factor + other_value * other_factor;
      }
    }
  }
};

}  // namespace paged

// grid: (work items, KV heads), DECODE_SIMD_GROUPS SIMD-groups each.
template <typename T, int K_DIM, int V_DIM, int QUERIES, int LOADS = paged::decode_loads(QUERIES)>
PAGED_KERNEL(32 * paged::DECODE_SIMD_GROUPS)
paged_decode(
    PAGED_ATTENTION_BUFFERS(T), threadgroup float* scratch PAGED_SCRATCH,
    uint3 group_id [[threadgroup_position_in_grid]], uint thread_id [[thread_index_in_threadgroup]],
    PAGED_SIMD_POSITION) {
  using namespace paged;
  typedef DecodeLane<T, K_DIM, V_DIM, QUERIES, LOADS> Lane;
  constexpr int STEP = Lane::TOKENS * Lane::UNROLL;
  constexpr int NUM_THREADS = 32 * DECODE_SIMD_GROUPS;

  QueryTile ours = query_tile(work_items[group_id.x], block_tables, params, group_id.y, 0, QUERIES);
  if (ours.num_queries <= 0) {
    return;
  }
  KeyRange seen = ours.keys(positions, params);

  Lane state;
  PAGED_UNROLL
  for (int q = 0; q < QUERIES; q++) {
    state.load_query(
        queries + ours.query(q) * K_DIM, q, lane % Lane::TOKEN_LANES,
        ours.attention_row(q, positions, per_head, params));
  }
  for (int token = seen.begin + int(simd_id) * STEP; token < seen.end;
       token += DECODE_SIMD_GROUPS * STEP) {
    state.attend(key_pool, value_pool, ours.table, token, seen.end, ours.kv_head, params, lane);
  }

  // Merges the SIMD-groups through threadgroup memory, one query at a time to keep it small.
  threadgroup float* values = scratch;                              // [SIMD-group][V_DIM]
  threadgroup float* maxima = values + DECODE_SIMD_GROUPS * V_DIM;  // [SIMD-group]
  threadgroup float* sums = maxima + DECODE_SIMD_GROUPS;            // [SIMD-group]
  Partials partials = partials_at(workspace, params.num_partials, params.num_q_heads, V_DIM);
  PAGED_UNROLL
  for (int q = 0; q < QUERIES; q++) {
    state.join_lanes(q);
    if (q > 0) {
      threadgroup_barrier(mem_flags::mem_threadgroup);  // the previous query has been read
    }
    if (int(lane) < Lane::TOKEN_LANES) {
      PAGED_UNROLL
      for (int c = 0; c < Lane::V_CHUNKS; c++) {
        PAGED_UNROLL
        for (int d = 0; d < Lane::CHUNK; d++) {
          int element = Lane::element(c, lane) + d;
          if (element < V_DIM) {
            values[simd_id * V_DIM + element] = state.value[q][c * Lane::CHUNK + d];
          }
        }
      }
    }
    if (lane == 0) {
      maxima[simd_id] = state.state[q].maximum;
      sums[simd_id] = state.state[q].sum;
    }
    threadgroup_barrier(mem_flags::mem_threadgroup);

    SoftmaxState joined;
    joined.clear();
    PAGED_UNROLL
    for (int s = 0; s < DECODE_SIMD_GROUPS; s++) {
      joined.maximum = max(joined.maximum, maxima[s]);
    }
    float factors[DECODE_SIMD_GROUPS];
    PAGED_UNROLL
    for (int s = 0; s < DECODE_SIMD_GROUPS; s++) {
      factors[s] = rescale(maxima[s], joined.maximum);
      joined.sum += sums[s] * factors[s];
    }
    ulong result = ours.result(q);
    float normalizer = 1.0f;
    if (ours.whole()) {
      normalizer = joined.normalizer(per_head, ours.head(q), params.options);
    } else if (thread_id == 0) {
      partials.maxima[result] = joined.maximum;
      partials.sums[result] = joined.sum;
    }
    for (int d = thread_id; d < V_DIM; d += NUM_THREADS) {
      float sum = 0.0f;
      PAGED_UNROLL
      for (int s = 0; s < DECODE_SIMD_GROUPS; s++) {
        sum = fma(values[s * V_DIM + d], factors[s], sum);
      }
      if (ours.whole()) {
        out[result * V_DIM + d] = T(sum * normalizer);
      } else {
        partials.values[result * V_DIM + d] = sum;
      }
    }
  }
}
