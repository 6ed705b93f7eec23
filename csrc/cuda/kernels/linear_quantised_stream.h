// Copyright © 2026 the mlx_paged authors. Apache-2.0.
//
// linear_stream of weights that mx.quantize made. Codes, their scales and x come through a ring in
// shared memory that one warp has the copy engine fill; the other warps multiply.

#pragma once

#include "copy_ring.h"
#include "linear_quantised.h"

namespace mlx_paged::cuda {

// TILES: of eight rows of x. grid: tiles of the weight x blocks of a cluster.
template <typename T, CodeFormat FORMAT, int BITS, int GROUP, int TILES>
__global__ void __launch_bounds__(kQuantisedStreamThreads, TILES <= 4 ? 2 : 1)
    linear_quantised_stream_entry(
        QUANTISED_PARAMETERS, const __grid_constant__ QuantisedMaps maps) {
#if !defined(__CUDA_ARCH__) || __CUDA_ARCH__ >= 900
  constexpr int kRows = kQuantisedStreamRows;
  constexpr int kChunk = kQuantisedStreamChunk;
  constexpr int kRun = quantised_stream_run(GROUP);
  using Group = GroupOf<T, FORMAT, BITS, kRun>;
  constexpr QuantisedStreamShape kShape = quantised_stream_shape(FORMAT, BITS, GROUP, TILES);
  constexpr int kSpan = quantised_stream_span(FORMAT, GROUP);
  constexpr int kRuns = kChunk / kRun;
  constexpr int kRowBytes = kChunk * BITS / 8;
  constexpr int kScaleBytes = Group::kHasBiases ? 2 : 1;
  constexpr int kMultipliers = kRows / 32 * 2;  // warps
  constexpr int kXBox = 64;                     // columns
  constexpr int kXBoxBytes = 8 * TILES * kXBox * 2;
  static_assert(kShape.stages >= 2);
  extern __shared__ __align__(1024) unsigned char shared[];
  const unsigned int stages = paged::shared_address(shared);
  const CopyRing<kShape.stages> ring{stages + kShape.barriers};
  const unsigned int scale_slots = stages + kShape.stages * kShape.stage_bytes;

  const LinearPart<T> parts_of_launch[kLinearMostWeights] = QUANTISED_PARTS;
  const int num_ranks = cluster_size();
  const int rank = blockIdx.x % num_ranks;
  int tile_of_weight = blockIdx.x / num_ranks;
  const int which = weight_of_block(params, kRows, tile_of_weight);
  const int warp = threadIdx.x / 32;
  const int lane = threadIdx.x % 32;
  const int num_chunks = params.k / kChunk;
  const int of_rank = (num_chunks + num_ranks - 1) / num_ranks;
  const int first_chunk = rank * of_rank;
  const int num_turns = min(of_rank, num_chunks - first_chunk);  // of the last: none, maybe
  // A span's scales are copied with the first of its chunks that this block has.
  auto slot_of = [&](int turn) {
    const int span = (first_chunk + turn) / kSpan - first_chunk / kSpan;
    return scale_slots + span % kShape.slots * kShape.scales_bytes;
  };

  if (threadIdx.x == 0) {
    ring.begin(kMultipliers);
  }
  __syncthreads();

  if (warp == kMultipliers && lane == 0) {
    // The tile's rows are two runs of a weight's: of gate and of up, or of a head's halves.
    const TileRow low = row_of_tile<kRows, kRows>(params, tile_of_weight, 0);
    const TileRow high = row_of_tile<kRows, kRows>(params, tile_of_weight, kRows / 2);
    const auto* maps_of_low = &maps.weights[which];
    const auto* maps_of_high = high.is_up ? &maps.weights[1] : maps_of_low;
    const paged::CachePolicy once = paged::evict_first();
    const paged::CachePolicy often = paged::evict_last();
    auto copy_weights = [&](int turn) {
      const bool begins_span = turn == 0 || (first_chunk + turn) % kSpan == 0;
      const int stage =
          ring.expect(turn, kShape.stage_bytes + (begins_span ? kShape.scales_bytes : 0));
      const unsigned int codes = stages + stage * kShape.stage_bytes;
      const int word = (first_chunk + turn) * (kRowBytes / 4);
      ring.copy(stage, codes, &maps_of_low->codes, word, low.of_weight, once);
      ring.copy(
          stage, codes + kShape.codes_bytes / 2, &maps_of_high->codes, word, high.of_weight, once);
      if (begins_span) {
        const unsigned int slot = slot_of(turn);
        const int group = (first_chunk + turn) / kSpan * (kSpan * kChunk / GROUP);
        constexpr int kHalf = kRows / 2 * 16;
        ring.copy(stage, slot, &maps_of_low->scales, group, low.of_weight, once);
        ring.copy(stage, slot + kHalf, &maps_of_high->scales, group, high.of_weight, once);
        if constexpr (Group::kHasBiases) {
          ring.copy(stage, slot + 2 * kHalf, &maps_of_low->biases, group, low.of_weight, once);
          ring.copy(stage, slot + 3 * kHalf, &maps_of_high->biases, group, high.of_weight, once);
        }
      }
    };
    auto copy_x = [&](int turn) {
      const int stage = turn % kShape.stages;
      const unsigned int to = stages + stage * kShape.stage_bytes + kShape.codes_bytes;
#pragma unroll
      for (int b = 0; b < kChunk / kXBox; b++) {
        const int column = (first_chunk + turn) * kChunk + b * kXBox;
        ring.copy(stage, to + b * kXBoxBytes, &maps.x, column, 0, often);
      }
    };
    const int ahead = min(kShape.stages, num_turns);
    for (int turn = 0; turn < ahead; turn++) {
      copy_weights(turn);  // which no kernel writes
    }
    paged::let_next_kernel_begin();
    paged::wait_for_kernel_before();
    for (int turn = 0; turn < ahead; turn++) {
      copy_x(turn);
    }
    for (int turn = kShape.stages; turn < num_turns; turn++) {
      copy_weights(turn);
      copy_x(turn);
    }
  }

  const int first_row = warp % 4 * 32;
  const int row = lane / 4;
  const int column = lane % 4;
  float sums[2][TILES][4] = {};
  if (warp < kMultipliers) {
    for (int turn = 0; turn < num_turns; turn++) {
      const int stage = ring.wait_until_full(turn);
      const unsigned int codes = stages + stage * kShape.stage_bytes;
      const unsigned int xs = codes + kShape.codes_bytes;
      const unsigned int scales = slot_of(turn);
#pragma unroll
      for (int i = 0; i < kRuns / 2; i++) {
        const int run = warp / 4 + 2 * i;
        // Among the groups of the span.
        const int group = ((first_chunk + turn) % kSpan * kChunk + run * kRun) / GROUP;
        auto scale_at = [&](int array, int i) {
          const unsigned int at =
              scales + array * (kRows * 16) + (first_row + row + 8 * i) * 16 + group * kScaleBytes;
          if constexpr (kScaleBytes == 2) {
            return element<T>(load_shared_half(at), 0);
          } else {
            return power_of_two(load_shared_byte(at));
          }
        };
        multiply_group<Group>(
            sums, column,
            [&](int i) {
              return codes + (first_row + row + 8 * i) * kRowBytes + run * (kRun * BITS / 8);
            },
            [&](int i) { return scale_at(0, i); }, [&](int i) { return scale_at(1, i); },
            [&](int t, int h) {
              const int first = run * kRun + column * Group::kColumns + h * 8;
              const int piece = first % kXBox / 8;
              return load_shared(
                  xs + first / kXBox * kXBoxBytes + paged::tile_offset<8>(8 * t + row, piece));
            });
      }
      ring.release(stage, lane);
    }
  }
  __syncthreads();  // the ring has been read
  paged::wait_for_kernel_before();

  // Sums of the block, [row of x][row of the weight]: of both warps of each pair.
  float* results = reinterpret_cast<float*>(shared);
#pragma unroll
  for (int of_pair = 1; of_pair >= 0; of_pair--) {
    if (warp / 4 == of_pair) {
#pragma unroll
      for (int m = 0; m < 2; m++) {
#pragma unroll
        for (int t = 0; t < TILES; t++) {
#pragma unroll
          for (int i = 0; i < 4; i++) {
            const int at = t * 8 + column * 2 + i % 2;
            const int output = first_row + m * 16 + i / 2 * 8 + row;
            float& result = results[at * kQuantisedStreamPitch + output];
            result = of_pair == 1 ? sums[m][t][i] : sums[m][t][i] + result;
          }
        }
      }
    }
    __syncthreads();
  }
  cluster_barrier();

  // Each block finishes some of the outputs.
  finish_rows<T, kRows, kRows>(
      params, parts_of_launch, which, tile_of_weight, residual, rotations, slots, 0,
      params.num_rows, rank * kQuantisedStreamThreads + threadIdx.x,
      num_ranks * kQuantisedStreamThreads, [&](int at, int output) {
        const unsigned int address = stages + (at * kQuantisedStreamPitch + output) * 4;
        float4 sum[kLinearParts];
#pragma unroll
        for (int r = 0; r < kLinearParts; r++) {
          sum[r] = r < num_ranks ? load_of_rank(address, r) : make_float4(0, 0, 0, 0);
        }
        return sum_of_parts(sum);
      });
  cluster_barrier();  // no block ends while its results are being read
#endif
}

}  // namespace mlx_paged::cuda
