// Copyright © 2026 the mlx_paged authors. Apache-2.0.
//
// Kernels that move data, and the merge of partials. CUDA grids are large only along x, so the long
// dimension of Metal's grid (tokens, block pairs or blocks) is x here; binder.cpp swaps it on the
// host.

#include "../../../metal/kernel_table.h"
#include "../compiled_kernels.h"
#include "../msl/metal_stdlib"
#include "data.h"
#include "dependent_launch.h"
#include "merge_splits.h"

namespace {

// Metal's (x, y, z) in a grid whose dimensions the host swapped.
__device__ __forceinline__ uint3 swap_xy(uint3 at) {
  return make_uint3(at.y, at.x, at.z);
}

__device__ __forceinline__ uint3 swap_xz(uint3 at) {
  return make_uint3(at.z, at.y, at.x);
}

}  // namespace

__global__ void write_kv_entry(
    const uint4* __restrict__ keys, const uint4* __restrict__ values,
    const int* __restrict__ slot_mapping, uint4* __restrict__ key_pool,
    uint4* __restrict__ value_pool, const __grid_constant__ paged::WriteParams params) {
  write_kv(keys, values, slot_mapping, key_pool, value_pool, params, swap_xy(blockIdx));
}

__global__ void copy_blocks_entry(
    const int2* __restrict__ block_pairs, uint4* pool,
    const __grid_constant__ paged::CopyParams params) {
  copy_blocks(block_pairs, pool, params, swap_xy(blockIdx));
}

__global__ void gather_kv_entry(
    const uint4* __restrict__ pool, const int* __restrict__ block_tables,
    const int* __restrict__ context_lens, uint4* __restrict__ dense,
    const __grid_constant__ paged::GatherParams params) {
  gather_kv(pool, block_tables, context_lens, dense, params);
}

__global__ void fill_zero_entry(uint4* out, const __grid_constant__ paged::FillParams params) {
  paged::begin_after_kernel_before();
  fill_zero(out, params);
}

template <typename T>
__global__ void copy_strided_entry(
    const T* __restrict__ in, T* __restrict__ out,
    const __grid_constant__ paged::StridedParams params) {
  copy_strided<T>(in, out, params, swap_xz(blockIdx), blockDim, swap_xz(gridDim));
}

template <typename T>
__global__ void apply_token_bitmask_entry(
    const T* __restrict__ logits, const uint* __restrict__ bitmask, const int* __restrict__ rows,
    T* __restrict__ out, const __grid_constant__ paged::BitmaskParams params) {
  apply_token_bitmask<T>(
      logits, bitmask, rows, out, params, ::metal::ThreadgroupMemory(), swap_xy(blockIdx));
}

template <typename T>
__global__ void take_rows_entry(
    const T* __restrict__ a, const uint* __restrict__ ids, T* __restrict__ out,
    const __grid_constant__ paged::TakeParams params) {
  take_rows<T>(a, ids, out, params);
}

__global__ void edit_logits_entry(
    const paged::EditedRow* __restrict__ rows, const float* __restrict__ factors,
    const paged::LogitEntry* __restrict__ entries, const float* __restrict__ values,
    const int* __restrict__ newest, float* out, const __grid_constant__ paged::EditParams params) {
  edit_logits(rows, factors, entries, values, newest, out, params);
}

#define DATA(name) {#name, name##_entry},
#define DATA_TEMPLATE(host_name, function, ...) {host_name, function##_entry<__VA_ARGS__>},
#define MERGE(unused, dtype, type, v_dim) \
  {"merge_splits_" #dtype "_" #v_dim, merge_splits_entry<type, v_dim>},
#define MERGES(...) PAGED_FOR_EACH_V_DIM(MERGE, __VA_ARGS__)

static const bool added = mlx_paged::cuda::add_kernels({
    // clang-format off
    PAGED_FOR_EACH_DATA_KERNEL(DATA)
    PAGED_FOR_EACH_DATA_TEMPLATE(DATA_TEMPLATE)
    PAGED_FOR_EACH_DTYPE(MERGES, unused)
    // clang-format on
});
