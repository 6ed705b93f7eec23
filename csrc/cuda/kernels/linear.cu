// Copyright © 2026 the mlx_paged authors. Apache-2.0.
//
// x @ weight.T + bias for the few rows of a decode step. The weight is read once, at memory speed,
// and that is all the time there is: its rows are the left operand of mma.m16n8k16, eight rows of x
// the right one.
//
// A product does not care in which order its columns are added up, as long as both operands agree.
// So a lane reads eight columns in a row, 16 bytes, of each operand and passes them on as the pairs
// that the instruction expects elsewhere: no shared memory and no shuffles.

#include <cuda_bf16.h>
#include <cuda_fp16.h>

#include "../kernel_table.h"
#include "../linear_params.h"

namespace {

using mlx_paged::cuda::kLinearRows;
using mlx_paged::cuda::kLinearStep;
using mlx_paged::cuda::kLinearWarps;
using mlx_paged::cuda::LinearParams;

__device__ __forceinline__ uint4 load_weight(const void* p) {
  uint4 v;
  asm volatile("ld.global.nc.L1::no_allocate.v4.u32 {%0, %1, %2, %3}, [%4];"
               : "=r"(v.x), "=r"(v.y), "=r"(v.z), "=r"(v.w)
               : "l"(p));
  return v;
}

template <typename T>
__device__ __forceinline__ void multiply_add(
    float (&sum)[4], unsigned a0, unsigned a1, unsigned a2, unsigned a3, unsigned b0, unsigned b1);

template <>
__device__ __forceinline__ void multiply_add<__nv_bfloat16>(
    float (&sum)[4], unsigned a0, unsigned a1, unsigned a2, unsigned a3, unsigned b0, unsigned b1) {
  asm("mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32 {%0, %1, %2, %3}, {%4, %5, %6, %7}, "
      "{%8, %9}, {%0, %1, %2, %3};"
      : "+f"(sum[0]), "+f"(sum[1]), "+f"(sum[2]), "+f"(sum[3])
      : "r"(a0), "r"(a1), "r"(a2), "r"(a3), "r"(b0), "r"(b1));
}

template <>
__device__ __forceinline__ void multiply_add<__half>(
    float (&sum)[4], unsigned a0, unsigned a1, unsigned a2, unsigned a3, unsigned b0, unsigned b1) {
  asm("mma.sync.aligned.m16n8k16.row.col.f32.f16.f16.f32 {%0, %1, %2, %3}, {%4, %5, %6, %7}, "
      "{%8, %9}, {%0, %1, %2, %3};"
      : "+f"(sum[0]), "+f"(sum[1]), "+f"(sum[2]), "+f"(sum[3])
      : "r"(a0), "r"(a1), "r"(a2), "r"(a3), "r"(b0), "r"(b1));
}

__device__ __forceinline__ float as_float(__nv_bfloat16 v) {
  return __bfloat162float(v);
}
__device__ __forceinline__ float as_float(__half v) {
  return __half2float(v);
}
template <typename T>
__device__ __forceinline__ T rounded(float v);
template <>
__device__ __forceinline__ __nv_bfloat16 rounded(float v) {
  return __float2bfloat16(v);
}
template <>
__device__ __forceinline__ __half rounded(float v) {
  return __float2half(v);
}

}  // namespace

