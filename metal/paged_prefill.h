// Copyright © 2026 the mlx_paged authors. Apache-2.0.
//
// Attention of a prefill chunk over the pool, tiled like FlashAttention-2 (Dao 2023). Rows of the
// score matrix are query rows x heads per group, so that a key serves the whole group. Each
// SIMD-group keeps the queries, scores and results of its own rows in registers. Keys and values
// pass through threadgroup memory, which all SIMD-groups share.

#pragma once

#include <metal_simdgroup_matrix>
#include <metal_stdlib>

#include "attention_output.h"
#include "attention_shape.h"
#include "block_table.h"
#include "kernel_table.h"
#include "language.h"
#include "matrix_tile.h"
#include "prefill_tiles.h"
#include "query_tile.h"
#include "softmax_state.h"

using namespace metal;

namespace paged {

// Reduces over the four lanes that share a row of an 8 x 8 matrix.
METAL_FUNC float row_max(float value) {
  value = max(value, simd_shuffle_xor(value, ushort(1)));
  return max(value, simd_shuffle_xor(value, ushort(8)));
}

METAL_FUNC float row_sum(float value) {
  value += simd_shuffle_xor(value, ushort(1));
  return value + simd_shuffle_xor(value, ushort(8));
}

// Computes one row's softmax over a tile of scores; this lane holds two in every matrix. Stores the
// weights in `share` and returns the factor for the row's earlier results.
template <typename T, int COLUMNS>
METAL_FUNC float softmax_row(
    thread simdgroup_matrix<float, 8, 8>* dot, thread simdgroup_matrix<T, 8, 8>* share,
    thread SoftmaxState& state, AttentionRow row, threadgroup const T* scales, int pitch, int first,
    int end, constant AttentionParams& params, uint lane) {
  float values[COLUMNS][2];
  float maximum = state.maximum;
  PAGED_UNROLL
  for (int n = 0; n < COLUMNS; n++) {
    PAGED_UNROLL
    for (int e = 0; e < 2; e++) {
      int token = first + 8 * n + matrix_column(lane) + e;
      bool seen = token < end && visible(row, token, params.options);
      threadgroup const float* own =
          (threadgroup const float*)(scales + (8 * n + matrix_column(lane) + e) * pitch);
      float product = scaled_dot(dot[n].thread_elements()[e], own, params);
      float value = logit(product, token, row, params.options);
      values[n][e] = seen ? value : -INFINITY;
      maximum = max(maximum, values[n][e]);
    }
  }
  maximum = row_max(maximum);
  float factor = rescale(state.maximum, maximum);
  float sum = 0.0f;
  PAGED_UNROLL
  for (int n = 0; n < COLUMNS; n++) {
    PAGED_UNROLL
    for (int e = 0; e < 2; e++) {
      float value = weight(values[n][e], maximum);
      sum += value;
      threadgroup const float* own =
          (threadgroup const float*)(scales + (8 * n + matrix_column(lane) + e) * pitch);
      share[n].thread_elements()[e] = T(scaled_weight(value, own, params));
    }
  }
  state.maximum = maximum;
  state.sum = state.sum * factor + sum;  // this lane's columns only, until the end
  return factor;
}

}  // namespace paged

// grid: (work items, KV heads, tiles of ROWS queries).
template <
    typename T, int K_DIM, int V_DIM, int ROWS,
    int TOKENS = paged::prefill_tokens(K_DIM, V_DIM, sizeof(T), ROWS)>
