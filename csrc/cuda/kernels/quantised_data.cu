// Copyright © 2026 the mlx_paged authors. Apache-2.0.
//
// Writing and gathering of quantised pools, and the rotation of queries. Tokens that are written
// lie along x, see data.cu.

#include "../../../metal/kernel_table.h"
#include "../compiled_kernels.h"
#include "../msl/metal_stdlib"
#include "quantised_pool.h"

template <typename T>
__global__ void quantise_kv_entry(
    const T* __restrict__ keys, const T* __restrict__ values, const int* __restrict__ slot_mapping,
    unsigned char* __restrict__ key_pool, unsigned char* __restrict__ value_pool,
    const __grid_constant__ paged::QuantiseParams params) {
  quantise_kv<T>(
      keys, values, slot_mapping, key_pool, value_pool, params,
      make_uint3(blockIdx.y, blockIdx.x, blockIdx.z));
}

template <typename T>
__global__ void gather_quantised_entry(
    const unsigned char* __restrict__ pool, const int* __restrict__ block_tables,
    const int* __restrict__ context_lens, T* __restrict__ dense,
    const __grid_constant__ paged::GatherQuantisedParams params) {
  gather_quantised<T>(pool, block_tables, context_lens, dense, params);
}

template <typename T>
__global__ void rotate_queries_entry(
    const T* __restrict__ queries, T* __restrict__ rotated,
    const __grid_constant__ paged::RotateParams params) {
  rotate_queries<T>(queries, rotated, params);
}

#define QUANTISED_TEMPLATE(host_name, function, ...) \
  {host_name, (const void*)function##_entry<__VA_ARGS__>},

static const bool added =
    mlx_paged::cuda::add_kernels({PAGED_FOR_EACH_QUANTISED_TEMPLATE(QUANTISED_TEMPLATE)});
