// Copyright © 2026 the mlx_paged authors. Apache-2.0.
//
// x @ weight.T + bias for up to 64 rows on sm_90 and later, at the speed of reading the weight. A
// producer warp has the copy engine (TMA) fill a ring in shared memory with tiles of both operands;
// each consumer warp multiplies sixteen rows of the weight. No kernel writes weights, so their
// copies start before the previous kernel ends.

#pragma once

#include "adapter_units.h"
#include "copy_ring.h"
#include "linear_adapters.h"
#include "linear_finish.h"
#include "shared_memory.h"
#include "tensor_core.h"
#include "warpgroup.h"

namespace mlx_paged::cuda {

// Adds a block's partial sums pairwise as they arrive in order: pairs, then pairs of pairs. Pending
// sums stay in registers. IN_MEMORY: the first of each pair goes to shared memory instead, because
// the compiler would spill to local memory, which has no L1 cache here: the ring takes all of it.
template <int TILES, bool IN_MEMORY = false>
struct PartSums {
  static constexpr int kKept = IN_MEMORY ? 2 : 3;
  float kept[kKept][TILES][4];  // pending sums of 1 (unless in memory), 2 and 4 parts
  float* in_memory;  // this thread's slots; consecutive slots are 2 * kStreamRows floats apart

  // `memory`: space for 2 * kStreamRows consumer threads; `number`: this thread's index.
  __device__ __forceinline__ PartSums(float* memory, int number) : in_memory(memory + number) {}
  __device__ __forceinline__ PartSums() : in_memory(nullptr) {}

