// Copyright © 2026 the mlx_paged authors. Apache-2.0.
//
// The kernels between a layer's attention and its products, and the copy of a step's inputs to
// where its kernels look for them.

#include "../../../metal/kernel_table.h"
#include "../compiled_kernels.h"
#include "../msl/metal_stdlib"
#include "../step_inputs.h"
#include "dependent_launch.h"
#include "layer.h"

template <typename T>
__global__ void __launch_bounds__(paged::NORM_THREADS) add_rms_norm_entry(
    const T* x, const T* residual, const T* weight, T* sum, T* out,
    const __grid_constant__ paged::NormParams params) {
  constexpr int kLine = 8;  // chunks
  for (int i = threadIdx.x * kLine; i < params.row_chunks; i += blockDim.x * kLine) {
    paged::fetch_to_l2(weight + i * paged::chunk_size<T>());  // which no kernel writes
  }
  paged::begin_after_kernel_before();
  add_rms_norm<T>(x, residual, weight, sum, out, params);
}

template <typename T>
__global__ void rope_rotations_entry(
    const int* positions, const T* inv_freqs, T* out,
    const __grid_constant__ paged::RotationParams params) {
  paged::begin_after_kernel_before();
  rope_rotations<T>(positions, inv_freqs, out, params);
}

template <typename T>
__global__ void __launch_bounds__(32 * paged::ROPE_SIMD_GROUPS) rope_write_entry(
    const T* queries, const T* keys, const T* values, const float* rotations,
    const int* slot_mapping, const T* query_weight, const T* key_weight, T* out, T* key_pool,
    T* value_pool, const __grid_constant__ paged::RopeParams params) {
  paged::begin_after_kernel_before();
  rope_write<T>(
      queries, keys, values, rotations, slot_mapping, query_weight, key_weight, out, key_pool,
      value_pool, params);
}

template <typename T>
__global__ void silu_mul_entry(
    const T* gate, const T* up, T* out, const __grid_constant__ paged::SiluParams params) {
  paged::begin_after_kernel_before();
  silu_mul<T>(gate, up, out, params);
}

template <typename T>
__global__ void gather_rows_entry(
    const T* table, const int* rows, T* out, const __grid_constant__ paged::RowParams params) {
  paged::begin_after_kernel_before();
  gather_rows<T>(table, rows, out, params);
}

template <typename T>
__global__ void __launch_bounds__(32 * paged::PRODUCT_SIMD_GROUPS) product_rows_entry(
    const T* x, const T* weight, const T* bias, const T* residual, T* out,
    const __grid_constant__ paged::ProductParams params) {
  paged::begin_after_kernel_before();
  product_rows<T>(x, weight, bias, residual, out, params);
}

// grid: (blocks of an input, inputs).
__global__ void copy_inputs_entry(const __grid_constant__ mlx_paged::cuda::StepInputs inputs) {
  paged::begin_after_kernel_before();
  const mlx_paged::cuda::StepInput input = inputs.inputs[blockIdx.y];
  for (int i = blockIdx.x * blockDim.x + threadIdx.x; i < input.words;
       i += gridDim.x * blockDim.x) {
    input.to[i] = input.from[i];
  }
}

#define LAYER(host_name, function, ...) {host_name, function##_entry<__VA_ARGS__>},

static const bool added = mlx_paged::cuda::add_kernels({
    // clang-format off
    PAGED_FOR_EACH_LAYER_TEMPLATE(LAYER)
    {"copy_inputs", copy_inputs_entry},
    // clang-format on
});
