// Copyright © 2026 the mlx_paged authors. Apache-2.0.
//
// Linear layers of many rows on tensor units. Tiles of x and of the weight, as numbers of x's type,
// are in threadgroup memory; SIMD-groups multiply them together and hold the sums.

#pragma once

#include "few_rows.h"
#include "kernel_table.h"
#include "language.h"
#include "quantized_weights.h"
#include "tensor_units.h"
#include "vector_load.h"

using namespace metal;

namespace paged {

// TENSOR_DEPTH elements of ROWS rows of x, in the registers of THREADS threads.
template <typename T, int ROWS, int THREADS>
struct InputTile {
  static constexpr constant int ROW_CHUNKS = TENSOR_DEPTH / chunk_size<T>();
  static constexpr constant int LOADS = ROWS * ROW_CHUNKS / THREADS;

  uint4 chunks[LOADS];

  // Loads elements from `begin` on of rows from `first` on. Elements past the end are zeros; rows
  // past the last repeat it.
  METAL_FUNC void load(
      device const T* x, int first, int begin, constant TensorProductParams& params,
      uint thread_id) thread {
    PAGED_UNROLL
    for (int i = 0; i < LOADS; i++) {
      int chunk = i * THREADS + int(thread_id);
      int row = min(first + chunk / ROW_CHUNKS, params.num_rows - 1);
      int element = begin + chunk % ROW_CHUNKS * chunk_size<T>();
      chunks[i] = uint4(0);
      if (element < params.k) {
        chunks[i] = *(device const uint4*)(x + ulong(row) * params.k + element);
      }
    }
  }

  METAL_FUNC void store(threadgroup T* tile, uint thread_id) const thread {
    PAGED_UNROLL
    for (int i = 0; i < LOADS; i++) {
      int chunk = i * THREADS + int(thread_id);
      int at = chunk / ROW_CHUNKS * tensor_pitch() + chunk % ROW_CHUNKS * chunk_size<T>();
      *(threadgroup uint4*)(tile + at) = chunks[i];
    }
  }
};

// The same of TENSOR_COLUMNS rows of a weight, which become numbers when they are stored.
template <typename T, typename Weight, int THREADS>
struct WeightTile {
  static constexpr constant int ROW_UNITS = TENSOR_DEPTH / Weight::unit_size();
  static constexpr constant int UNITS = TENSOR_COLUMNS * ROW_UNITS;
  static constexpr constant int LOADS = (UNITS + THREADS - 1) / THREADS;

  Weight units[LOADS];

  METAL_FUNC void load(
      WeightRows weight, int first, int begin, constant TensorProductParams& params,
      uint thread_id) thread {
    PAGED_UNROLL
    for (int i = 0; i < LOADS; i++) {
      int at = i * THREADS + int(thread_id);
      int unit = begin / Weight::unit_size() + at % ROW_UNITS;
      weight.first = ulong(min(first + at / ROW_UNITS, params.n - 1));
      units[i] = {};  // all zeros, which are the numbers past the end
      if (at < UNITS && unit < weight.row_units) {
        units[i].load_alone(weight, uint(unit));
      }
    }
  }

  METAL_FUNC void store(threadgroup T* tile, uint thread_id) const thread {
    constexpr int CHUNK = chunk_size<T>();
    PAGED_UNROLL
    for (int i = 0; i < LOADS; i++) {
      int unit = i * THREADS + int(thread_id);
      if (unit < UNITS) {
        threadgroup T* row = tile + unit / ROW_UNITS * tensor_pitch();
        PAGED_UNROLL
        for (int chunk = 0; chunk < Weight::unit_size() / CHUNK; chunk++) {
          int element = unit % ROW_UNITS * Weight::unit_size() + chunk * CHUNK;
          *(threadgroup uint4*)(row + element) = units[i].packed_chunk(chunk);
        }
      }
    }
  }
};

}  // namespace paged

// Computes x @ weight.T + bias for ROWS rows of x and TENSOR_COLUMNS of the weight. Dense weights
// have no scales, and only affine ones have `biases`. k is a multiple of 8 elements.
// grid: (rows of the weight / TENSOR_COLUMNS rounded up, rows of x / ROWS likewise).
template <typename T, typename Weight, int ROWS>
PAGED_KERNEL(32 * paged::tensor_simd_groups(ROWS))
tensor_product(
    device const T* x [[buffer(0)]], device const uchar* weight [[buffer(1)]],
    device const uchar* scales [[buffer(2)]], device const uchar* biases [[buffer(3)]],
    device const T* bias [[buffer(4)]], device T* out [[buffer(5)]],
    constant paged::TensorProductParams& params [[buffer(6)]],
    threadgroup uchar* scratch PAGED_SCRATCH, uint3 group_id [[threadgroup_position_in_grid]],
    uint thread_id [[thread_index_in_threadgroup]]) {
  using namespace paged;
  using mpp::tensor_ops::matmul2d;
  using mpp::tensor_ops::matmul2d_descriptor;
  constexpr int SIMD_GROUPS = tensor_simd_groups(ROWS);
  constexpr int THREADS = 32 * SIMD_GROUPS;
  int first_column = int(group_id.x) * TENSOR_COLUMNS;
  int first_row = int(group_id.y) * ROWS;
  WeightRows weights = {
      weight, scales, biases, 0, params.k / Weight::unit_size(), params.group_shift};
  threadgroup T* input_tile = (threadgroup T*)scratch;
  threadgroup T* weight_tile = input_tile + ROWS * tensor_pitch();

  constexpr auto MULTIPLY = matmul2d_descriptor(
      ROWS, TENSOR_COLUMNS, TENSOR_DEPTH, false, true, false,
      matmul2d_descriptor::mode::multiply_accumulate);
  matmul2d<MULTIPLY, execution_simdgroups<SIMD_GROUPS>> multiply;
  auto left = tile_matrix(input_tile, ROWS, TENSOR_DEPTH, tensor_pitch());
  auto right = tile_matrix(weight_tile, TENSOR_COLUMNS, TENSOR_DEPTH, tensor_pitch());
  auto sums =
      multiply.template get_destination_cooperative_tensor<TileMatrix<T>, TileMatrix<T>, float>();
  PAGED_UNROLL
  for (ushort i = 0; i < sums.get_capacity(); i++) {
    if (sums.is_valid_element(i)) {
      sums[i] = 0.0f;
    }
  }

  for (int begin = 0; begin < params.k; begin += TENSOR_DEPTH) {
    // All loads are issued first, so that they are in flight together.
    InputTile<T, ROWS, THREADS> inputs;
    WeightTile<T, Weight, THREADS> columns;
    columns.load(weights, first_column, begin, params, thread_id);
    inputs.load(x, first_row, begin, params, thread_id);
    threadgroup_barrier(mem_flags::mem_threadgroup);  // The previous tiles have been read.
    columns.store(weight_tile, thread_id);
    inputs.store(input_tile, thread_id);
    threadgroup_barrier(mem_flags::mem_threadgroup);
    multiply.run(left, right, sums);
  }

  PAGED_UNROLL
  for (ushort i = 0; i < sums.get_capacity(); i++) {
    if (sums.is_valid_element(i)) {
      auto index = sums.get_multidimensional_index(i);
      int row = first_row + int(index[1]);
      int column = first_column + int(index[0]);
      if (row < params.num_rows && column < params.n) {
        float sum = sums[i];
        if (params.has_bias) {
          sum = rounded<T>(sum) + float(bias[column]);
        }
        out[ulong(row) * params.n + column] = T(sum);
      }
    }
  }
}
