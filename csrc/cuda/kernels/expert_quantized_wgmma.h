// Copyright © 2026 the mlx_paged authors. Apache-2.0.
//
// linear_quantized_wgmma for rows that are sorted by expert: those of a prompt.

#pragma once

#include "expert_quantized_stream.h"

namespace mlx_paged::cuda {

// TILES and WHOLE as in expert_quantized_stream. is_first: results lie like the rows of x, not by
// pair. Grid: items x tiles of an expert's weight.
template <typename T, CodeFormat FORMAT, int BITS, int GROUP, int TILES, bool WHOLE>
__global__ void __launch_bounds__(kQuantizedWgmmaThreads, quantized_wgmma_blocks(TILES))
    expert_quantized_wgmma_entry(
        QUANTIZED_EXPERT_PARAMETERS, const __grid_constant__ QuantizedMaps maps) {
#ifdef PAGED_HAS_WGMMA
  using Stream = QuantizedStream<T, FORMAT, BITS, GROUP, TILES, WHOLE, true>;
  extern __shared__ __align__(1024) unsigned char shared[];
  const int tile = blockIdx.x % params.num_tiles;
  const Stream stream(params.product, paged::shared_address(shared), tile);
  stream.begin();
  const ExpertItem item = begin_item(params, items);
  if (item.count == 0) {
    paged::wait_for_kernel_before();
    return;
  }
  const int first_row = item.expert * params.product.n[0];
  auto scales_of_part = [=](bool is_up, bool is_bias) {
    return is_up ? (is_bias ? biases_1 : scales_1) : is_bias ? biases_0 : scales_0;
  };
  // Rows of the next expert fill the last tiles, and are not stored.
  auto copy_x = [&](const auto& turn) {
    stream.copy_rows(maps.x, turn, stream.xs_of(turn), item.first);
  };
  if (threadIdx.x == 0) {
    stream.copy(params.product, maps, first_row, Stream::kXBytes, 0, scales_of_part, copy_x);
  }
  const typename Stream::Sources sources = stream.sources_of(params.product, maps, first_row);
  typename Stream::Sums sums = {};
  stream.multiply_together(
      sums, Stream::first_row(), same_in_warp(threadIdx.x / 128), threadIdx.x % 32,
      params.product.x_is_ordered, [&](const auto& turn) {
        stream.copy_weights(sources, turn, Stream::kXBytes, scales_of_part);
        copy_x(turn);
      });
  // Recomputed here so that it holds no registers during the products.
  const Stream same(params.product, paged::shared_address(shared), tile);
  const float* results = same.store(shared, sums);
  LinearPart<T> parts[kLinearMaxWeights] = EXPERT_PARTS;
  finish_item<T, Stream::kRows>(
      params, item, sorted_pairs, tile, parts, kQuantizedWgmmaThreads, [&](int at, int output) {
        return *reinterpret_cast<const float4*>(results + at * kQuantizedStreamPitch + output);
      });
#endif
}

}  // namespace mlx_paged::cuda
