// Copyright © 2026 the mlx_paged authors. Apache-2.0.
//
// x @ weight.T + bias for the few rows of a decode step and up to three weights in one launch. Runs
// at memory speed: the weights are read once, straight into registers as the left operand of
// mma.m16n8k16, with eight rows of x as the right one. Shared memory is used only for the final
// sums.

#include "../compiled_kernels.h"
#include "linear_math.h"
#include "shared_memory.h"

using namespace mlx_paged::cuda;

namespace {

__device__ __forceinline__ Eight load_weight(const void* p) {
  Eight v;
  asm volatile("ld.global.nc.L1::no_allocate.v4.u32 {%0, %1, %2, %3}, [%4];"
               : "=r"(v.x), "=r"(v.y), "=r"(v.z), "=r"(v.w)
               : "l"(p));
  return v;
}

}  // namespace

// Computes GROUPS tiles of 16 weight rows for TILES tiles of 8 x rows. A block's warps split the
// columns; each loads CHUNKS chunks while it multiplies the previous ones. HEADS: the outputs are
// heads of queries, keys and values (LinearParams::head_dim). Gated launches use GROUPS == 2: one
// group of gate, one of up.
//
// Grid: (weight rows, x rows), so blocks that read the same weight rows run at the same time.
template <typename T, int TILES, int GROUPS, int CHUNKS, bool HEADS>
__global__ void __launch_bounds__(32 * kLinearParts) linear_entry(LINEAR_PARAMETERS) {
  constexpr int kRows = GROUPS * kLinearRows;
  constexpr int kSteps = CHUNKS * kLinearChunkSteps;
  constexpr int kStride =
      kLinearParts * kLinearChunkSteps;  // steps between consecutive chunks of a warp
  const LinearPart<T> parts_of_launch[kLinearMaxWeights] = LINEAR_PARTS;
  const bool is_gated = GROUPS == 2 && params.is_gated;
  int block = blockIdx.x;
  const int which = weight_of_block(params, kRows, block);
  const T* weight = part_of(parts_of_launch, which).weight;
  const int lane = threadIdx.x % 32;
  const int warp = threadIdx.x / 32;
  const int row = lane / 4;         // within a tile of the weight and of x
  const int column = lane % 4 * 8;  // within a step
  const size_t k = params.k;
  const int first = block * (is_gated ? kLinearRows : kRows);
  const int first_x = blockIdx.y * TILES * 8;
  const int num_rows = params.num_rows - first_x;
  const size_t to_second = (HEADS ? params.head_dim / 2 : 8) * k;
  const T* weights[GROUPS];
#pragma unroll
  for (int g = 0; g < GROUPS; g++) {
    const T* from = is_gated ? (g == 0 ? weight_0 : weight_1) : weight + g * kLinearRows * k;
    weights[g] = from + (first + row) * k + column;
    if constexpr (HEADS) {
      const int at = head_row(block * GROUPS + g, kLinearRows, params.head_dim, row).first;
      weights[g] = weight + at * k + column;
    }
  }
  const T* xs = x + size_t(first_x + row) * params.x_stride + column;
  const int num_steps = params.k / kLinearStep;
  const Eight zero = make_uint4(0, 0, 0, 0);

  Eight next_weights[kSteps][2 * GROUPS];  // rows `row` and `row + 8` of each group
  Eight next_xs[kSteps][TILES];
  auto step_of = [&](int begin, int u) {
    return begin + u / kLinearChunkSteps * kStride + u % kLinearChunkSteps;
  };
  auto fetch_weights = [&](int begin) {
#pragma unroll
    for (int u = 0; u < kSteps; u++) {
      const int step = step_of(begin, u);
#pragma unroll
      for (int g = 0; g < 2 * GROUPS; g++) {
        const T* at = weights[g / 2] + g % 2 * to_second + step * kLinearStep;
        next_weights[u][g] = step < num_steps ? load_weight(at) : zero;
      }
    }
  };
  auto fetch_xs = [&](int begin) {
#pragma unroll
    for (int u = 0; u < kSteps; u++) {
      const int step = step_of(begin, u);
#pragma unroll
      for (int t = 0; t < TILES; t++) {
        const T* at = xs + size_t(t) * 8 * params.x_stride + step * kLinearStep;
        const bool inside = step < num_steps && t * 8 + row < num_rows;
        next_xs[u][t] = inside ? load_x(at) : zero;
      }
    }
  };

  float sums[GROUPS][TILES][4] = {};
  int begin = warp * kLinearChunkSteps;
  fetch_weights(begin);  // No kernel writes weights, so this need not wait.
  paged::begin_after_kernel_before();
  fetch_xs(begin);
  while (begin < num_steps) {
    Eight w[kSteps][2 * GROUPS];
    Eight v[kSteps][TILES];
#pragma unroll
    for (int u = 0; u < kSteps; u++) {
#pragma unroll
      for (int g = 0; g < 2 * GROUPS; g++) {
        w[u][g] = next_weights[u][g];
      }
#pragma unroll
      for (int t = 0; t < TILES; t++) {
        v[u][t] = next_xs[u][t];
      }
    }
    begin += CHUNKS * kStride;
    fetch_weights(begin);
    fetch_xs(begin);
#pragma unroll
    for (int u = 0; u < kSteps; u++) {
#pragma unroll
      for (int g = 0; g < GROUPS; g++) {
#pragma unroll
        for (int t = 0; t < TILES; t++) {
          multiply_step<T>(sums[g][t], w[u][2 * g], w[u][2 * g + 1], v[u][t]);
        }
      }
    }
  }

  // Partial sums of each warp: [row of x][row of the weight].
  extern __shared__ float parts[];
  constexpr int kPitch = kRows + 1;
  auto part = [&](int w, int at, int output) -> float& {
    return parts[(w * TILES * 8 + at) * kPitch + output];
  };
#pragma unroll
  for (int g = 0; g < GROUPS; g++) {
#pragma unroll
    for (int t = 0; t < TILES; t++) {
      const int at = t * 8 + lane % 4 * 2;
      const int output = g * kLinearRows + row;
      part(warp, at, output) = sums[g][t][0];
      part(warp, at + 1, output) = sums[g][t][1];
      part(warp, at, output + 8) = sums[g][t][2];
      part(warp, at + 1, output + 8) = sums[g][t][3];
    }
  }
  __syncthreads();
  auto sum_of_parts = [&](int at, int output) {
    float sum[kLinearParts];
#pragma unroll
    for (int w = 0; w < kLinearParts; w++) {
      sum[w] = part(w, at, output);
    }
#pragma unroll
    for (int apart = 1; apart < kLinearParts; apart *= 2) {
#pragma unroll
      for (int w = 0; w < kLinearParts; w += 2 * apart) {
        sum[w] += sum[w + apart];
      }
    }
    return rounded<T>(sum[0]);
  };
  const LinearPart<T> ours = part_of(parts_of_launch, which);
  if constexpr (HEADS) {
    for (int i = threadIdx.x; i < TILES * 8 * (kRows / 2); i += 32 * kLinearParts) {
      const int at = i / (kRows / 2);
      const int g = i % (kRows / 2) / 8;
      const int output = g * kLinearRows + i % 8;
      if (at >= num_rows) {
        break;
      }
      const int low = head_row(block * GROUPS + g, kLinearRows, params.head_dim, i % 8).first;
      const int high = low + params.head_dim / 2;
      T lows[1] = {plus(sum_of_parts(at, output), ours.bias + low, ours.has_bias)};
      T highs[1] = {plus(sum_of_parts(at, output + 8), ours.bias + high, ours.has_bias)};
      write_rotated(
          params, rotations, slots, ours.out, ours.n, which, first_x + at, low, lows, highs);
    }
    return;
  }
  const int outputs = is_gated ? kLinearRows : kRows;
  for (int i = threadIdx.x; i < TILES * 8 * outputs; i += 32 * kLinearParts) {
    const int at = i / outputs;
    const int output = i % outputs;
    if (at >= num_rows) {
      break;
    }
    const int column = first + output;
    T value = plus(sum_of_parts(at, output), ours.bias + column, ours.has_bias);
    if (is_gated) {
      const LinearPart<T>& up = parts_of_launch[1];
      value =
          gated(value, plus(sum_of_parts(at, kLinearRows + output), up.bias + column, up.has_bias));
    }
    const size_t to = size_t(first_x + at) * ours.n + column;
    ours.out[to] = plus(value, residual + to, params.has_residual);
  }
}

#define LINEAR(name, dtype, type, tiles, groups, chunks, heads) \
  {name "_" #dtype "_" #tiles "_" #groups, linear_entry<type, tiles, groups, chunks, heads>},
#define LINEAR_TILES(dtype, type)                    \
  LINEAR("linear", dtype, type, 1, 1, 2, false)      \
  LINEAR("linear", dtype, type, 2, 1, 1, false)      \
  LINEAR("linear", dtype, type, 4, 1, 1, false)      \
  LINEAR("linear", dtype, type, 1, 2, 1, false)      \
  LINEAR("linear", dtype, type, 2, 2, 1, false)      \
  LINEAR("linear", dtype, type, 4, 2, 1, false)      \
  LINEAR("linear_heads", dtype, type, 1, 1, 2, true) \
  LINEAR("linear_heads", dtype, type, 2, 1, 1, true) \
  LINEAR("linear_heads", dtype, type, 4, 1, 1, true) \
  LINEAR("linear_heads", dtype, type, 4, 2, 1, true)

static const bool added = add_kernels({
    // clang-format off
    LINEAR_TILES(float16, __half)
    LINEAR_TILES(bfloat16, __nv_bfloat16)
    // clang-format on
});
