// Copyright © 2026 the mlx_paged authors. Apache-2.0.
//
// Helpers shared by the kernels of linear layers.
//
// A product can sum its columns in any order as long as both operands agree. So a lane loads eight
// consecutive columns (16 bytes) of each operand and passes them as the column pairs of
// mma.m16n8k16, without shuffles.

#pragma once

#include <cuda_bf16.h>
#include <cuda_fp16.h>

#include "../linear_shape.h"

namespace mlx_paged::cuda {

// An alias for CUDA's uint4, defined before Metal's language (msl/) takes the name.
using Eight = uint4;  // eight 16-bit elements

}  // namespace mlx_paged::cuda

#include "dependent_launch.h"
#include "tensor_core.h"

namespace mlx_paged::cuda {

// Multiplies rows r and r + 8 of the weight by row r of x, for one step (r = lane / 4).
template <typename T>
__device__ __forceinline__ void multiply_step(float (&sum)[4], Eight low, Eight high, Eight x) {
  paged::multiply_accumulate(sum, {low.x, high.x, low.y, high.y}, {x.x, x.y}, T(0.0f));
  paged::multiply_accumulate(sum, {low.z, high.z, low.w, high.w}, {x.z, x.w}, T(0.0f));
}

// 0, but not before all sums are known, and so all that they were computed from has been loaded.
// `count`: a number that is not negative, which the compiler cannot know.
template <int COUNT>
__device__ __forceinline__ unsigned int none_after(const float (&sums)[COUNT][4], int count) {
  unsigned int bits = 0;
#pragma unroll
  for (int i = 0; i < COUNT; i++) {
    bits ^= __float_as_uint(sums[i][0]);
  }
  return bits & static_cast<unsigned int>(count >> 31);
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

// Rounds the product before adding, as MLX does.
template <typename T>
__device__ __forceinline__ T plus(T sum, const T* added, bool exists) {
  return exists ? rounded<T>(as_float(sum) + as_float(*added)) : sum;
}

// silu(gate) * up, as metal/layer.h computes it.
template <typename T>
__device__ __forceinline__ T gated(T gate, T up) {
  float g = as_float(gate);
  return rounded<T>(as_float(up) * (g / (1.0f + expf(-g))));
}

// Destination of row `at` of x: a query row or a pool slot. Negative: do not write.
__device__ __forceinline__ int row_of_head(const int* slots, int weight, int at) {
  return weight == 0 ? at : slots[at];
}

// Rotates two elements that are half a head apart.
template <typename T>
__device__ __forceinline__ void rotate(T& low, T& high, float cosine, float sine) {
  const float a = as_float(low);
  const float b = as_float(high);
  low = rounded<T>(a * cosine - b * sine);
  high = rounded<T>(a * sine + b * cosine);
}

// Writes N adjacent elements (1 or 4) of row `at` and their partners half a head later, rotating
// those of queries and keys. `column`: the first element's column in its weight's output.
template <int N, typename T>
__device__ __forceinline__ void write_rotated(
    const LinearParams& params, const float* rotations, const int* slots, T* out, int n, int weight,
    int at, int column, T (&lows)[N], T (&highs)[N]) {
  static_assert(N == 1 || N == 4);
  const int half = params.head_dim / 2;
  const int row = row_of_head(slots, weight, at);
  if (row < 0) {
    return;
  }
  const float* angles = rotations + size_t(at) * params.head_dim + column % params.head_dim;
  T* to = out + size_t(row) * n + column;
  if constexpr (N == 1) {
    if (weight < 2) {
      rotate(lows[0], highs[0], angles[0], angles[half]);
    }
    to[0] = lows[0];
    to[half] = highs[0];
  } else {
    using Four = unsigned long long;  // four elements
    if (weight < 2) {
      const float4 cosines = *reinterpret_cast<const float4*>(angles);
      const float4 sines = *reinterpret_cast<const float4*>(angles + half);
      rotate(lows[0], highs[0], cosines.x, sines.x);
      rotate(lows[1], highs[1], cosines.y, sines.y);
      rotate(lows[2], highs[2], cosines.z, sines.z);
      rotate(lows[3], highs[3], cosines.w, sines.w);
    }
    *reinterpret_cast<Four*>(to) = *reinterpret_cast<Four*>(lows);
    *reinterpret_cast<Four*>(to + half) = *reinterpret_cast<Four*>(highs);
  }
}

// Operands and output of one weight of a launch.
template <typename T>
struct LinearPart {
  const T* weight;
  const T* bias;
  T* out;
  int n;
  bool has_bias;
};

// Operands of the adapters of a launch (linear_adapters.h).
#define ADAPTER_PARAMETERS                                                                         \
  float *hidden, const int *adapters, unsigned int *finished, const T *__restrict__ a_of_target_0, \
      const T *__restrict__ a_of_target_1, const T *__restrict__ a_of_target_2,                    \
      const T *__restrict__ b_of_weight_0, const T *__restrict__ b_of_weight_1,                    \
      const T *__restrict__ b_of_weight_2

#define ADAPTER_OPERANDS                                                         \
  {                                                                              \
    hidden, adapters, finished, {a_of_target_0, a_of_target_1, a_of_target_2}, { \
      b_of_weight_0, b_of_weight_1, b_of_weight_2                                \
    }                                                                            \
  }

// Parameters of every kernel for unquantized linear layers.
#define LINEAR_PARAMETERS                                                     \
  const T *__restrict__ x, const T *residual, const T *__restrict__ weight_0, \
      const T *__restrict__ bias_0, T *out_0, const T *__restrict__ weight_1, \
      const T *__restrict__ bias_1, T *out_1, const T *__restrict__ weight_2, \
      const T *__restrict__ bias_2, T *out_2, const float *rotations,         \
      const int *__restrict__ slots, ADAPTER_PARAMETERS,                      \
      const __grid_constant__ LinearParams params

#define LINEAR_PARTS                                                \
  {{weight_0, bias_0, out_0, params.n[0], params.has_bias[0] != 0}, \
   {weight_1, bias_1, out_1, params.n[1], params.has_bias[1] != 0}, \
   {weight_2, bias_2, out_2, params.n[2], params.has_bias[2] != 0}}

// Selects by comparison: dynamic indexing would copy the constant-memory parameters to local
// memory.
template <typename T>
__device__ __forceinline__ LinearPart<T> part_of(
    const LinearPart<T> (&parts)[kLinearMaxWeights], int index) {
  return index == 0 ? parts[0] : index == 1 ? parts[1] : parts[2];
}

// Returns the weight that `block` belongs to and makes `block` relative to that weight's first
// block. A block covers `rows` rows of a weight.
__device__ __forceinline__ int weight_of_block(const LinearParams& params, int rows, int& block) {
  int index = 0;
#pragma unroll
  for (int i = 1; i < kLinearMaxWeights; i++) {
    const int blocks = (params.n[i - 1] + rows - 1) / rows;
    if (index == i - 1 && !params.is_gated && i < params.num_weights && block >= blocks) {
      block -= blocks;
      index = i;
    }
  }
  return index;
}

}  // namespace mlx_paged::cuda
