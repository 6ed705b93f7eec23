// Copyright © 2026 the mlx_paged authors. Apache-2.0.
//
// linear_quantized_wgmma's blocks of 128 rows of x, with the same bits, for launches with several
// of them. There, both warpgroups put x in order together, and shared memory holds only two turns,
// so that products wait for copies most of the time. Here, codes are refilled turn by turn and x in
// boxes of 64 columns. Each warpgroup has its own boxes, for its half of each turn's columns, and
// the groups share only the codes.

#pragma once

#include "linear_quantized_stream.h"

namespace mlx_paged::cuda {

#if !defined(__CUDA_ARCH__) || __CUDA_ARCH__ >= 900

// A block's share of a product, as in QuantizedStream, with rings of small pieces.
template <typename T, CodeFormat FORMAT, int BITS, int GROUP>
struct DeepStream
    : QuantizedStream<T, FORMAT, BITS, GROUP, kQuantizedDeepTiles, false, true, true> {
  using Base = QuantizedStream<T, FORMAT, BITS, GROUP, kQuantizedDeepTiles, false, true, true>;
  using Base::Base;
  using Base::kChunk;
  using Base::kMultipliers;
  using Base::kRun;
  using Base::kRunsOfWarp;
  using Base::kShape;
  using Base::kXBox;
  using Base::kXBoxBytes;
  using Base::num_turns;
  using Base::ring;
  using Codes = typename Base::Codes;
  using Group = typename Base::Group;
  using Scales = typename Base::Scales;
  using Sources = typename Base::Sources;
  using Sums = typename Base::Sums;
  using Turn = typename Base::Turn;
  static constexpr int kBoxes = kChunk / kXBox / 2;  // per turn and warpgroup
  static constexpr int kRunsOfBox = kXBox / kRun;
  static_assert(kBoxes * kRunsOfBox == kRunsOfWarp && kShape.depth > kBoxes);

  static constexpr int kWarps = kMultipliers / 2;  // of a warpgroup

  // Called by all threads before any other method.
  __device__ __forceinline__ void begin() const {
    if (threadIdx.x == 0) {
      ring.begin(kWarps);
#pragma unroll
      for (int stage = 0; stage < kShape.ring; stage++) {
        store_shared_word(counter(stage), 0);
      }
    }
    __syncthreads();
  }

  // Address of the counter of warps that have read a stage.
  __device__ __forceinline__ unsigned int counter(int stage) const {
    return this->stages + kShape.barriers + copy_ring_bytes(kShape.ring) + stage * 4;
  }

  // Position of a box in the ring of a warpgroup, which takes one half of each turn's columns.
  struct Box {
    int number = 0;
    int place = 0;
    int round = 0;  // how often the place was used before

    __device__ __forceinline__ void advance() {
      number++;
      if (++place == kShape.depth) {
        place = 0;
        round++;
      }
    }
    // In the ring, after the stages of codes.
    __device__ __forceinline__ int stage(int half) const {
      return kShape.stages + half * kShape.depth + place;
    }
  };

  __device__ __forceinline__ unsigned int address_of(const Box& box, int half) const {
    return this->stages + kShape.boxes + (half * kShape.depth + box.place) * kXBoxBytes;
  }

  // Copies box `number` to the place of `box`. Called by one thread.
  __device__ __forceinline__ void copy_box(
      const QuantizedMaps& maps, const Box& box, int number, int half) const {
    const int chunk = this->first_chunk + number / kBoxes;
    const int column = chunk * kChunk + (half * kBoxes + number % kBoxes) * kXBox;
    ring.expect_at_once(box.stage(half), kXBoxBytes);
    ring.copy(
        box.stage(half), address_of(box, half), &maps.x, column, Base::first_x(),
        paged::evict_last());
  }

  __device__ __forceinline__ void copy_codes(const Sources& from, const Turn& turn) const {
    this->copy_weights(from, turn, 0, [](bool, bool) { return nullptr; });
  }

  // Fills the rings. Called by one thread.
  __device__ __forceinline__ void copy(const QuantizedMaps& maps, const Sources& from) const {
    const int ahead = min(kShape.stages, num_turns);
    for (Turn turn = this->first_turn(); turn.number < ahead; turn.advance()) {
      copy_codes(from, turn);  // No kernel writes weights, so this need not wait.
    }
    paged::let_next_kernel_begin();
    paged::wait_for_kernel_before();
    const int boxes = min(kShape.depth, num_turns * kBoxes);
    for (Box box; box.number < boxes; box.advance()) {
      copy_box(maps, box, box.number, 0);
      copy_box(maps, box, box.number, 1);
    }
  }

#ifdef PAGED_HAS_WGMMA
  // Multiplies every turn of the rings, as multiply_together() does: 32 rows of the weight from
  // `first_row` on, and half of each turn's columns. Called by both warpgroups, one for each half.
  // The last warp that has read a stage or a box refills it.
  __device__ __forceinline__ void multiply(
      Sums& sums, const QuantizedMaps& maps, const Sources& from, int first_row, int half, int lane,
      bool is_ordered) const {
    const unsigned int codes_begin = Base::codes_of_lane(first_row, half * kRunsOfWarp, lane);
    const int num_boxes = num_turns * kBoxes;
    auto order = [&](const Box& box) {
      ring.wait_until_full(box.stage(half), box.round);
      Base::template order_columns<kXBox, 32 * kWarps>(address_of(box, half));
      ring.release(box.stage(half), lane);
    };
    auto refill = [&](const Box& box) {
      const int later = box.number + kShape.depth;
      __syncwarp();
      if (lane == 0 && later < num_boxes && is_last(counter(box.stage(half)), kWarps)) {
        copy_box(maps, box, later, half);
      }
      __syncwarp();
    };
    Box box;
    Turn later = this->first_turn();
#pragma unroll
    for (int i = 0; i < kShape.stages; i++) {
      later.advance();
    }
    if (!is_ordered && num_turns > 0) {
      order(box);
    }
    for (Turn turn = this->first_turn(); turn.number < num_turns; turn.advance()) {
      ring.wait_until_full(turn.stage, turn.round);
      Scales scales[2];
#pragma unroll
      for (int m = 0; m < 2; m++) {
        scales[m] = this->load_scales(turn, first_row, half * kRunsOfWarp, m, lane);
      }
      Codes codes = this->load_codes(turn, codes_begin, 0, 0, lane);
      Box before = box;
#pragma unroll
      for (int i = 0; i < kRunsOfWarp; i++) {
        const bool begins_box = i % kRunsOfBox == 0;
        if (begins_box && is_ordered) {
          ring.wait_until_full(box.stage(half), box.round);
        }
        const unsigned int x =
            first_columns(address_of(box, half)) + i % kRunsOfBox * (kRun / 16 * kNextColumns);
#pragma unroll
        for (int m = 0; m < 2; m++) {
          paged::FragmentA weights[Group::kProducts];
          codes.scale_to(weights, scales[m], i);
          // Load the next batch's codes while this batch runs.
          if (m == 0 || i + 1 < kRunsOfWarp) {
            codes = this->load_codes(turn, codes_begin, i + m, 1 - m, lane);
          }
          if (begins_box && m == 0 && !is_ordered) {
            ring.wait_until_released(box.stage(half), box.round);
          }
          begin_products();
#pragma unroll
          for (int h = 0; h < Group::kProducts; h++) {
            start_product<false, false>(sums[m], weights[h], x + h * kNextColumns, T(0.0f));
          }
          commit_products();
          wait_for_products<1>(sums[m]);
          if (begins_box && m == 0 && i > 0) {
            refill(before);
          }
        }
        if ((i + 1) % kRunsOfBox == 0) {
          before = box;
          box.advance();
          if (!is_ordered && box.number < num_boxes) {
            order(box);
          }
        }
      }
      // All warps of both groups read a turn's codes.
      __syncwarp();
      if (lane == 0 && later.number < num_turns && is_last(counter(turn.stage), kMultipliers)) {
        copy_codes(from, later);
      }
      __syncwarp();
      later.advance();
      wait_for_products<0>(sums[0]);
      take_product(sums[1]);
      refill(before);
    }
  }
#endif
};

#endif

// Grid: (weight tiles x blocks per cluster, x rows). Without adapters.
template <typename T, CodeFormat FORMAT, int BITS, int GROUP>
__global__ void __launch_bounds__(kQuantizedWgmmaThreads, 1)
    linear_quantized_deep_entry(QUANTIZED_PARAMETERS, const __grid_constant__ QuantizedMaps maps) {
#ifdef PAGED_HAS_WGMMA
  using Stream = DeepStream<T, FORMAT, BITS, GROUP>;
  extern __shared__ __align__(1024) unsigned char shared[];
  const LinearPart<T> parts_of_launch[kLinearMaxWeights] = QUANTIZED_PARTS;
  const AdapterOperands<T> adapter_operands = ADAPTER_OPERANDS;
  const Stream stream(params, paged::shared_address(shared));
  stream.begin();
  const typename Stream::Sources sources = stream.sources_of(params, maps, 0);
  if (threadIdx.x == 0) {
    stream.copy(maps, sources);
  }
  typename Stream::Sums sums = {};
  stream.multiply(
      sums, maps, sources, Stream::first_row(), same_in_warp(threadIdx.x / 128), threadIdx.x % 32,
      params.x_is_ordered);
  float* results = stream.store(shared, sums);
  // Recomputed here so that it holds no registers during the products.
  const Stream same(params, paged::shared_address(shared));
  same.finish(params, parts_of_launch, adapter_operands, residual, rotations, slots, results);
#endif
}

}  // namespace mlx_paged::cuda
