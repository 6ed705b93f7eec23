// Copyright © 2026 the mlx_paged authors. Apache-2.0.
//
// paged_prefill for tensor units: the same tiling, masks and softmax. A SIMD-group multiplies 16
// rows at a time. Its queries and results stay in registers; scores and weights pass through
// threadgroup memory, so that each lane knows which of them it has.

#pragma once

#include "attention_output.h"
#include "attention_shape.h"
#include "block_table.h"
#include "kernel_table.h"
#include "language.h"
#include "matrix_tile.h"
#include "prefill_tiles.h"
#include "query_tile.h"
#include "softmax_state.h"
#include "tensor_units.h"

using namespace metal;

namespace paged {

// Computes one row's softmax over a tile of scores; two lanes share a row. Stores the weights and
// returns the factor for the row's earlier results.
template <typename T>
METAL_FUNC float softmax_half_row(
    threadgroup const float* scores, threadgroup T* weights, thread SoftmaxState& state,
    AttentionRow row, threadgroup const T* scales, int pitch, int first, int end,
    constant AttentionParams& params, uint lane) {
  float values[MATMUL_TOKENS / 2];
  float maximum = state.maximum;
  PAGED_UNROLL
  for (int n = 0; n < MATMUL_TOKENS / 2; n++) {
    int column = 2 * n + int(lane % 2);
    int token = first + column;
    bool seen = token < end && visible(row, token, params.options);
    threadgroup const float* own = (threadgroup const float*)(scales + column * pitch);
    float product = scaled_dot(scores[column], own, params);
    float value = logit(product, token, row, params.options);
    values[n] = seen ? value : -INFINITY;
    maximum = max(maximum, values[n]);
  }
  maximum = max(maximum, simd_shuffle_xor(maximum, ushort(1)));
  float factor = rescale(state.maximum, maximum);
  float sum = 0.0f;
  PAGED_UNROLL
  for (int n = 0; n < MATMUL_TOKENS / 2; n++) {
    int column = 2 * n + int(lane % 2);
    float value = weight(values[n], maximum);
    sum += value;
    threadgroup const float* own = (threadgroup const float*)(scales + column * pitch);
    weights[column] = T(scaled_weight(value, own, params));
  }
  state.maximum = maximum;
  state.sum = state.sum * factor + sum;  // this lane's columns only, until the end
  return factor;
}

}  // namespace paged

