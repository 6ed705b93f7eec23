// Copyright © 2026 the mlx_paged authors. Apache-2.0.
//
// x @ weight.T + bias for up to 64 rows, on sm_90 and later. As in linear.cu the weight should be
// read once at memory speed, but 64 rows of x are not small next to it: what all blocks read
// of x together is 64 / (a block's rows of the weight) times the weight. So a block has up to 128
// of them, its warps share x through shared memory, and since that makes few blocks, a cluster of
// eight divides the columns, a part each, and adds up the sums in each other's shared memory.

#include "../compiled_kernels.h"
#include "linear_math.h"
#include "tensor_core.h"

using namespace mlx_paged::cuda;

namespace {

#if !defined(__CUDA_ARCH__) || __CUDA_ARCH__ >= 900

__device__ __forceinline__ void cluster_barrier() {
  asm volatile(
      "barrier.cluster.arrive.aligned;\n"
      "barrier.cluster.wait.aligned;" ::
          : "memory");
}

// float4 floats at the same place in the shared memory of block `rank` of the cluster.
__device__ __forceinline__ float4 load_of_rank(unsigned int address, int rank) {
  unsigned int there;
  asm("mapa.shared::cluster.u32 %0, %1, %2;" : "=r"(there) : "r"(address), "r"(rank));
  float4 v;
  asm volatile("ld.shared::cluster.v4.f32 {%0, %1, %2, %3}, [%4];"
               : "=f"(v.x), "=f"(v.y), "=f"(v.z), "=f"(v.w)
               : "r"(there));
  return v;
}

__device__ __forceinline__ float4 sum_of(float4 a, float4 b) {
  return make_float4(a.x + b.x, a.y + b.y, a.z + b.z, a.w + b.w);
}

__device__ __forceinline__ Eight load_shared(unsigned int address) {
  Eight v;
  asm volatile("ld.shared.v4.u32 {%0, %1, %2, %3}, [%4];"
               : "=r"(v.x), "=r"(v.y), "=r"(v.z), "=r"(v.w)
               : "r"(address));
  return v;
}

// Where 16 bytes of a chunk lie in a tile: what eight lanes read at once are four pieces of two
// neighbouring rows, and these lie in different banks.
__device__ __forceinline__ unsigned int place(int row, int piece) {
  return (row * 8 + (piece ^ (row & 1) * 4)) * 16;
}

#endif

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
  const int outputs = params.is_gated ? kRows / 2 : kRows;  // of the block
  int tile_of_weight = blockIdx.x / kLinearParts;
  const int which = weight_of_block(params, kRows, tile_of_weight);
  const LinearPart<T> ours = part_of(parts_of_launch, which);
  const int lane = threadIdx.x % 32;
  const int first_of_warp = threadIdx.x / 32 * kClusterWarpRows;
  const int rank = blockIdx.x % kLinearParts;
  const int first = tile_of_weight * outputs;
  const size_t k = params.k;
  const bool has_heads = params.head_dim > 0;
  // Threads that finish a row of x: with four outputs each, of heads four of each half.
  const int mates = has_heads ? outputs / 8 : outputs / 4;

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
    const int row = i * kAtOnce + copied;
    int of_weight = first + row;
    if (has_heads) {
      const HeadRow at = head_row(tile_of_weight, kRows, params.head_dim, row);
      of_weight = at.first + at.is_second * (params.head_dim / 2);
    } else if (params.is_gated) {
      constexpr int kHalf = kClusterWarpRows / 2;
      of_weight = first + row / kClusterWarpRows * kHalf + row % kHalf;
    }
    const bool is_up = params.is_gated && row % kClusterWarpRows >= kClusterWarpRows / 2;
    rows[i] = of_weight < ours.n ? (is_up ? weight_1 : ours.weight) + of_weight * k : nullptr;
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

  // Each block finishes every kLinearParts-th part of the outputs, four side by side a thread.
  auto sums_of_cluster = [&](int at, int output) {
    const unsigned int address = ring + (at * kPitch + output) * 4;
    float4 sum[kLinearParts];
#pragma unroll
    for (int r = 0; r < kLinearParts; r++) {
      sum[r] = load_of_rank(address, r);
    }
#pragma unroll
    for (int apart = 1; apart < kLinearParts; apart *= 2) {
#pragma unroll
      for (int r = 0; r < kLinearParts; r += 2 * apart) {
        sum[r] = sum_of(sum[r], sum[r + apart]);
      }
    }
    return sum[0];
  };
  auto with_bias = [&](float4 sum, const LinearPart<T>& part, int column, T(&four)[4]) {
    const float values[4] = {sum.x, sum.y, sum.z, sum.w};
#pragma unroll
    for (int e = 0; e < 4; e++) {
      four[e] = plus(rounded<T>(values[e]), part.bias + column + e, part.has_bias);
    }
  };
  for (int i = rank * kThreads + threadIdx.x; i < params.num_rows * mates;
       i += kLinearParts * kThreads) {
    const int at = i / mates;
    if (has_heads) {
      const int unit = min(kRows, params.head_dim);
      const int of_half = i % mates * 4;  // among the block's first halves
      const int output = of_half / (unit / 2) * unit + of_half % (unit / 2);
      const int low = head_row(tile_of_weight, kRows, params.head_dim, output).first;
      if (low >= ours.n) {
        continue;
      }
      T lows[4];
      T highs[4];
      with_bias(sums_of_cluster(at, output), ours, low, lows);
      with_bias(sums_of_cluster(at, output + unit / 2), ours, low + params.head_dim / 2, highs);
#pragma unroll
      for (int e = 0; e < 4; e++) {
        write_rotated<T>(
            params, rotations, slots, ours.out, ours.n, which, at, low + e, lows[e], highs[e]);
      }
      continue;
    }
    const int output = i % mates * 4;
    const int column = first + output;
    if (column >= ours.n) {
      continue;
    }
    __align__(8) T four[4];
    if (params.is_gated) {
      // A warp's tile: sixteen of gate, then sixteen of up.
      constexpr int kHalf = kClusterWarpRows / 2;
      const int gate = output / kHalf * kClusterWarpRows + output % kHalf;
      T up[4];
      with_bias(sums_of_cluster(at, gate), ours, column, four);
      with_bias(sums_of_cluster(at, gate + kHalf), parts_of_launch[1], column, up);
#pragma unroll
      for (int e = 0; e < 4; e++) {
        four[e] = gated(four[e], up[e]);
      }
    } else {
      with_bias(sums_of_cluster(at, output), ours, column, four);
    }
    const size_t to = size_t(at) * ours.n + column;
#pragma unroll
    for (int e = 0; e < 4; e++) {
      four[e] = plus(four[e], residual + to + e, params.has_residual);
    }
    *reinterpret_cast<unsigned long long*>(ours.out + to) =
        *reinterpret_cast<unsigned long long*>(four);
  }
  cluster_barrier();  // no block ends while its results are being read
#endif
}

#define LINEAR(dtype, type, tiles, warps, stages) \
  {"linear_cluster_" #dtype "_" #tiles,           \
   (const void*)linear_cluster_entry<type, tiles, warps, stages>},

static const bool added = add_kernels({
    // clang-format off
    PAGED_FOR_EACH_LINEAR_CLUSTER(LINEAR, float16, __half)
    PAGED_FOR_EACH_LINEAR_CLUSTER(LINEAR, bfloat16, __nv_bfloat16)
    // clang-format on
});
