// Copyright © 2026 the mlx_paged authors. Apache-2.0.
//
// Kernels between a layer's attention and its products, and the copy of a step's inputs to the
// fixed addresses that captured kernels read.

#include "../../../metal/kernel_table.h"
#include "../compiled_kernels.h"
#include "../msl/metal_stdlib"
#include "../rope_shape.h"
#include "../step_inputs.h"
#include "dependent_launch.h"
#include "layer.h"
#include "ordered_rows.h"

// Result: writes chunks of a row; InPlace or InOrder.
template <typename T, typename Result = paged::InPlace>
__global__ void __launch_bounds__(paged::NORM_THREADS) add_rms_norm_entry(
    const T* x, const T* residual, const T* weight, T* sum, T* out,
    const __grid_constant__ paged::NormParams params) {
  constexpr int kLine = 8;  // chunks
  // No kernel writes weights, so this may precede the wait.
  for (int i = threadIdx.x * kLine; i < params.row_chunks; i += blockDim.x * kLine) {
    paged::fetch_to_l2(weight + i * paged::chunk_size<T>());
  }
  paged::begin_after_kernel_before();
  add_rms_norm<T, Result>(x, residual, weight, sum, out, params);
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

// Grid: chunks of the first halves of all heads / 256, rounded up.
template <typename T>
__global__ void __launch_bounds__(paged::DATA_THREADS) rope_rows_entry(
    const uint4* x, const float4* rotations, uint4* out,
    const __grid_constant__ mlx_paged::cuda::RopeRowsParams params) {
  using namespace paged;
  constexpr int CHUNK = chunk_size<T>();
  begin_after_kernel_before();
  long long i = (long long)(blockIdx.x) * blockDim.x + threadIdx.x;
  if (i >= params.num_chunks) {
    return;
  }
  int chunk = int(i % params.half_chunks);
  long long head = i / params.half_chunks;
  long long low = 2 * head * params.half_chunks + chunk;
  long long high = low + params.half_chunks;
  constexpr int FOURS = CHUNK / 4;
  long long row = head / params.num_heads;
  const float4* cosines = rotations + (2 * row * params.half_chunks + chunk) * FOURS;
  const float4* sines = cosines + params.half_chunks * FOURS;
  float a[CHUNK], b[CHUNK];
  unpack(x[low], a, T(0.0f));
  unpack(x[high], b, T(0.0f));
#pragma unroll
  for (int f = 0; f < FOURS; f++) {
    const float4 cosine = cosines[f], sine = sines[f];
    const float turns[4][2] = {
        {cosine.x, sine.x}, {cosine.y, sine.y}, {cosine.z, sine.z}, {cosine.w, sine.w}};
#pragma unroll
    for (int i = 0; i < 4; i++) {
      float first = a[4 * f + i], second = b[4 * f + i];
      a[4 * f + i] = first * turns[i][0] - second * turns[i][1];
      b[4 * f + i] = first * turns[i][1] + second * turns[i][0];
    }
  }
  out[low] = pack(a, T(0.0f));
  out[high] = pack(b, T(0.0f));
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

// Grid: (blocks per input, inputs).
__global__ void copy_inputs_entry(const __grid_constant__ mlx_paged::cuda::StepInputs inputs) {
  paged::begin_after_kernel_before();
  const mlx_paged::cuda::StepInput input = inputs.inputs[blockIdx.y];
  for (int i = blockIdx.x * blockDim.x + threadIdx.x; i < input.words;
       i += gridDim.x * blockDim.x) {
    input.to[i] = input.from[i];
  }
}

#define LAYER(host_name, function, ...) {host_name, function##_entry<__VA_ARGS__>},
#define ORDERED_NORM(dtype, type, run, apart)          \
  {"add_rms_norm_" #dtype "_ordered_" #run "_" #apart, \
   add_rms_norm_entry<type, mlx_paged::cuda::InOrder<run, apart>>},

static const bool added = mlx_paged::cuda::add_kernels({
    // clang-format off
    PAGED_FOR_EACH_LAYER_TEMPLATE(LAYER)
    PAGED_FOR_EACH_CODE_ORDER(ORDERED_NORM, float16, half)
    PAGED_FOR_EACH_CODE_ORDER(ORDERED_NORM, bfloat16, bfloat)
    {"copy_inputs", copy_inputs_entry},
    {"rope_rows_float16", rope_rows_entry<half>},
    {"rope_rows_bfloat16", rope_rows_entry<bfloat>},
    // clang-format on
});
