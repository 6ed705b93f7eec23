// Copyright © 2026 the mlx_paged authors. Apache-2.0.
//
// What the kernels of a linear layer have in common.
//
// The columns of a product can be added up in any order, as long as both operands use the same.
// So a lane takes eight columns in a row, 16 bytes, of each operand and passes them on as the pairs
// that mma.m16n8k16 expects elsewhere: no shuffles.

#pragma once

#include <cuda_bf16.h>
#include <cuda_fp16.h>

#include "../linear_shape.h"

namespace mlx_paged::cuda {

// CUDA's own vector, before Metal's language (msl/) takes its name.
using Eight = uint4;  // elements of 16 bits

}  // namespace mlx_paged::cuda

#include "tensor_core.h"

namespace mlx_paged::cuda {

// One step: rows r and r + 8 of the weight (r: lane / 4) times row r of x.
template <typename T>
__device__ __forceinline__ void multiply_step(float (&sum)[4], Eight low, Eight high, Eight x) {
  paged::multiply_accumulate(sum, {low.x, high.x, low.y, high.y}, {x.x, x.y}, T(0.0f));
  paged::multiply_accumulate(sum, {low.z, high.z, low.w, high.w}, {x.z, x.w}, T(0.0f));
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

// MLX's own rounds the product before it adds.
template <typename T>
__device__ __forceinline__ T finished(float sum, const T* bias, bool has_bias) {
  return rounded<T>(has_bias ? as_float(rounded<T>(sum)) + as_float(*bias) : sum);
}

}  // namespace mlx_paged::cuda