PAGED_KERNEL(32 * paged::PREFILL_SIMD_GROUPS)
paged_prefill(
    PAGED_ATTENTION_BUFFERS(T), threadgroup uchar* scratch PAGED_SCRATCH,
    uint3 group_id [[threadgroup_position_in_grid]], uint thread_id [[thread_index_in_threadgroup]],
    PAGED_SIMD_POSITION) {
  using namespace paged;
  constexpr int THREADS = 32 * PREFILL_SIMD_GROUPS;
  constexpr int BANDS = ROWS / 8 / PREFILL_SIMD_GROUPS;  // of 8 rows, per SIMD-group
  constexpr int K_PITCH = prefill_pitch(K_DIM, sizeof(T));
  constexpr int V_PITCH = prefill_pitch(V_DIM, sizeof(T));

  QueryTile ours = query_tile(
      work_items[group_id.x], block_tables, params, group_id.y, int(group_id.z) * ROWS, ROWS);
  if (ours.num_queries <= 0) {
    return;
  }
  KeyRange seen = ours.keys(positions, params);
  threadgroup T* key_tile = (threadgroup T*)scratch;
  threadgroup T* value_tile = key_tile + TOKENS * K_PITCH;
  threadgroup T* scales = key_tile + K_DIM;

  // Loads queries through the tile of keys, eight rows at a time; rows past the last are zeros.
  constexpr int CHUNK = chunk_size<T>();
  constexpr int ROW_CHUNKS = K_DIM / CHUNK;
  simdgroup_matrix<T, 8, 8> query[BANDS][K_DIM / 8];
  PAGED_UNROLL
  for (int band = 0; band < BANDS; band++) {
    for (int s = 0; s < PREFILL_SIMD_GROUPS; s++) {
      for (int chunk = thread_id; chunk < 8 * ROW_CHUNKS; chunk += THREADS) {
        int q = (s * BANDS + band) * 8 + chunk / ROW_CHUNKS;
        int element = chunk % ROW_CHUNKS * CHUNK;
        uint4 values = uint4(0);
        if (q < ours.num_queries) {
          values = *(device const uint4*)(queries + ours.query(q) * K_DIM + element);
        }
        *(threadgroup uint4*)(key_tile + chunk / ROW_CHUNKS * K_PITCH + element) = values;
      }
      threadgroup_barrier(mem_flags::mem_threadgroup);
      if (int(simd_id) == s) {
        PAGED_UNROLL
        for (int c = 0; c < K_DIM / 8; c++) {
          simdgroup_load(query[band][c], key_tile + 8 * c, K_PITCH);
        }
      }
      threadgroup_barrier(mem_flags::mem_threadgroup);
    }
  }

  // This lane's row of each band.
  SoftmaxState state[BANDS];
  AttentionRow rows[BANDS];
  int query_of_lane[BANDS];
  simdgroup_matrix<float, 8, 8> result[BANDS][V_DIM / 8];
  PAGED_UNROLL
  for (int band = 0; band < BANDS; band++) {
    int q = (int(simd_id) * BANDS + band) * 8 + matrix_row(lane);
    query_of_lane[band] = q;
    state[band].clear();
    rows[band] =
        q < ours.num_queries ? ours.attention_row(q, positions, per_head, params) : no_row();
    PAGED_UNROLL
    for (int c = 0; c < V_DIM / 8; c++) {
      result[band][c] = make_filled_simdgroup_matrix<float, 8, 8>(0.0f);
    }
  }

  for (int first = seen.begin; first < seen.end; first += TOKENS) {
    load_tiles<T, TOKENS, K_DIM, V_DIM, THREADS>(
        key_tile, value_tile, key_pool, value_pool, ours, first, seen.end, params, thread_id);

    simdgroup_matrix<float, 8, 8> dot[BANDS][TOKENS / 8];
    PAGED_UNROLL
    for (int n = 0; n < TOKENS / 8; n++) {
      PAGED_UNROLL
      for (int band = 0; band < BANDS; band++) {
        dot[band][n] = make_filled_simdgroup_matrix<float, 8, 8>(0.0f);
      }
      PAGED_UNROLL
      for (int c = 0; c < K_DIM / 8; c++) {
        simdgroup_matrix<T, 8, 8> key;  // transposed: dims x tokens
        simdgroup_load(key, key_tile + 8 * n * K_PITCH + 8 * c, K_PITCH, ulong2(0), true);
        PAGED_UNROLL
        for (int band = 0; band < BANDS; band++) {
          simdgroup_multiply_accumulate(dot[band][n], query[band][c], key, dot[band][n]);
        }
      }
    }

    simdgroup_matrix<T, 8, 8> share[BANDS][TOKENS / 8];
    PAGED_UNROLL
    for (int band = 0; band < BANDS; band++) {
      float factor = softmax_row<T, TOKENS / 8>(
          dot[band], share[band], state[band], rows[band], scales, K_PITCH, first, seen.end, params,
          lane);
      PAGED_UNROLL
      for (int c = 0; c < V_DIM / 8; c++) {
        result[band][c].thread_elements()[0] *= factor;
        result[band][c].thread_elements()[1] *= factor;
      }
    }
    PAGED_UNROLL
    for (int n = 0; n < TOKENS / 8; n++) {
      PAGED_UNROLL
      for (int c = 0; c < V_DIM / 8; c++) {
        simdgroup_matrix<T, 8, 8> value;
        simdgroup_load(value, value_tile + 8 * n * V_PITCH + 8 * c, V_PITCH);
        PAGED_UNROLL
        for (int band = 0; band < BANDS; band++) {
          simdgroup_multiply_accumulate(result[band][c], share[band][n], value, result[band][c]);
        }
      }
    }
  }

  Partials partials = partials_at(workspace, params.num_partials, params.num_q_heads, V_DIM);
  PAGED_UNROLL
  for (int band = 0; band < BANDS; band++) {
    state[band].sum = row_sum(state[band].sum);
    int q = query_of_lane[band];
    if (q < ours.num_queries) {
      ulong at = ours.result(q);
      float factor = 1.0f;
      if (ours.whole()) {
        factor = state[band].normalizer(per_head, ours.head(q), params.options);
      } else if (matrix_column(lane) == 0) {
        partials.maxima[at] = state[band].maximum;
        partials.sums[at] = state[band].sum;
      }
      PAGED_UNROLL
      for (int c = 0; c < V_DIM / 8; c++) {
        ulong element = at * V_DIM + 8 * c + matrix_column(lane);
        float first = result[band][c].thread_elements()[0] * factor;
        float second = result[band][c].thread_elements()[1] * factor;
        if (ours.whole()) {
          out[element] = T(first);
          out[element + 1] = T(second);
        } else {
          partials.values[element] = first;
          partials.values[element + 1] = second;
        }
      }
    }
  }
}
