// Copyright © 2026 the mlx_paged authors. Apache-2.0.
//
// x @ weight.T + bias for up to 64 rows, on sm_90 and later. As in linear.cu the weight should be
// read once at memory speed, but 64 rows of x are not small next to it: what all blocks read
// of x together is 64 / (a block's rows of the weight) times the weight. So a block has up to 128
// of them, its warps share x through shared memory, and since that makes few blocks, a cluster of
// eight divides the columns, a part each, and adds up the sums in each other's shared memory.

#include "../compiled_kernels.h"
#include "linear_finish.h"
#include "shared_memory.h"
#include "tensor_core.h"

using namespace mlx_paged::cuda;

namespace {

// Where 16 bytes of a chunk lie in a tile: what eight lanes read at once are four pieces of two
// neighbouring rows, and these lie in different banks.
__device__ __forceinline__ unsigned int place(int row, int piece) {
  return (row * 8 + (piece ^ (row & 1) * 4)) * 16;
}

}  // namespace

// TILES: of eight rows of x. ROW_WARPS: of a block, side by side along the rows of the weight.
// STAGES: chunks of the columns that it has room for.
// grid: tiles of the weight x blocks of a cluster.
template <typename T, int TILES, int ROW_WARPS, int STAGES>
__global__ void __launch_bounds__(32 * ROW_WARPS) linear_cluster_entry(LINEAR_PARAMETERS) {
#if !defined(__CUDA_ARCH__) || __CUDA_ARCH__ >= 900
  constexpr int kThreads = 32 * ROW_WARPS;
  constexpr int kRows = cluster_rows(ROW_WARPS);
  constexpr int kStageBytes = cluster_stage_bytes(TILES, ROW_WARPS);
  constexpr int kPieces = kLinearChunk / 8;  // of 16 bytes, of a row's chunk
  constexpr int kAtOnce = kThreads / kPieces;
  extern __shared__ __align__(128) unsigned char shared[];
  const unsigned int ring = paged::shared_address(shared);

  const LinearPart<T> parts_of_launch[kLinearMostWeights] = LINEAR_PARTS;
  int tile_of_weight = blockIdx.x / kLinearParts;
  const int which = weight_of_block(params, kRows, tile_of_weight);
  const LinearPart<T> ours = part_of(parts_of_launch, which);
  const int lane = threadIdx.x % 32;
  const int first_of_warp = threadIdx.x / 32 * kClusterWarpRows;
  const int rank = blockIdx.x % kLinearParts;
  const size_t k = params.k;

  // Each thread copies one piece of every kAtOnce-th row. Of gate and up a warp's tile has sixteen
  // rows each.
  const int piece = threadIdx.x % kPieces;
  const int copied = threadIdx.x / kPieces;
  const paged::CachePolicy once = paged::evict_first();
  auto column_of = [&](int turn) {
    return (turn * kLinearParts + rank) * kLinearChunk + piece * 8;
  };
  const T* rows[kRows / kAtOnce];  // of the weight; null: there is none
#pragma unroll
  for (int i = 0; i < kRows / kAtOnce; i++) {
    const TileRow at =
        row_of_tile<kRows, kClusterWarpRows>(params, tile_of_weight, i * kAtOnce + copied);
    const bool exists = at.of_weight < ours.n;
    rows[i] = exists ? (at.is_up ? weight_1 : ours.weight) + at.of_weight * k : nullptr;
  }
  auto fetch_weights = [&](int turn) {
    const unsigned int tile = ring + turn % STAGES * kStageBytes;
    const int column = column_of(turn);
#pragma unroll
    for (int i = 0; i < kRows / kAtOnce; i++) {
      const bool exists = column < params.k && rows[i];
      paged::copy_async(
          tile + place(i * kAtOnce + copied, piece), exists ? rows[i] + column : ours.weight,
          exists, once);
    }
  };
  auto fetch_xs = [&](int turn) {
    const unsigned int tile = ring + turn % STAGES * kStageBytes;
    const int column = column_of(turn);
#pragma unroll
    for (int r = 0; r < 8 * TILES; r += kAtOnce) {
      const int row = r + copied;
      if (8 * TILES % kAtOnce == 0 || row < 8 * TILES) {
        const bool exists = column < params.k && row < params.num_rows;
        const T* from = exists ? x + size_t(row) * params.x_stride + column : x;
        paged::copy_async(tile + place(kRows + row, piece), from, exists);
      }
    }
  };

  const int num_chunks = (params.k + kLinearChunk - 1) / kLinearChunk;
  const int num_turns = (num_chunks + kLinearParts - 1) / kLinearParts;
#pragma unroll
  for (int turn = 0; turn < STAGES - 1; turn++) {
    if (turn < num_turns) {
      fetch_weights(turn);  // which no kernel writes
    }
  }
  paged::wait_for_kernel_before();
  paged::let_next_kernel_begin();
#pragma unroll
  for (int turn = 0; turn < STAGES - 1; turn++) {
    if (turn < num_turns) {
      fetch_xs(turn);
    }
    paged::commit_copies();
  }
  float sums[2][TILES][4] = {};
  for (int turn = 0; turn < num_turns; turn++) {
    paged::wait_for_copies<STAGES - 2>();
    __syncthreads();  // all threads' copies are there, and the stage before has been read
    if (turn + STAGES - 1 < num_turns) {
      fetch_weights(turn + STAGES - 1);
      fetch_xs(turn + STAGES - 1);
    }
    paged::commit_copies();
    const unsigned int tile = ring + turn % STAGES * kStageBytes;
#pragma unroll
    for (int step = 0; step < kLinearChunkSteps; step++) {
      const int at = step * 4 + lane % 4;
      Eight w[4];  // rows `lane / 4` + 8 i
#pragma unroll
      for (int i = 0; i < 4; i++) {
        w[i] = load_shared(tile + place(first_of_warp + 8 * i + lane / 4, at));
      }
#pragma unroll
      for (int t = 0; t < TILES; t++) {
        const Eight v = load_shared(tile + place(kRows + 8 * t + lane / 4, at));
        multiply_step<T>(sums[0][t], w[0], w[1], v);
        multiply_step<T>(sums[1][t], w[2], w[3], v);
      }
    }
  }
  paged::wait_for_copies<0>();
  __syncthreads();  // the ring has been read

  // Sums of the block, [row of x][row of the weight].
  constexpr int kPitch = cluster_result_pitch(ROW_WARPS);
  float* results = reinterpret_cast<float*>(shared);
#pragma unroll
  for (int g = 0; g < 2; g++) {
#pragma unroll
    for (int t = 0; t < TILES; t++) {
#pragma unroll
      for (int i = 0; i < 4; i++) {
        const int at = t * 8 + lane % 4 * 2 + i % 2;
        const int output = first_of_warp + g * 16 + i / 2 * 8 + lane / 4;
        results[at * kPitch + output] = sums[g][t][i];
      }
    }
  }
  cluster_barrier();

  // Each block finishes every kLinearParts-th part of the outputs.
  finish_rows<T, kRows, kClusterWarpRows>(
      params, parts_of_launch, which, tile_of_weight, residual, rotations, slots, 0,
      params.num_rows, rank * kThreads + threadIdx.x, kLinearParts * kThreads,
      [&](int at, int output) {
        const unsigned int address = ring + (at * kPitch + output) * 4;
        float4 sum[kLinearParts];
#pragma unroll
        for (int r = 0; r < kLinearParts; r++) {
          sum[r] = load_of_rank(address, r);
        }
        return sum_of_parts(sum);
      });
  cluster_barrier();  // no block ends while its results are being read
#endif
}

#define LINEAR(dtype, type, tiles, warps, stages) \
  {"linear_cluster_" #dtype "_" #tiles, linear_cluster_entry<type, tiles, warps, stages>},

static const bool added = add_kernels({
    // clang-format off
    PAGED_FOR_EACH_LINEAR_CLUSTER(LINEAR, float16, __half)
    PAGED_FOR_EACH_LINEAR_CLUSTER(LINEAR, bfloat16, __nv_bfloat16)
    // clang-format on
});
