// Copyright © 2026 the mlx_paged authors. Apache-2.0.
//
// linear_quantized_stream for rows with their experts; expert_stream.h is the 16-bit version.

#pragma once

#include "expert_items.h"
#include "linear_quantized_stream.h"

namespace mlx_paged::cuda {

#define QUANTIZED_EXPERT(i)                                                                  \
  const unsigned char* __restrict__ codes_##i, const unsigned char* __restrict__ scales_##i, \
      const unsigned char* __restrict__ biases_##i, const T* __restrict__ bias_##i

#define QUANTIZED_EXPERT_PARAMETERS                                          \
  const T *__restrict__ x, QUANTIZED_EXPERT(0), QUANTIZED_EXPERT(1), T *out, \
      const int *sorted_pairs, const int *items,                             \
      const __grid_constant__ ExpertProductParams params

// TILES: tiles of eight pairs. WHOLE: for rows whose scales are not a multiple of 16 bytes. Grid:
// items x tiles of an expert's weight.
template <typename T, CodeFormat FORMAT, int BITS, int GROUP, int TILES, bool WHOLE>
__global__ void __launch_bounds__(kQuantizedStreamThreads, quantized_stream_blocks(TILES))
    expert_quantized_stream_entry(
        QUANTIZED_EXPERT_PARAMETERS, const __grid_constant__ QuantizedMaps maps) {
#if !defined(__CUDA_ARCH__) || __CUDA_ARCH__ >= 900
  using Stream = QuantizedStream<T, FORMAT, BITS, GROUP, TILES, WHOLE>;
  constexpr int kRowBytes = Stream::kXBox * 2;
  extern __shared__ __align__(1024) unsigned char shared[];
  const Stream stream(params.product, paged::shared_address(shared), blockIdx.x % params.num_tiles);
  const int warp = threadIdx.x / 32;
  const int lane = threadIdx.x % 32;
  stream.begin();
  const ExpertItem item = begin_item(params, items);
  if (item.count == 0) {
    paged::wait_for_kernel_before();
    return;
  }
  if (warp == Stream::kMultipliers) {
    const RowsOfLane<TILES> rows(params, item, sorted_pairs, lane);
    const int x_bytes = params.is_first ? item.count * (Stream::kChunk / Stream::kXBox) * kRowBytes
                                        : Stream::kXBytes;
    stream.copy(
        params.product, maps, item.expert * params.product.n[0], x_bytes, lane,
        [=](bool is_up, bool is_bias) {
          return is_up ? (is_bias ? biases_1 : scales_1) : is_bias ? biases_0 : scales_0;
        },
        [&](const auto& turn) {
          __syncwarp();  // The barrier expects the bytes.
          const unsigned int xs = stream.xs_of(turn);
          if (params.is_first) {
            rows.for_each(item, lane, [&](int at, int row) {
              stream.copy_rows(maps.x, turn, xs + at * kRowBytes, row);
            });
          } else if (lane == 0) {
            stream.copy_rows(maps.x, turn, xs, item.first);
          }
        });
  }
  const float* results = stream.multiply_and_store(shared);
  LinearPart<T> parts[kLinearMaxWeights] = EXPERT_PARTS;
  finish_item<T, Stream::kRows>(
      params, item, sorted_pairs, stream.tile_of_weight, parts, kQuantizedStreamThreads,
      [&](int at, int output) {
        return *reinterpret_cast<const float4*>(results + at * kQuantizedStreamPitch + output);
      });
#endif
}

}  // namespace mlx_paged::cuda
