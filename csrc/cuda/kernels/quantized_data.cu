// Copyright © 2026 the mlx_paged authors. Apache-2.0.
//
// Kernels that write and gather quantized pools and rotate queries. Written tokens lie along x; see
// data.cu.

#include "../../../metal/kernel_table.h"
#include "../compiled_kernels.h"
#include "../msl/metal_stdlib"
#include "dependent_launch.h"
#include "quantize_rows.h"
#include "quantized_pool.h"

template <typename T, int PARTS>
__global__ void quantize_kv_entry(
    const T* keys, const T* values, const int* slot_mapping, unsigned char* key_pool,
    unsigned char* value_pool, const __grid_constant__ paged::QuantizeParams params) {
  paged::begin_after_kernel_before();
  quantize_kv<T, PARTS>(
      keys, values, slot_mapping, key_pool, value_pool, params,
      make_uint3(blockIdx.y, blockIdx.x, blockIdx.z));
}

template <typename T, int PARTS>
__global__ void gather_quantized_entry(
    const unsigned char* __restrict__ pool, const int* __restrict__ block_tables,
    const int* __restrict__ context_lens, T* __restrict__ dense,
    const __grid_constant__ paged::GatherQuantizedParams params) {
  gather_quantized<T, PARTS>(pool, block_tables, context_lens, dense, params);
}

template <typename T, int PARTS>
__global__ void rotate_queries_entry(
    const T* queries, T* rotated, const __grid_constant__ paged::RotateParams params) {
  paged::begin_after_kernel_before();
  rotate_queries<T, PARTS>(queries, rotated, params);
}

#define QUANTIZED_TEMPLATE(host_name, function, ...) {host_name, function##_entry<__VA_ARGS__>},
#define ROWS_KERNEL(dtype, type, dim, suffix, keys, values) \
  {"quantize_rows_" #dtype "_" #dim "_" #suffix,            \
   quantize_rows_entry<type, dim, paged::keys, paged::values>},
#define ROTATED_ROWS_KERNEL(dtype, type, dim) \
  {"rotate_rows_" #dtype "_" #dim, rotate_rows_entry<type, dim>},

static const bool added = mlx_paged::cuda::add_kernels({
    // clang-format off
    PAGED_FOR_EACH_QUANTIZED_TEMPLATE(QUANTIZED_TEMPLATE)
    PAGED_FOR_EACH_QUANTIZED_ROWS(ROWS_KERNEL, float32, float)
    PAGED_FOR_EACH_QUANTIZED_ROWS(ROWS_KERNEL, float16, half)
    PAGED_FOR_EACH_QUANTIZED_ROWS(ROWS_KERNEL, bfloat16, bfloat)
    PAGED_FOR_EACH_ROTATED_ROWS(ROTATED_ROWS_KERNEL, float32, float)
    PAGED_FOR_EACH_ROTATED_ROWS(ROTATED_ROWS_KERNEL, float16, half)
    PAGED_FOR_EACH_ROTATED_ROWS(ROTATED_ROWS_KERNEL, bfloat16, bfloat)
    // clang-format on
});
