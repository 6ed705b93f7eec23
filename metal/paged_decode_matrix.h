// Copyright © 2026 the mlx_paged authors. Apache-2.0.
//
// Decode attention for many query heads per KV head, or several query rows, on the matrix units.
// The queries of an item (its rows x heads per group) are the rows of a matrix.
//
// The SIMD-groups divide the head dims, not the tokens: each has the slice [begin, end) of every
// query, key, value and result. So each key passes once from device memory through one SIMD-group's
// part of threadgroup memory to its matrix units, and results need no exchange at the end. The
// SIMD-groups exchange only the partial dot products of a tile of tokens, and its weights.

#pragma once

#include <metal_simdgroup_matrix>
#include <metal_stdlib>

#include "attention_output.h"
#include "attention_shape.h"
#include "block_table.h"
#include "kernel_table.h"
#include "language.h"
#include "matrix_tile.h"
#include "query_tile.h"
#include "softmax_state.h"

using namespace metal;

namespace paged {

// Softmax of a tile of ROWS x TOKENS logits. TOKENS lanes share a row, and a row keeps its lanes
// from tile to tile.
template <int ROWS, int TOKENS, int SIMD_GROUPS>
struct TileSoftmax {
  static constexpr constant int ROWS_AT_ONCE = SIMD_GROUPS * 32 / TOKENS;
  static constexpr constant int STEPS = ceil_div(ROWS, ROWS_AT_ONCE);

  SoftmaxState state[STEPS];
  AttentionRow rows[STEPS];

  METAL_FUNC static int row_of(int step, uint simd_id, uint lane) {
    return step * ROWS_AT_ONCE + int(simd_id) * (32 / TOKENS) + int(lane) / TOKENS;
  }

  // Turns each SIMD-group's partial dot products into weights and stores the factor for each row's
  // earlier results.
  template <typename T>
  METAL_FUNC void step(
      threadgroup const float* dots, threadgroup T* weights, threadgroup float* factors, int first,
      int end, threadgroup const T* scales, int pitch, constant AttentionParams& params,
      uint simd_id, uint lane) thread {
    int column = lane % TOKENS;
    int token = first + column;
    threadgroup const float* own = (threadgroup const float*)(scales + column * pitch);
    PAGED_UNROLL
    for (int i = 0; i < STEPS; i++) {
      int row = row_of(i, simd_id, lane);
      float value = -INFINITY;
      if (row < ROWS && token < end && visible(rows[i], token, params.options)) {
        float dot = 0.0f;
        for (int s = 0; s < SIMD_GROUPS; s++) {
          dot += dots[(s * ROWS + row) * TOKENS + column];
        }
        value = logit(scaled_dot(dot, own, params), token, rows[i], params.options);
      }
      float maximum = max(state[i].maximum, value);
      for (ushort offset = TOKENS / 2; offset > 0; offset /= 2) {
        maximum = max(maximum, simd_shuffle_xor(maximum, offset));
      }
      float share = weight(value, maximum);
      float factor = rescale(state[i].maximum, maximum);
      state[i].maximum = maximum;
      state[i].sum = state[i].sum * factor + share;  // this lane's tokens only, until join()
      if (row < ROWS) {
        weights[row * TOKENS + column] = T(scaled_weight(share, own, params));
        if (column == 0) {
          factors[row] = factor;
        }
      }
    }
  }

  METAL_FUNC void join() thread {
    PAGED_UNROLL
    for (int i = 0; i < STEPS; i++) {
      for (ushort offset = TOKENS / 2; offset > 0; offset /= 2) {
        state[i].sum += simd_shuffle_xor(state[i].sum, offset);
      }
    }
  }
};

}  // namespace paged

// grid: (work items, KV heads, tiles of ROWS queries).
template <
    typename T, int K_DIM, int V_DIM, int ROWS, int SIMD_GROUPS = paged::matrix_simd_groups(K_DIM)>
