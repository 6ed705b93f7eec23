// Copyright © 2026 the mlx_paged authors. Apache-2.0.
//
// linear_stream for rows with their experts; a block works on one expert's weight. Copies rows of x
// one by one when they are scattered. Adds in the same order as linear_stream.

#pragma once

#include "expert_items.h"
#include "linear_stream.h"

namespace mlx_paged::cuda {

#define EXPERT_PARAMETERS                                                                \
  const T *__restrict__ x, const T *__restrict__ weight_0, const T *__restrict__ bias_0, \
      const T *__restrict__ weight_1, const T *__restrict__ bias_1, T *out,              \
      const int *sorted_pairs, const int *items,                                         \
      const __grid_constant__ ExpertProductParams params

// TILES: tiles of eight pairs. Grid: items x tiles of an expert's weight.
template <typename T, int TILES>
__global__ void __launch_bounds__(kStreamThreads, 2)
    expert_stream_entry(EXPERT_PARAMETERS, const __grid_constant__ StreamMaps maps) {
#if !defined(__CUDA_ARCH__) || __CUDA_ARCH__ >= 900
  constexpr int kStages = stream_stages(TILES);
  constexpr int kStageBytes = stream_stage_bytes(TILES);
  constexpr int kWeightBytes = kStreamRows * kLinearChunk * 2;
  constexpr int kRowBytes = kLinearChunk * 2;
  constexpr int kMultipliers = kStreamRows / kLinearRows;  // warps
  extern __shared__ __align__(1024) unsigned char shared[];
  const unsigned int tiles = paged::shared_address(shared);
  const CopyRing<kStages> ring{tiles + stream_barriers(TILES)};
  const LinearParams& product = params.product;
  const int tile_of_weight = blockIdx.x % params.num_tiles;
  const int warp = threadIdx.x / 32;
  const int lane = threadIdx.x % 32;
  const int num_turns = (product.k + kLinearChunk - 1) / kLinearChunk;

  if (threadIdx.x == 0) {
    ring.begin(kMultipliers);
  }
  __syncthreads();
  const ExpertItem item = begin_item(params, items);
  if (item.count == 0) {
    paged::wait_for_kernel_before();
    return;
  }

  if (warp == kMultipliers) {
    const TileRow low = row_of_tile<kStreamRows, kStreamRows>(product, tile_of_weight, 0);
    const TileRow high =
        row_of_tile<kStreamRows, kStreamRows>(product, tile_of_weight, kStreamRows / 2);
    const CUtensorMap* map_of_high = &maps.weights[high.is_up ? 1 : 0];
    const int first_row = item.expert * product.n[0];
    const int bytes = kWeightBytes + (params.is_first ? item.count : 8 * TILES) * kRowBytes;
    const RowsOfLane<TILES> rows(params, item, sorted_pairs, lane);
    const paged::CachePolicy once = paged::evict_first();
    const paged::CachePolicy often = paged::evict_last();
    auto copy_weights = [&](int turn) {
      if (lane > 0) {
        return;
      }
      const int stage = turn % kStages;
      ring.expect(stage, turn / kStages, bytes);
      const unsigned int tile = tiles + stage * kStageBytes;
      const int column = turn * kLinearChunk;
      ring.copy(stage, tile, &maps.weights[0], column, first_row + low.of_weight, once);
      ring.copy(
          stage, tile + kWeightBytes / 2, map_of_high, column, first_row + high.of_weight, once);
    };
    auto copy_x = [&](int turn) {
      const int stage = turn % kStages;
      const unsigned int tile = tiles + stage * kStageBytes + kWeightBytes;
      const int column = turn * kLinearChunk;
      __syncwarp();  // The barrier expects the bytes.
      if (params.is_first) {
        rows.for_each(item, lane, [&](int at, int row) {
          ring.copy(stage, tile + at * kRowBytes, &maps.x, column, row, often);
        });
      } else if (lane == 0) {
        ring.copy(stage, tile, &maps.x, column, item.first, often);
      }
    };
    copy_turns<kStages>(num_turns, copy_weights, copy_x);
  }

  float sums[TILES][4] = {};
  if (warp < kMultipliers) {
    const int chunks_of_part = (num_turns + kLinearParts - 1) / kLinearParts;
    multiply_parts<T>(sums, ring, tiles, kLinearParts, chunks_of_part, num_turns, warp, lane);
  }
  __syncthreads();  // The ring has been read.
  paged::wait_for_kernel_before();
  float* results = reinterpret_cast<float*>(shared);
  if (warp < kMultipliers) {
    store_sums(results, sums, warp, lane);
  }
  __syncthreads();
  LinearPart<T> parts[kLinearMaxWeights] = EXPERT_PARTS;
  finish_item<T, kStreamRows>(
      params, item, sorted_pairs, tile_of_weight, parts, kStreamThreads, [&](int at, int output) {
        return *reinterpret_cast<const float4*>(results + at * kStreamPitch + output);
      });
#endif
}

}  // namespace mlx_paged::cuda
