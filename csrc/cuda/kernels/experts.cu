// Copyright © 2026 the mlx_paged authors. Apache-2.0.
//
// Mixtures of experts: the kernels of metal/experts.h, and products with 16-bit weights.

#include "expert_stream.h"

#include "../../../metal/kernel_table.h"
#include "../compiled_kernels.h"
#include "../msl/metal_stdlib"
#include "experts.h"
#include "sorted_experts.h"

template <typename T>
__global__ void __launch_bounds__(paged::ROUTE_THREADS) route_experts_entry(
    const T* logits, T* weights, int* sorted_pairs, int* items,
    const __grid_constant__ paged::RouteParams params) {
  paged::begin_after_kernel_before();
  route_experts<T>(logits, weights, sorted_pairs, items, params);
}

template <typename T, typename Weight, int ROWS>
__global__ void __launch_bounds__(32 * paged::PRODUCT_SIMD_GROUPS) expert_rows_entry(
    const T* x, const unsigned char* weight, const unsigned char* scales,
    const unsigned char* biases, const T* bias, const int* sorted_pairs, const int* items, T* out,
    const __grid_constant__ paged::ExpertParams params) {
  paged::begin_after_kernel_before();
  expert_rows<T, Weight, ROWS>(x, weight, scales, biases, bias, sorted_pairs, items, out, params);
}

template <typename T>
__global__ void __launch_bounds__(paged::DATA_THREADS) combine_experts_entry(
    const T* x, const T* weights, T* out, const __grid_constant__ paged::CombineParams params) {
  paged::begin_after_kernel_before();
  combine_experts<T>(x, weights, out, params);
}

#define PORTABLE(host_name, function, ...) {host_name, function##_entry<__VA_ARGS__>},
#define STREAM(dtype, type, tiles) \
  {"expert_stream_" #dtype "_" #tiles, mlx_paged::cuda::expert_stream_entry<type, tiles>},

#define SORTED_ROWS(unused, run, apart) \
  {"sorted_rows_" #run "_" #apart, mlx_paged::cuda::sorted_rows_entry<run, apart>},

static const bool added = mlx_paged::cuda::add_kernels({
    // clang-format off
    PAGED_FOR_EACH_DENSE_EXPERT_TEMPLATE(PORTABLE)
    {"sorted_items", mlx_paged::cuda::sorted_items_entry},
    PAGED_FOR_EACH_CODE_ORDER(SORTED_ROWS, )
    PAGED_FOR_EACH_LINEAR_STREAM(STREAM, float16, __half)
    PAGED_FOR_EACH_LINEAR_STREAM(STREAM, bfloat16, __nv_bfloat16)
    // clang-format on
});
