// Copyright © 2026 the mlx_paged authors. Apache-2.0.
//
// Dequantizes rows of an embedding. MLX's own dequantize is a graph node that no step can capture.

#include "../compiled_kernels.h"
#include "../quantized_shape.h"
#include "linear_math.h"

using namespace mlx_paged::cuda;

// Computes code * scale + bias, rounded as two operations of T. Grid: chunks of eight elements.
template <typename T>
__global__ void dequantize_rows_entry(
    const unsigned int* codes, const T* scales, const T* biases, T* out,
    const __grid_constant__ DequantizeParams params) {
  paged::begin_after_kernel_before();
  const int chunk = blockIdx.x * blockDim.x + threadIdx.x;
  if (chunk >= params.num_chunks) {
    return;
  }
  const int chunks = params.k / 8;
  const int row = chunk / chunks;
  const int first = chunk % chunks * 8;
  const unsigned int* words = codes + size_t(row) * params.row_words;
  const int group = row * (params.k / params.group_size) + first / params.group_size;
  const float scale = as_float(scales[group]);
  const T bias = biases[group];
  const unsigned int mask = (1u << params.bits) - 1;
  for (int e = 0; e < 8; e++) {
    const int bit = (first + e) * params.bits;
    unsigned int code = words[bit / 32] >> bit % 32;
    if (bit % 32 + params.bits > 32) {
      code |= words[bit / 32 + 1] << (32 - bit % 32);
    }
    const T scaled = rounded<T>(static_cast<float>(code & mask) * scale);
    out[size_t(chunk) * 8 + e] = plus(scaled, &bias, true);
  }
}

static const bool added = add_kernels({
    {"dequantize_rows_float16", dequantize_rows_entry<__half>},
    {"dequantize_rows_bfloat16", dequantize_rows_entry<__nv_bfloat16>},
});