// TILES: of eight rows of x. GROUPS: of sixteen rows of the weight, which share what is read of x.
// UNROLL: steps that are read at once, while those before are multiplied.
template <typename T, int TILES, int GROUPS, int UNROLL>
__global__ void __launch_bounds__(32 * kLinearWarps) linear_entry(
    const T* __restrict__ x, const T* __restrict__ weight, const T* __restrict__ bias,
    T* __restrict__ out, const __grid_constant__ LinearParams params) {
  constexpr int kRows = GROUPS * kLinearRows;
  const int lane = threadIdx.x % 32;
  const int warp = threadIdx.x / 32;
  const int row = lane / 4;         // of a tile, of the weight and of x
  const int column = lane % 4 * 8;  // of a step
  const size_t k = params.k;
  const int first = blockIdx.x * kRows;
  const T* weights = weight + (first + row) * k + column;
  const T* xs = x + row * k + column;
  const int num_steps = params.k / kLinearStep;
  const uint4 zero = make_uint4(0, 0, 0, 0);

  uint4 next_weights[UNROLL][2 * GROUPS];  // rows `row` and `row + 8` of each group
  uint4 next_xs[UNROLL][TILES];
  auto fetch = [&](int begin) {
#pragma unroll
    for (int u = 0; u < UNROLL; u++) {
      const bool inside = begin + u < num_steps;
#pragma unroll
      for (int g = 0; g < 2 * GROUPS; g++) {
        const T* at = weights + g * 8 * k + (begin + u) * kLinearStep;
        next_weights[u][g] = inside ? load_weight(at) : zero;
      }
#pragma unroll
      for (int t = 0; t < TILES; t++) {
        const T* at = xs + t * 8 * k + (begin + u) * kLinearStep;
        next_xs[u][t] = inside && t * 8 + row < params.num_rows
                            ? __ldg(reinterpret_cast<const uint4*>(at))
                            : zero;
      }
    }
  };

  float sums[GROUPS][TILES][4] = {};
  int begin = warp * UNROLL;
  fetch(begin);
  while (begin < num_steps) {
    uint4 w[UNROLL][2 * GROUPS];
    uint4 v[UNROLL][TILES];
#pragma unroll
    for (int u = 0; u < UNROLL; u++) {
#pragma unroll
      for (int g = 0; g < 2 * GROUPS; g++) {
        w[u][g] = next_weights[u][g];
      }
#pragma unroll
      for (int t = 0; t < TILES; t++) {
        v[u][t] = next_xs[u][t];
      }
    }
    begin += kLinearWarps * UNROLL;
    fetch(begin);
#pragma unroll
    for (int u = 0; u < UNROLL; u++) {
#pragma unroll
      for (int g = 0; g < GROUPS; g++) {
        const uint4 low = w[u][2 * g];
        const uint4 high = w[u][2 * g + 1];
#pragma unroll
        for (int t = 0; t < TILES; t++) {
          multiply_add<T>(sums[g][t], low.x, high.x, low.y, high.y, v[u][t].x, v[u][t].y);
          multiply_add<T>(sums[g][t], low.z, high.z, low.w, high.w, v[u][t].z, v[u][t].w);
        }
      }
    }
  }

  // Of each warp, [row of x][row of the weight].
  extern __shared__ float parts[];
  constexpr int kStride = kRows + 1;
  auto part = [&](int w, int at, int output) -> float& {
    return parts[(w * TILES * 8 + at) * kStride + output];
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
  for (int i = threadIdx.x; i < TILES * 8 * kRows; i += 32 * kLinearWarps) {
    const int at = i / kRows;
    const int output = i % kRows;
    if (at >= params.num_rows) {
      break;
    }
    float sum = 0;
#pragma unroll
    for (int w = 0; w < kLinearWarps; w++) {
      sum += part(w, at, output);
    }
    if (params.has_bias) {
      // MLX's own rounds the product before it adds.
      sum = as_float(rounded<T>(sum)) + as_float(bias[first + output]);
    }
    out[size_t(at) * params.n + first + output] = rounded<T>(sum);
  }
}

#define LINEAR(dtype, type, tiles, groups, unroll) \
  {"linear_" #dtype "_" #tiles "_" #groups, (const void*)linear_entry<type, tiles, groups, unroll>},
#define LINEAR_TILES(dtype, type) \
  LINEAR(dtype, type, 1, 1, 4)    \
  LINEAR(dtype, type, 2, 1, 2)    \
  LINEAR(dtype, type, 4, 1, 2)    \
  LINEAR(dtype, type, 1, 2, 2)    \
  LINEAR(dtype, type, 2, 2, 2)    \
  LINEAR(dtype, type, 4, 2, 2)

static const bool added = mlx_paged::cuda::add_kernels({
    // clang-format off
    LINEAR_TILES(float16, __half)
    LINEAR_TILES(bfloat16, __nv_bfloat16)
    // clang-format on
});