  // Adds part `part` of the block and combines every pair that it completes.
  __device__ __forceinline__ void add(int part, float (&sums)[TILES][4]) {
#pragma unroll
    for (int level = 0; level < 3; level++) {
      const bool is_second = part >> level & 1;
      const bool is_in_memory = IN_MEMORY && level == 0;
#pragma unroll
      for (int t = 0; t < TILES; t++) {
#pragma unroll
        for (int i = 0; i < 4; i++) {
          float& first = is_in_memory ? in_memory[(4 * t + i) * (2 * kStreamRows)]
                                      : kept[IN_MEMORY ? max(level - 1, 0) : level][t][i];
          if (is_second) {
            sums[t][i] = first + sums[t][i];
          } else {
            first = sums[t][i];
          }
        }
      }
      if (!is_second) {
        return;
      }
    }
  }
};

// Adds a chunk's products to `sums`. `tile`: address of the weight's tile, followed by x's.
template <typename T, int TILES>
__device__ __forceinline__ void multiply_chunk(
    float (&sums)[TILES][4], unsigned int tile, int warp, int lane) {
  constexpr int kPieces = kLinearChunk / 8;  // 16-byte pieces of a row
  const int row = warp * kLinearRows + lane % 16;
  paged::FragmentA w[kPieces / 2];
#pragma unroll
  for (int s = 0; s < kPieces / 2; s++) {
    paged::load_matrices(w[s], tile + paged::tile_offset<kPieces>(row, 2 * s + lane / 16));
  }
#pragma unroll
  for (int s = 0; s < kPieces / 4; s++) {
#pragma unroll
    for (int t = 0; t < TILES; t++) {
      paged::FragmentA v;  // operands of two products
      const int at = kStreamRows + 8 * t + lane % 8;
      paged::load_matrices(v, tile + paged::tile_offset<kPieces>(at, 4 * s + lane / 8));
      paged::multiply_accumulate(sums[t], w[2 * s], {v[0], v[1]}, T(0.0f));
      paged::multiply_accumulate(sums[t], w[2 * s + 1], {v[2], v[3]}, T(0.0f));
    }
  }
}

template <int TILES>
__device__ __forceinline__ void clear(float (&sums)[TILES][4]) {
#pragma unroll
  for (int t = 0; t < TILES; t++) {
#pragma unroll
    for (int i = 0; i < 4; i++) {
      sums[t][i] = 0.0f;
    }
  }
}

// Sums a block's parts of the columns; the chunks arrive through a ring.
template <typename T, int TILES, typename Ring>
__device__ __forceinline__ void multiply_parts(
    float (&sums)[TILES][4], const Ring& ring, unsigned int tiles, int num_parts,
    int chunks_of_part, int num_turns, int warp, int lane) {
  constexpr int kStages = stream_stages(TILES);
  PartSums<TILES> before;
  int turn = 0;
  for (int part = 0; part < num_parts; part++) {
    const int end = min((part + 1) * chunks_of_part, num_turns);
    clear(sums);
    for (; turn < end; turn++) {
      const int stage = turn % kStages;
      ring.wait_until_full(stage, turn / kStages);
      multiply_chunk<T>(sums, tiles + stage * stream_stage_bytes(TILES), warp, lane);
      ring.release(stage, lane, none_after(sums, chunks_of_part));
    }
    before.add(part, sums);
  }
}

#ifdef PAGED_HAS_WGMMA
// multiply_parts by warpgroup products; one batch runs while the next one starts. The sums start at
// zero and only the wait for a stage depends on the turn: with conditional products, or conditional
// waits for them, the compiler would serialize all products.
template <typename T, int TILES, typename Ring>
__device__ __forceinline__ void multiply_parts_together(
    float (&sums)[TILES][4], PartSums<TILES, true> before, const Ring& ring, unsigned int tiles,
    int num_parts, int chunks_of_part, int num_turns, int lane) {
  constexpr int kStages = stream_stages(TILES);
  int turn = 0;
  for (int part = 0; part < num_parts; part++) {
    const int begin = turn;
    const int end = min((part + 1) * chunks_of_part, num_turns);
    clear(sums);
    for (; turn < end; turn++) {
      const int stage = turn % kStages;
      ring.wait_until_full(stage, turn / kStages);
      const unsigned int tile = tiles + stage * stream_stage_bytes(TILES);
      const unsigned int weight = first_columns(tile);
      const unsigned int x = first_columns(tile + kStreamRows * kLinearChunk * 2);
      begin_products();
#pragma unroll
      for (int s = 0; s < kLinearChunk / 16; s++) {
        start_product(sums, weight + s * kNextColumns, x + s * kNextColumns, T(0.0f));
      }
      commit_products();
      wait_for_products<1>(sums);
      if (turn > begin) {
        ring.release((turn - 1) % kStages, lane);
      }
    }
    wait_for_products<0>(sums);
    if (turn > begin) {
      ring.release((turn - 1) % kStages, lane);
    }
    before.add(part, sums);
  }
}
#endif

// Copies the operands of every turn. Starts the first turns' weights before it waits for the kernel
// that writes x. Called by the producer.
template <int STAGES, typename CopyWeights, typename CopyX>
__device__ __forceinline__ void copy_turns(int num_turns, CopyWeights copy_weights, CopyX copy_x) {
  const int ahead = min(STAGES, num_turns);
  for (int turn = 0; turn < ahead; turn++) {
    copy_weights(turn);
  }
  paged::begin_after_kernel_before();
  for (int turn = 0; turn < ahead; turn++) {
    copy_x(turn);
  }
  for (int turn = STAGES; turn < num_turns; turn++) {
    copy_weights(turn);
    copy_x(turn);
  }
}

// Stores a warp's sums in the block's results, [row of x][row of the weight].
template <int TILES>
__device__ __forceinline__ void store_sums(
    float* results, const float (&sums)[TILES][4], int warp, int lane) {
#pragma unroll
  for (int t = 0; t < TILES; t++) {
#pragma unroll
    for (int i = 0; i < 4; i++) {
      const int at = t * 8 + lane % 4 * 2 + i % 2;
      const int output = warp * kLinearRows + i / 2 * 8 + lane / 4;
      results[at * kStreamPitch + output] = sums[t][i];
    }
  }
}

// TILES: tiles of eight rows of x. WGMMA: for sm_90a. Grid: weight tiles x blocks per cluster.
template <typename T, int TILES, bool WGMMA>
__global__ void __launch_bounds__(kStreamThreads, 2)
    linear_stream_entry(LINEAR_PARAMETERS, const __grid_constant__ StreamMaps maps) {
#if !defined(__CUDA_ARCH__) || __CUDA_ARCH__ >= 900
  constexpr int kStages = stream_stages(TILES);
  constexpr int kStageBytes = stream_stage_bytes(TILES);
  constexpr int kMultipliers = kStreamRows / kLinearRows;  // warps
  extern __shared__ __align__(1024) unsigned char shared[];
  const unsigned int tiles = paged::shared_address(shared);
  const CopyRing<kStages> ring{tiles + stream_barriers(TILES)};

  const LinearPart<T> parts_of_launch[kLinearMaxWeights] = LINEAR_PARTS;
  const AdapterOperands<T> adapter_operands = ADAPTER_OPERANDS;
  const int num_ranks = cluster_size();
  const int block = blockIdx.x - params.adapters.num_blocks;
  const int rank = block % num_ranks;
  int tile_of_weight = block / num_ranks;
  const int which = weight_of_block(params, kStreamRows, tile_of_weight);
  const int warp = threadIdx.x / 32;
  const int lane = threadIdx.x % 32;

  const int num_chunks = (params.k + kLinearChunk - 1) / kLinearChunk;
  const int chunks_of_part = (num_chunks + kLinearParts - 1) / kLinearParts;
  const int num_parts = kLinearParts / num_ranks;  // of this block
  const int first_chunk = rank * num_parts * chunks_of_part;
  // The last ranks can have fewer turns, or none.
  const int num_turns = min(num_parts * chunks_of_part, num_chunks - first_chunk);

  const bool has_units_alone = int(blockIdx.x) < params.adapters.num_blocks;
  const bool has_units =
      TILES <= kAdapterUnitTiles ? int(blockIdx.x) < params.adapters.num_workers : has_units_alone;
  if (threadIdx.x == 0) {
    ring.begin(kMultipliers);
  }
  __syncthreads();

  if (warp == kMultipliers && lane == 0 && !has_units_alone) {
    // The tile's rows are two runs of a weight: gate and up, or the halves of a head.
    const TileRow low = row_of_tile<kStreamRows, kStreamRows>(params, tile_of_weight, 0);
    const TileRow high =
        row_of_tile<kStreamRows, kStreamRows>(params, tile_of_weight, kStreamRows / 2);
    const CUtensorMap* map_of_low = &maps.weights[which];
    const CUtensorMap* map_of_high = high.is_up ? &maps.weights[1] : map_of_low;
    const paged::CachePolicy once = paged::evict_first();
    const paged::CachePolicy often = paged::evict_last();
    auto copy_weights = [&](int turn) {
      const int stage = turn % kStages;
      ring.expect(stage, turn / kStages, kStageBytes);
      const unsigned int tile = tiles + stage * kStageBytes;
      const int column = (first_chunk + turn) * kLinearChunk;
      ring.copy(stage, tile, map_of_low, column, low.of_weight, once);
      ring.copy(
          stage, tile + kStreamRows / 2 * kLinearChunk * 2, map_of_high, column, high.of_weight,
          once);
    };
    auto copy_x = [&](int turn) {
      const int stage = turn % kStages;
      const unsigned int tile = tiles + stage * kStageBytes + kStreamRows * kLinearChunk * 2;
      ring.copy(stage, tile, &maps.x, (first_chunk + turn) * kLinearChunk, 0, often);
    };
    copy_turns<kStages>(num_turns, copy_weights, copy_x);
  }
  if (has_units && warp < kMultipliers) {
    paged::let_next_kernel_begin();
    const int scratch = WGMMA ? wgmma_scratch(TILES) : stream_scratch(TILES);
    unsigned char* sums = shared + (has_units_alone ? 0 : scratch);
    AdapterUnits<T, kMultipliers, 8>{params, adapter_operands}.run(
        x, reinterpret_cast<float4*>(sums),
        [](const T* row, int chunk) { return load_x(row + 8 * chunk); }, [] {});
  }
  if (has_units_alone) {
    paged::wait_for_kernel_before();
    return;
  }

  using Adapters = AddedAdapters<T, kStreamRows, 8 * TILES, kStreamThreads, 16>;
  constexpr int kResultBytes = 8 * TILES * kStreamPitch * 4;
  static_assert(kResultBytes + Adapters::kBytes <= stream_barriers(TILES));
  auto adapters_of_tile = [&] {
    return Adapters{params, adapter_operands, which, tile_of_weight, tiles + kResultBytes};
  };
  adapters_of_tile().template fetch<0, kMultipliers>(rank, num_ranks);
  float sums[TILES][4] = {};
  if (warp < kMultipliers) {
    if constexpr (WGMMA) {
#ifdef PAGED_HAS_WGMMA
      const PartSums<TILES, true> before(
          reinterpret_cast<float*>(shared + stream_scratch(TILES)), threadIdx.x);
      multiply_parts_together<T>(
          sums, before, ring, tiles, num_parts, chunks_of_part, num_turns, lane);
#endif
    } else {
      multiply_parts<T>(sums, ring, tiles, num_parts, chunks_of_part, num_turns, warp, lane);
    }
  }
  __syncthreads();  // The ring has been read.
  paged::wait_for_kernel_before();

  // Sums of the block, [row of x][row of the weight].
  float* results = reinterpret_cast<float*>(shared);
  if (warp < kMultipliers) {
    store_sums(results, sums, warp, lane);
  }
  if (params.adapters.count == 0) {
    cluster_barrier();
  }

  // Each block finishes some of the outputs.
  finish_rows<T, kStreamRows, kStreamRows>(
      params, parts_of_launch, which, tile_of_weight, residual, rotations, slots,
      [](int at) { return at; }, params.num_rows, rank * kStreamThreads + threadIdx.x,
      num_ranks * kStreamThreads,
      [&](int at, int output) {
        if (num_ranks == 1) {
          return *reinterpret_cast<const float4*>(results + at * kStreamPitch + output);
        }
        const unsigned int address = tiles + (at * kStreamPitch + output) * 4;
        const float none = -0.0f;  // x + -0 is x, even for a zero x of either sign
        float4 sum[kLinearParts];
#pragma unroll
        for (int r = 0; r < kLinearParts; r++) {
          sum[r] = r < num_ranks ? load_of_rank(address, r) : make_float4(none, none, none, none);
        }
        return sum_of_parts(sum);
      },
      adapters_of_tile());
  end_of_cluster();
#endif
}

}  // namespace mlx_paged::cuda