// grid: (work items, KV heads, tiles of ROWS queries).
template <typename T, int K_DIM, int V_DIM, int ROWS>
PAGED_KERNEL(32 * ROWS / paged::MATMUL_ROWS)
tensor_prefill(
    PAGED_ATTENTION_BUFFERS(T), threadgroup uchar* scratch PAGED_SCRATCH,
    uint3 group_id [[threadgroup_position_in_grid]], uint thread_id [[thread_index_in_threadgroup]],
    PAGED_SIMD_POSITION) {
  using namespace paged;
  using mpp::tensor_ops::matmul2d;
  using mpp::tensor_ops::matmul2d_descriptor;
  constexpr int SIMD_GROUPS = ROWS / MATMUL_ROWS;
  constexpr int THREADS = 32 * SIMD_GROUPS;
  constexpr int TOKENS = MATMUL_TOKENS;
  constexpr int K_PITCH = prefill_pitch(K_DIM, sizeof(T));
  constexpr int V_PITCH = prefill_pitch(V_DIM, sizeof(T));
  constexpr MatmulScratch PARTS = matmul_scratch(K_DIM, V_DIM, sizeof(T), ROWS);

  QueryTile ours = query_tile(
      work_items[group_id.x], block_tables, params, group_id.y, int(group_id.z) * ROWS, ROWS);
  if (ours.num_queries <= 0) {
    return;
  }
  KeyRange seen = ours.keys(positions, params);
  int first_query = int(simd_id) * MATMUL_ROWS;
  threadgroup T* key_tile = (threadgroup T*)scratch;
  threadgroup T* value_tile = (threadgroup T*)(scratch + PARTS.values);
  threadgroup float* scores = (threadgroup float*)(scratch + PARTS.scores) + first_query * TOKENS;
  threadgroup T* weights = (threadgroup T*)(scratch + PARTS.weights) + first_query * TOKENS;
  threadgroup float* factors = (threadgroup float*)(scratch + PARTS.factors) + first_query;
  threadgroup T* scales = key_tile + K_DIM;

  constexpr auto SCORE =
      matmul2d_descriptor(MATMUL_ROWS, TOKENS, K_DIM, false, true);  // keys are transposed
  constexpr auto WEIGH = matmul2d_descriptor(
      MATMUL_ROWS, V_DIM, TOKENS, false, false, false,
      matmul2d_descriptor::mode::multiply_accumulate);
  matmul2d<SCORE, execution_simdgroup> score;
  matmul2d<WEIGH, execution_simdgroup> weigh;
  auto keys = tile_matrix(key_tile, TOKENS, K_DIM, K_PITCH);
  auto values = tile_matrix(value_tile, TOKENS, V_DIM, V_PITCH);
  auto score_tile = tile_matrix(scores, MATMUL_ROWS, TOKENS, TOKENS);
  auto weight_tile = tile_matrix(weights, MATMUL_ROWS, TOKENS, TOKENS);

  // Loads queries through the tile of keys, 16 rows at a time; rows past the last are zeros.
  constexpr int CHUNK = chunk_size<T>();
  constexpr int ROW_CHUNKS = K_DIM / CHUNK;
  auto query = score.template get_left_input_cooperative_tensor<T, T, float>();
  for (int s = 0; s < SIMD_GROUPS; s++) {
    for (int chunk = int(thread_id); chunk < MATMUL_ROWS * ROW_CHUNKS; chunk += THREADS) {
      int q = s * MATMUL_ROWS + chunk / ROW_CHUNKS;
      int element = chunk % ROW_CHUNKS * CHUNK;
      uint4 loaded = uint4(0);
      if (q < ours.num_queries) {
        loaded = *(device const uint4*)(queries + ours.query(q) * K_DIM + element);
      }
      *(threadgroup uint4*)(key_tile + chunk / ROW_CHUNKS * K_PITCH + element) = loaded;
    }
    threadgroup_barrier(mem_flags::mem_threadgroup);
    if (int(simd_id) == s) {
      auto rows = tile_matrix(key_tile, MATMUL_ROWS, K_DIM, K_PITCH);
      query.load(rows);
    }
    threadgroup_barrier(mem_flags::mem_threadgroup);
  }

  // This lane's row; another lane holds its other half.
  int q = first_query + int(lane) / 2;
  SoftmaxState state;
  state.clear();
  AttentionRow row =
      q < ours.num_queries ? ours.attention_row(q, positions, per_head, params) : no_row();

  auto result =
      weigh.template get_destination_cooperative_tensor<TileMatrix<T>, TileMatrix<T>, float>();
  PAGED_UNROLL
  for (ushort i = 0; i < result.get_capacity(); i++) {
    if (result.is_valid_element(i)) {
      result[i] = 0.0f;
    }
  }

  for (int first = seen.begin; first < seen.end; first += TOKENS) {
    load_tiles<T, TOKENS, K_DIM, V_DIM, THREADS>(
        key_tile, value_tile, key_pool, value_pool, ours, first, seen.end, params, thread_id);

    auto dots =
        score.template get_destination_cooperative_tensor<TileMatrix<T>, TileMatrix<T>, float>();
    score.run(query, keys, dots);
    dots.store(score_tile);
    simdgroup_barrier(mem_flags::mem_threadgroup);
    int offset = int(lane) / 2 * TOKENS;
    float factor = softmax_half_row(
        scores + offset, weights + offset, state, row, scales, K_PITCH, first, seen.end, params,
        lane);
    if (lane % 2 == 0) {
      factors[lane / 2] = factor;
    }
    simdgroup_barrier(mem_flags::mem_threadgroup);
    PAGED_UNROLL
    for (ushort i = 0; i < result.get_capacity(); i++) {
      if (result.is_valid_element(i)) {
        result[i] *= factors[result.get_multidimensional_index(i)[1]];
      }
    }
    weigh.run(weight_tile, values, result);
  }

  Partials partials = partials_at(workspace, params.num_partials, params.num_q_heads, V_DIM);
  state.sum += simd_shuffle_xor(state.sum, ushort(1));
  simdgroup_barrier(mem_flags::mem_threadgroup);  // The last factors have been read.
  if (q < ours.num_queries && lane % 2 == 0) {
    factors[lane / 2] =
        ours.whole() ? state.normalizer(per_head, ours.head(q), params.options) : 1.0f;
    if (!ours.whole()) {
      ulong at = ours.result(q);
      partials.maxima[at] = state.maximum;
      partials.sums[at] = state.sum;
    }
  }
  simdgroup_barrier(mem_flags::mem_threadgroup);
  PAGED_UNROLL
  for (ushort i = 0; i < result.get_capacity(); i++) {
    if (result.is_valid_element(i)) {
      auto index = result.get_multidimensional_index(i);
      int of_row = first_query + int(index[1]);
      if (of_row < ours.num_queries) {
        ulong element = ours.result(of_row) * V_DIM + int(index[0]);
        float value = result[i] * factors[index[1]];
        if (ours.whole()) {
          out[element] = T(value);
        } else {
          partials.values[element] = value;
        }
      }
    }
  }
}
