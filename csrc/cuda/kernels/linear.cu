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

constexpr int kUnroll = 4;  // steps whose weights are under way at once

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

// TILES: of eight rows of x.
template <typename T, int TILES>
__global__ void __launch_bounds__(32 * kLinearWarps) linear_entry(
    const T* __restrict__ x, const T* __restrict__ weight, const T* __restrict__ bias,
    T* __restrict__ out, const __grid_constant__ LinearParams params) {
  const int lane = threadIdx.x % 32;
  const int warp = threadIdx.x / 32;
  const int row = lane / 4;         // of a tile, of the weight and of x
  const int column = lane % 4 * 8;  // of a step
  const size_t k = params.k;
  const int first = blockIdx.x * kLinearRows;
  const T* w0 = weight + (first + row) * k + column;
  const T* w8 = w0 + 8 * k;
  const T* xs = x + row * k + column;
  const int num_steps = params.k / kLinearStep;
  const uint4 zero = make_uint4(0, 0, 0, 0);

  uint4 low[kUnroll];
  uint4 high[kUnroll];
  auto fetch = [&](int begin) {
#pragma unroll
    for (int u = 0; u < kUnroll; u++) {
      bool inside = begin + u < num_steps;
      low[u] = inside ? load_weight(w0 + (begin + u) * kLinearStep) : zero;
      high[u] = inside ? load_weight(w8 + (begin + u) * kLinearStep) : zero;
    }
  };

  float sums[TILES][4] = {};
  int begin = warp * kUnroll;
  fetch(begin);
  while (begin < num_steps) {
    const int next = begin + kLinearWarps * kUnroll;
    uint4 a[kUnroll];
    uint4 b[kUnroll];
#pragma unroll
    for (int u = 0; u < kUnroll; u++) {
      a[u] = low[u];
      b[u] = high[u];
    }
    fetch(next);
#pragma unroll
    for (int u = 0; u < kUnroll; u++) {
#pragma unroll
      for (int t = 0; t < TILES; t++) {
        uint4 v = zero;
        if (begin + u < num_steps && t * 8 + row < params.num_rows) {
          v = __ldg(reinterpret_cast<const uint4*>(xs + t * 8 * k + (begin + u) * kLinearStep));
        }
        multiply_add<T>(sums[t], a[u].x, b[u].x, a[u].y, b[u].y, v.x, v.y);
        multiply_add<T>(sums[t], a[u].z, b[u].z, a[u].w, b[u].w, v.z, v.w);
      }
    }
    begin = next;
  }

  // Of each warp, [row of x][row of the weight].
  __shared__ float parts[kLinearWarps][TILES * 8][kLinearRows + 1];
#pragma unroll
  for (int t = 0; t < TILES; t++) {
    const int at = t * 8 + lane % 4 * 2;
    parts[warp][at][row] = sums[t][0];
    parts[warp][at + 1][row] = sums[t][1];
    parts[warp][at][row + 8] = sums[t][2];
    parts[warp][at + 1][row + 8] = sums[t][3];
  }
  __syncthreads();
  for (int i = threadIdx.x; i < TILES * 8 * kLinearRows; i += 32 * kLinearWarps) {
    const int at = i / kLinearRows;
    const int output = i % kLinearRows;
    if (at >= params.num_rows) {
      break;
    }
    float sum = 0;
#pragma unroll
    for (int w = 0; w < kLinearWarps; w++) {
      sum += parts[w][at][output];
    }
    if (params.has_bias) {
      // MLX's own rounds the product before it adds.
      sum = as_float(rounded<T>(sum)) + as_float(bias[first + output]);
    }
    out[size_t(at) * params.n + first + output] = rounded<T>(sum);
  }
}

}  // namespace

#define LINEAR(dtype, type, tiles) \
  {"linear_" #dtype "_" #tiles, (const void*)linear_entry<type, tiles>},

static const bool added = mlx_paged::cuda::add_kernels({
    // clang-format off
    LINEAR(float16, __half, 1)
    LINEAR(float16, __half, 2)
    LINEAR(float16, __half, 4)
    LINEAR(bfloat16, __nv_bfloat16, 1)
    LINEAR(bfloat16, __nv_bfloat16, 2)
    LINEAR(bfloat16, __nv_bfloat16, 4)
    // clang-format on
});
