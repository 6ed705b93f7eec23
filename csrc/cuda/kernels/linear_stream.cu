// Copyright © 2026 the mlx_paged authors. Apache-2.0.
//
// x @ weight.T + bias for up to 64 rows, on sm_90 and later, of up to three weights at once. The
// time is that of reading the weights once, so they must be under way all the time: a block stays
// on its multiprocessor for the whole product, and its warps have copies in flight ahead of what
// they multiply, over the ends of tiles and from before the kernel that makes x has ended.
//
// A cluster of eight blocks divides the columns, a part each, so that what a block needs of x fits
// into its shared memory and is read once. For every tile of the weight the blocks add up their
// sums in each other's shared memory.

#include "../compiled_kernels.h"
#include "linear_math.h"
#include "tensor_core.h"

using namespace mlx_paged::cuda;

namespace {

#if !defined(__CUDA_ARCH__) || __CUDA_ARCH__ >= 900

__device__ __forceinline__ void cluster_barrier() {
  __syncwarp();
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
               : "r"(there)
               : "memory");
  return v;
}

__device__ __forceinline__ float4 sum_of(float4 a, float4 b) {
  return make_float4(a.x + b.x, a.y + b.y, a.z + b.z, a.w + b.w);
}

__device__ __forceinline__ Eight load_shared(unsigned int address) {
  Eight v;
  asm volatile("ld.shared.v4.u32 {%0, %1, %2, %3}, [%4];"
               : "=r"(v.x), "=r"(v.y), "=r"(v.z), "=r"(v.w)
               : "r"(address)
               : "memory");
  return v;
}

__device__ __forceinline__ void store_shared(unsigned int address, Eight v) {
  asm volatile("st.shared.v4.u32 [%0], {%1, %2, %3, %4};" ::"r"(address), "r"(v.x), "r"(v.y),
               "r"(v.z), "r"(v.w)
               : "memory");
}

// What the kernel before may have written: not through the cache of what never changes.
__device__ __forceinline__ Eight load_x(const void* p) {
  Eight v;
  asm volatile("ld.global.v4.u32 {%0, %1, %2, %3}, [%4];"
               : "=r"(v.x), "=r"(v.y), "=r"(v.z), "=r"(v.w)
               : "l"(p)
               : "memory");
  return v;
}

// Where 16 bytes of a chunk lie in a tile: what eight lanes read at once are four pieces of two
// neighbouring rows, and these lie in different banks.
__device__ __forceinline__ unsigned int place(int row, int piece) {
  return (row * 8 + (piece ^ (row & 1) * 4)) * 16;
}

#endif

}  // namespace