PAGED_KERNEL(32 * SIMD_GROUPS)
paged_decode_matrix(
    PAGED_ATTENTION_BUFFERS(T), threadgroup uchar* scratch PAGED_SCRATCH,
    uint3 group_id [[threadgroup_position_in_grid]], PAGED_SIMD_POSITION) {
  using namespace paged;
  constexpr int TOKENS = matrix_tokens(K_DIM, V_DIM, sizeof(T), ROWS, SIMD_GROUPS);
  constexpr int PITCH = matrix_pitch(K_DIM, V_DIM, sizeof(T), SIMD_GROUPS);
  constexpr int K_COLUMNS = matrix_slice(K_DIM, SIMD_GROUPS);  // 8 wide
  constexpr int V_COLUMNS = matrix_slice(V_DIM, SIMD_GROUPS);
  constexpr int BANDS = ROWS / 8;  // of 8 rows
  constexpr MatrixScratch AT = matrix_scratch(K_DIM, V_DIM, sizeof(T), ROWS, SIMD_GROUPS);
  typedef TileSoftmax<ROWS, TOKENS, SIMD_GROUPS> Softmax;

  QueryTile ours = query_tile(
      work_items[group_id.x], block_tables, params, group_id.y, int(group_id.z) * ROWS, ROWS);
  if (ours.num_queries <= 0) {
    return;
  }
  KeyRange seen = ours.keys(positions, params);

  threadgroup T* tile = (threadgroup T*)scratch + int(simd_id) * TOKENS * PITCH;
  threadgroup T* scales = (threadgroup T*)scratch + PITCH - 16 / int(sizeof(T));
  threadgroup float* dots = (threadgroup float*)(scratch + AT.scores);
  threadgroup T* weights = (threadgroup T*)(scratch + AT.weights);
  threadgroup float* factors = (threadgroup float*)(scratch + AT.factors);
  Slice k_slice = slice_of(K_DIM, 8 * K_COLUMNS, simd_id);
  Slice v_slice = slice_of(V_DIM, 8 * V_COLUMNS, simd_id);

  // Loads queries through the tile, eight at a time; rows past the last are zeros.
  simdgroup_matrix<T, 8, 8> query[BANDS][K_COLUMNS];
  constexpr int CHUNK = chunk_size<T>();
  constexpr int ROW_CHUNKS = 8 * K_COLUMNS / CHUNK;
  PAGED_UNROLL
  for (int band = 0; band < BANDS; band++) {
    for (int chunk = lane; chunk < 8 * ROW_CHUNKS; chunk += 32) {
      int q = band * 8 + chunk / ROW_CHUNKS;
      int element = k_slice.begin + chunk % ROW_CHUNKS * CHUNK;
      uint4 values = uint4(0);
      if (q < ours.num_queries && element < k_slice.end) {
        values = *(device const uint4*)(queries + ours.query(q) * K_DIM + element);
      }
      threadgroup T* to = tile + chunk / ROW_CHUNKS * PITCH + chunk % ROW_CHUNKS * CHUNK;
      *(threadgroup uint4*)to = values;
    }
    simdgroup_barrier(mem_flags::mem_threadgroup);
    PAGED_UNROLL
    for (int c = 0; c < K_COLUMNS; c++) {
      simdgroup_load(query[band][c], tile + 8 * c, PITCH);
    }
    simdgroup_barrier(mem_flags::mem_threadgroup);
  }

  Softmax softmax;
  PAGED_UNROLL
  for (int i = 0; i < Softmax::STEPS; i++) {
    int q = Softmax::row_of(i, simd_id, lane);
    softmax.state[i].clear();
    softmax.rows[i] =
        q < ours.num_queries ? ours.attention_row(q, positions, per_head, params) : no_row();
  }
  simdgroup_matrix<float, 8, 8> result[BANDS][V_COLUMNS];
  PAGED_UNROLL
  for (int band = 0; band < BANDS; band++) {
    PAGED_UNROLL
    for (int c = 0; c < V_COLUMNS; c++) {
      result[band][c] = make_filled_simdgroup_matrix<float, 8, 8>(0.0f);
    }
  }

  for (int first = seen.begin; first < seen.end; first += TOKENS) {
    TileLoader<T, TOKENS, 8 * K_COLUMNS, 32> keys;
    TileLoader<T, TOKENS, 8 * V_COLUMNS, 32> values;
    if (PAGED_QUANTIZED(params)) {
      keys.load_quantized(
          (device const uchar*)key_pool, key_format(params), K_DIM, params.num_kv_heads,
          ours.kv_head, ours.table, first, seen.end, k_slice, lane);
      values.load_quantized(
          (device const uchar*)value_pool, value_format(params), V_DIM, params.num_kv_heads,
          ours.kv_head, ours.table, first, seen.end, v_slice, lane);
    } else {
      keys.load(
          key_pool, K_DIM, params.num_kv_heads, ours.kv_head, ours.table, first, seen.end, k_slice,
          lane);
      values.load(
          value_pool, V_DIM, params.num_kv_heads, ours.kv_head, ours.table, first, seen.end,
          v_slice, lane);
    }
    keys.store(tile, PITCH, key_format(params), lane);
    if (has_scales(params) && simd_id == 0 && int(lane) < TOKENS) {
      load_scales(
          (threadgroup float*)(scales + int(lane) * PITCH), (device const uchar*)key_pool,
          (device const uchar*)value_pool, K_DIM, V_DIM, ours.table, first + int(lane), seen.end,
          ours.kv_head, params);
    }
    simdgroup_barrier(mem_flags::mem_threadgroup);

    PAGED_UNROLL
    for (int n = 0; n < TOKENS / 8; n++) {
      simdgroup_matrix<float, 8, 8> dot[BANDS];
      PAGED_UNROLL
      for (int band = 0; band < BANDS; band++) {
        dot[band] = make_filled_simdgroup_matrix<float, 8, 8>(0.0f);
      }
      PAGED_UNROLL
      for (int c = 0; c < K_COLUMNS; c++) {
        simdgroup_matrix<T, 8, 8> key;  // transposed: dims x tokens
        simdgroup_load(key, tile + 8 * n * PITCH + 8 * c, PITCH, ulong2(0), true);
        PAGED_UNROLL
        for (int band = 0; band < BANDS; band++) {
          simdgroup_multiply_accumulate(dot[band], query[band][c], key, dot[band]);
        }
      }
      PAGED_UNROLL
      for (int band = 0; band < BANDS; band++) {
        simdgroup_store(
            dot[band], dots + (int(simd_id) * ROWS + 8 * band) * TOKENS + 8 * n, TOKENS);
      }
    }
    simdgroup_barrier(mem_flags::mem_threadgroup);  // The keys have been read.
    values.store(tile, PITCH, value_format(params), lane);
    threadgroup_barrier(mem_flags::mem_threadgroup);

    softmax.step(dots, weights, factors, first, seen.end, scales, PITCH, params, simd_id, lane);
    threadgroup_barrier(mem_flags::mem_threadgroup);

    PAGED_UNROLL
    for (int band = 0; band < BANDS; band++) {
      float factor = factors[8 * band + matrix_row(lane)];
      PAGED_UNROLL
      for (int c = 0; c < V_COLUMNS; c++) {
        result[band][c].thread_elements()[0] *= factor;
        result[band][c].thread_elements()[1] *= factor;
      }
    }
    PAGED_UNROLL
    for (int n = 0; n < TOKENS / 8; n++) {
      simdgroup_matrix<T, 8, 8> share[BANDS];
      PAGED_UNROLL
      for (int band = 0; band < BANDS; band++) {
        simdgroup_load(share[band], weights + 8 * band * TOKENS + 8 * n, TOKENS);
      }
      PAGED_UNROLL
      for (int c = 0; c < V_COLUMNS; c++) {
        simdgroup_matrix<T, 8, 8> value;
        simdgroup_load(value, tile + 8 * n * PITCH + 8 * c, PITCH);
        PAGED_UNROLL
        for (int band = 0; band < BANDS; band++) {
          simdgroup_multiply_accumulate(result[band][c], share[band], value, result[band][c]);
        }
      }
    }
    simdgroup_barrier(mem_flags::mem_threadgroup);  // The values have been read.
  }

  softmax.join();
  threadgroup_barrier(mem_flags::mem_threadgroup);  // The factors of the last tile have been read.
  Partials partials = partials_at(workspace, params.num_partials, params.num_q_heads, V_DIM);
  PAGED_UNROLL
  for (int i = 0; i < Softmax::STEPS; i++) {
    int q = Softmax::row_of(i, simd_id, lane);
    if (q < ours.num_queries && lane % TOKENS == 0) {
      if (ours.whole()) {
        factors[q] = softmax.state[i].normalizer(per_head, ours.head(q), params.options);
      } else {
        partials.maxima[ours.result(q)] = softmax.state[i].maximum;
        partials.sums[ours.result(q)] = softmax.state[i].sum;
        factors[q] = 1.0f;
      }
    }
  }
  threadgroup_barrier(mem_flags::mem_threadgroup);

  PAGED_UNROLL
  for (int band = 0; band < BANDS; band++) {
    int q = 8 * band + matrix_row(lane);
    if (q < ours.num_queries) {
      float factor = factors[q];
      ulong at = ours.result(q) * V_DIM;
      PAGED_UNROLL
      for (int c = 0; c < V_COLUMNS; c++) {
        int element = v_slice.begin + 8 * c + matrix_column(lane);
        if (element < v_slice.end) {
          float first = result[band][c].thread_elements()[0] * factor;
          float second = result[band][c].thread_elements()[1] * factor;
          if (ours.whole()) {
            out[at + element] = T(first);
            out[at + element + 1] = T(second);
          } else {
            partials.values[at + element] = first;
            partials.values[at + element + 1] = second;
          }
        }
      }
    }
  }
}
