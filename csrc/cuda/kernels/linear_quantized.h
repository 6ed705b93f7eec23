// Copyright © 2026 the mlx_paged authors. Apache-2.0.
//
// x @ weight.T + bias for the few rows of a decode step, with weights from mx.quantize. Like
// linear.cu, it is bound by reading the weights once. A block reads so little here that load
// latency matters, so copies run at least two chunks ahead of the products.

#pragma once

#include "linear_finish.h"
#include "packed_weights.h"

namespace mlx_paged::cuda {

// Operands and output of one weight of a launch.
#define QUANTIZED_WEIGHT(i)                                                                  \
  const unsigned char* __restrict__ codes_##i, const unsigned char* __restrict__ scales_##i, \
      const unsigned char* __restrict__ biases_##i, const T* __restrict__ bias_##i, T* out_##i

#define QUANTIZED_PARAMETERS                                                            \
  const T *__restrict__ x, const T *residual, QUANTIZED_WEIGHT(0), QUANTIZED_WEIGHT(1), \
      QUANTIZED_WEIGHT(2), const float *rotations, const int *__restrict__ slots,       \
      ADAPTER_PARAMETERS, const __grid_constant__ LinearParams params

#define QUANTIZED_PARTS                                            \
  {{nullptr, bias_0, out_0, params.n[0], params.has_bias[0] != 0}, \
   {nullptr, bias_1, out_1, params.n[1], params.has_bias[1] != 0}, \
   {nullptr, bias_2, out_2, params.n[2], params.has_bias[2] != 0}}

// The weight rows of the tile from `first` on; the callback that QuantizedStage::Sources takes.
#define QUANTIZED_ROWS_OF(tile, first)                                         \
  [&](int& row) -> QuantizedRowsOf {                                           \
    const TileRow at = row_of_tile<kRows, kUnit>(params, tile, (first) + row); \
    const int weight = at.is_up ? 1 : which;                                   \
    row = min(at.of_weight, n - 1);                                            \
    return weight == 0   ? QuantizedRowsOf{codes_0, scales_0, biases_0}        \
           : weight == 1 ? QuantizedRowsOf{codes_1, scales_1, biases_1}        \
                         : QuantizedRowsOf{codes_2, scales_2, biases_2};       \
  }

// Each warp multiplies all columns of its part by 16 rows of the weight. x goes straight to
// registers, in TILES tiles of 8 rows. Grid: (weight rows, x rows).
template <typename T, CodeFormat FORMAT, int BITS, int GROUP, int TILES>
__global__ void __launch_bounds__(32 * kLinearParts, quantized_blocks(TILES))
    linear_quantized_entry(QUANTIZED_PARAMETERS) {
  using Stage = QuantizedStage<T, FORMAT, BITS, GROUP>;
  using Group = typename Stage::Group;
  constexpr int kRows = kQuantizedRows;
  constexpr int kUnit = kRows;
  constexpr int kStages = quantized_rows_shape(FORMAT, BITS, GROUP, TILES).stages;
  constexpr int kPieces = Group::kColumns / 8;  // 16-byte pieces of x in a lane's share of a group
  extern __shared__ __align__(1024) unsigned char shared[];
  const LinearPart<T> parts_of_launch[kLinearMaxWeights] = QUANTIZED_PARTS;
  int tile = blockIdx.x;
  const int which = weight_of_block(params, params.is_gated ? kRows / 2 : kRows, tile);
  const int n = part_of(parts_of_launch, which).n;
  const int lane = threadIdx.x % 32;
  const int part = threadIdx.x / 32;
  const int row = lane / 4;
  const int column = lane % 4;
  const int first_x = blockIdx.y * TILES * 8;
  const int num_rows = min(params.num_rows - first_x, TILES * 8);
  const int num_groups = params.k / GROUP;
  const int num_chunks = (num_groups + Stage::kGroups - 1) / Stage::kGroups;
  const int num_turns = (num_chunks - part + kLinearParts - 1) / kLinearParts;
  const unsigned int ring = paged::shared_address(shared) + part * (kStages * Stage::kBytes);
  const paged::CachePolicy once = paged::evict_first();
  const typename Stage::Sources weights(QUANTIZED_ROWS_OF(tile, 0), num_groups, lane);
  auto copy_weights = [&](int turn) {
    if (turn < num_turns) {
      Stage::copy(
          ring + turn % kStages * Stage::kBytes, weights, num_groups, turn * kLinearParts + part,
          lane, once);
    }
    paged::commit_copies();
  };
  Eight xs[Stage::kGroups][TILES][kPieces];
  const Eight zero = make_uint4(0, 0, 0, 0);
  const T* of_lane = x + size_t(first_x + row) * params.x_stride + column * Group::kColumns;
  auto fetch_xs = [&](int turn) {
#pragma unroll
    for (int g = 0; g < Stage::kGroups; g++) {
      const int group = (turn * kLinearParts + part) * Stage::kGroups + g;
#pragma unroll
      for (int t = 0; t < TILES; t++) {
        const T* from = of_lane + t * 8 * params.x_stride + group * GROUP;
        const bool inside = group < num_groups && t * 8 + row < num_rows;
#pragma unroll
        for (int h = 0; h < kPieces; h++) {
          xs[g][t][h] = inside ? load_x(from + 8 * h) : zero;
        }
      }
    }
  };

#pragma unroll
  for (int turn = 0; turn < kStages - 1; turn++) {
    copy_weights(turn);  // No kernel writes weights, so this need not wait.
  }
  paged::begin_after_kernel_before();
  if (num_turns > 0) {
    fetch_xs(0);
  }
  float sums[1][TILES][4] = {};
  for (int turn = 0; turn < num_turns; turn++) {
    paged::wait_for_copies<kStages - 2>();
    __syncwarp();  // Every lane's copies have arrived, and the previous stage has been read.
    copy_weights(turn + kStages - 1);
    const unsigned int stage = ring + turn % kStages * Stage::kBytes;
    typename Stage::Scales scales;
    scales.load(stage, row);
#pragma unroll
    for (int g = 0; g < Stage::kGroups; g++) {
      Stage::multiply(
          sums, stage, scales, g, row, column, [&](int t, int h) { return xs[g][t][h]; });
    }
    if (turn + 1 < num_turns) {
      fetch_xs(turn + 1);
    }
  }
  paged::wait_for_copies<0>();
  __syncthreads();  // The rings have been read.

  // Sums of each part: [row of x][row of the weight].
  constexpr int kPitch = kRows + 4;
  float* results = reinterpret_cast<float*>(shared);
  auto result = [&](int of_part, int at, int output) -> float& {
    return results[(of_part * TILES * 8 + at) * kPitch + output];
  };
#pragma unroll
  for (int t = 0; t < TILES; t++) {
#pragma unroll
    for (int i = 0; i < 4; i++) {
      result(part, t * 8 + column * 2 + i % 2, i / 2 * 8 + row) = sums[0][t][i];
    }
  }
  __syncthreads();
  finish_rows<T, kRows, kUnit>(
      params, parts_of_launch, which, tile, residual, rotations, slots,
      [=](int at) { return first_x + at; }, num_rows, threadIdx.x, 32 * kLinearParts,
      [&](int at, int output) {
        float4 sum[kLinearParts];
#pragma unroll
        for (int i = 0; i < kLinearParts; i++) {
          sum[i] = *reinterpret_cast<const float4*>(&result(i, at, output));
        }
        return sum_of_parts(sum);
      });
}

}  // namespace mlx_paged::cuda