// TILES: of eight rows of x. STAGES: chunks of the columns that a warp has room for.
// grid: clusters x blocks of one. A tile has kStreamRows rows of a weight, sixteen of each warp. Of
// gate and up, and of the halves of heads, a warp has eight rows each.
template <typename T, int TILES, int STAGES>
__global__ void __launch_bounds__(kStreamThreads, 1) linear_stream_entry(LINEAR_PARAMETERS) {
#if !defined(__CUDA_ARCH__) || __CUDA_ARCH__ >= 900
  constexpr int kPieces = kLinearChunk / 8;  // of 16 bytes, of a row's chunk
  constexpr int kRowsAtOnce = 32 / kPieces;
  constexpr int kCopies = kLinearRows / kRowsAtOnce;  // of a lane, for a stage
  constexpr int kChunkOfX = TILES * 8 * kLinearChunk * 2;
  constexpr int kStageBytes = kLinearRows * kLinearChunk * 2;  // of a warp
  constexpr int kPitch = stream_result_pitch();
  extern __shared__ __align__(128) unsigned char shared[];

  const LinearPart<T> parts_of_launch[kLinearMostWeights] = LINEAR_PARTS;
  const bool has_heads = params.head_dim > 0;
  const bool has_halves = has_heads || params.is_gated;
  const int outputs = params.is_gated ? kStreamRows / 2 : kStreamRows;  // of a tile
  const int lane = threadIdx.x % 32;
  const int warp = threadIdx.x / 32;
  const int rank = blockIdx.x % kLinearParts;
  const int num_clusters = gridDim.x / kLinearParts;
  const size_t k = params.k;
  const int num_chunks = (params.k + kLinearChunk - 1) / kLinearChunk;
  const int num_turns = (num_chunks + kLinearParts - 1) / kLinearParts;
  int num_tiles = (params.n[0] + outputs - 1) / outputs;
  for (int i = 1; i < kLinearMostWeights; i++) {
    num_tiles +=
        i < params.num_weights && !params.is_gated ? (params.n[i] + outputs - 1) / outputs : 0;
  }

  const unsigned int xs = paged::shared_address(shared);
  const unsigned int ring = xs + num_turns * kChunkOfX + warp * STAGES * kStageBytes;
  const int results_offset = num_turns * kChunkOfX + kStreamWarps * STAGES * kStageBytes;
  float* results = reinterpret_cast<float*>(shared + results_offset);

  // Of a tile: its weight, and the output of its first row. Of heads: of the first half's.
  auto tile_of = [&](int tile, int& first) {
    const int which = weight_of_block(params, outputs, tile);
    first = tile * outputs;
    if (has_heads) {
      const int in_head = params.head_dim / kStreamRows;
      first = tile / in_head * params.head_dim + tile % in_head * (kStreamRows / 2);
    }
    return which;
  };

  // What is copied, ahead of what is multiplied.
  const int piece = lane % kPieces;
  const paged::CachePolicy once = paged::evict_first();
  int next_tile = blockIdx.x / kLinearParts;
  int next_turn = 0;
  int next_stage = 0;
  const T* rows[kCopies];  // of the weight; null: there is none
  auto find_rows = [&]() {
    int first;
    const int which = tile_of(next_tile, first);
    const T* weight = part_of(parts_of_launch, which).weight;
    const int n = part_of(parts_of_launch, which).n;
#pragma unroll
    for (int i = 0; i < kCopies; i++) {
      const int row = i * kRowsAtOnce + lane / kPieces;
      int at = first + warp * kLinearRows + row;
      const T* from = weight;
      if (has_halves) {
        at = first + warp * 8 + row % 8;
        if (row >= 8) {
          from = params.is_gated ? weight_1 : weight;
          at += params.is_gated ? 0 : params.head_dim / 2;
        }
      }
      rows[i] = at < n ? from + at * k : nullptr;
    }
  };
  auto fetch = [&]() {
    if (next_tile < num_tiles) {
      if (next_turn == 0) {
        find_rows();
      }
      const int column = (next_turn * kLinearParts + rank) * kLinearChunk + piece * 8;
      const unsigned int to = ring + next_stage * kStageBytes;
#pragma unroll
      for (int i = 0; i < kCopies; i++) {
        const bool exists = column < params.k && rows[i];
        paged::copy_async(
            to + place(i * kRowsAtOnce + lane / kPieces, piece),
            exists ? rows[i] + column : weight_0, exists, once);
      }
      if (++next_turn == num_turns) {
        next_turn = 0;
        next_tile += num_clusters;
      }
      next_stage = next_stage + 1 == STAGES ? 0 : next_stage + 1;
    }
    paged::commit_copies();
  };
#pragma unroll
  for (int i = 0; i < STAGES - 1; i++) {
    fetch();  // of weights, which no kernel writes
  }
  paged::wait_for_kernel_before();
  paged::let_next_kernel_begin();

  constexpr int kAtOnce = 4;
  const int pieces_of_x = num_turns * TILES * 8 * kPieces;
  for (int first = threadIdx.x; first < pieces_of_x; first += kAtOnce * kStreamThreads) {
    Eight found[kAtOnce];
#pragma unroll
    for (int i = 0; i < kAtOnce; i++) {
      const int p = first + i * kStreamThreads;
      const int row = p / kPieces % (TILES * 8);
      const int column =
          (p / (TILES * 8 * kPieces) * kLinearParts + rank) * kLinearChunk + p % kPieces * 8;
      const bool exists = p < pieces_of_x && column < params.k && row < params.num_rows;
      found[i] =
          exists ? load_x(x + size_t(row) * params.x_stride + column) : make_uint4(0, 0, 0, 0);
    }
#pragma unroll
    for (int i = 0; i < kAtOnce; i++) {
      const int p = first + i * kStreamThreads;
      if (p < pieces_of_x) {
        store_shared(
            xs + p / (TILES * 8 * kPieces) * kChunkOfX +
                place(p / kPieces % (TILES * 8), p % kPieces),
            found[i]);
      }
    }
  }

  // Each block finishes every eighth row of a tile's outputs: four outputs a thread, or four of
  // each half.
  const int mates = has_halves ? kStreamRows / 8 : kStreamRows / 4;
  const int finished = threadIdx.x / mates * kLinearParts + rank;  // row of x
  const int quad = threadIdx.x % mates * 4;
  const int low_sum = has_halves ? quad / 8 * kLinearRows + quad % 8 : quad;
  const int known = min(finished, params.num_rows - 1);
  const float factor = norm_factor<8>(squares + size_t(known) * params.num_squares, params);
  __syncthreads();  // x is there

  int stage = 0;
  int parity = 0;
  for (int tile = blockIdx.x / kLinearParts; tile < num_tiles; tile += num_clusters) {
    float sums[TILES][4] = {};
    for (int turn = 0; turn < num_turns; turn++) {
      paged::wait_for_copies<STAGES - 2>();
      __syncwarp();  // all lanes' copies are there, and the stage before has been read
      fetch();
      const unsigned int of_weight = ring + stage * kStageBytes;
      const unsigned int of_x = xs + turn * kChunkOfX;
#pragma unroll
      for (int step = 0; step < kLinearChunkSteps; step++) {
        const int at = step * 4 + lane % 4;
        const Eight low = load_shared(of_weight + place(lane / 4, at));
        const Eight high = load_shared(of_weight + place(8 + lane / 4, at));
#pragma unroll
        for (int t = 0; t < TILES; t++) {
          const Eight v = load_shared(of_x + place(8 * t + lane / 4, at));
          multiply_step<T>(sums[t], low, high, v);
        }
      }
      stage = stage + 1 == STAGES ? 0 : stage + 1;
    }

    // Sums of the block, [row of x][row of the tile]. Those of the tile before last have been read
    // by all: they have passed the last tile's barrier since.
    const int begin = parity * TILES * 8 * kPitch;
#pragma unroll
    for (int t = 0; t < TILES; t++) {
#pragma unroll
      for (int i = 0; i < 4; i++) {
        const int at = t * 8 + lane % 4 * 2 + i % 2;
        results[begin + at * kPitch + warp * kLinearRows + i / 2 * 8 + lane / 4] = sums[t][i];
      }
    }
    parity ^= 1;
    cluster_barrier();

    int first;
    const int which = tile_of(tile, first);
    const LinearPart<T> ours = part_of(parts_of_launch, which);
    const int column = first + quad;
    if (finished >= params.num_rows || column >= ours.n) {
      continue;
    }
    auto sums_of_cluster = [&](int output, const LinearPart<T>& part, int column, T(&four)[4]) {
      const unsigned int address = xs + results_offset + (begin + finished * kPitch + output) * 4;
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
      const float values[4] = {sum[0].x, sum[0].y, sum[0].z, sum[0].w};
#pragma unroll
      for (int e = 0; e < 4; e++) {
        four[e] = plus(rounded<T>(values[e] * factor), part.bias + column + e, part.has_bias);
      }
    };
    __align__(8) T four[4];
    sums_of_cluster(low_sum, ours, column, four);
    if (has_heads) {
      T high[4];
      sums_of_cluster(low_sum + 8, ours, column + params.head_dim / 2, high);
#pragma unroll
      for (int e = 0; e < 4; e++) {
        write_rotated<T>(
            params, rotations, slots, ours.out, ours.n, which, finished, column + e, four[e],
            high[e]);
      }
      continue;
    }
    if (params.is_gated) {
      T up[4];
      sums_of_cluster(low_sum + 8, parts_of_launch[1], column, up);
#pragma unroll
      for (int e = 0; e < 4; e++) {
        four[e] = gated(four[e], up[e]);
      }
    }
    const size_t to = size_t(finished) * ours.n + column;
#pragma unroll
    for (int e = 0; e < 4; e++) {
      four[e] = plus(four[e], residual + to + e, params.has_residual);
    }
    *reinterpret_cast<unsigned long long*>(ours.out + to) =
        *reinterpret_cast<unsigned long long*>(four);
    if (params.has_next_norm) {
      float squared[4];
#pragma unroll
      for (int e = 0; e < 4; e++) {
        const float v = as_float(four[e]);
        squared[e] = v * v;
        four[e] = rounded<T>(v * as_float(next_norm[column + e]));
      }
      *reinterpret_cast<unsigned long long*>(next_x + to) =
          *reinterpret_cast<unsigned long long*>(four);
      const float sum =
          sum_of_squares<kNormColumns / 4>((squared[0] + squared[1]) + (squared[2] + squared[3]));
      if (quad % kNormColumns == 0) {
        next_squares[to / kNormColumns] = sum;
      }
    }
  }
  paged::wait_for_copies<0>();
  cluster_barrier();  // no block ends while its results are being read
#endif
}

#define LINEAR(dtype, type, tiles, stages) \
  {"linear_stream_" #dtype "_" #tiles, (const void*)linear_stream_entry<type, tiles, stages>},

static const bool added = add_kernels({
    // clang-format off
    PAGED_FOR_EACH_LINEAR_STREAM(LINEAR, float16, __half)
    PAGED_FOR_EACH_LINEAR_STREAM(LINEAR, bfloat16, __nv_bfloat16)
    // clang-format on
});
