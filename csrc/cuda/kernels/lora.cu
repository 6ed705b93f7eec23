// Copyright © 2026 the mlx_paged authors. Apache-2.0.
//
// Low-rank adapters: the kernels of metal/lora.h. Their matrices do not change during a step, so
// they are on their way to L2 before the previous kernel ends.

#include "../../../metal/kernel_table.h"
#include "../compiled_kernels.h"
#include "../msl/metal_stdlib"
#include "dependent_launch.h"
#include "lora.h"
#include "ordered_rows.h"

namespace paged {

// Prefetches the block's part of the matrices of its rows' adapters: of `num_rows` rows, `stride`
// elements apart, the first THREADS chunks, `row_bytes` at most. matrix: that of adapter 0, of
// `size` elements. A step may still compute `adapters`; a wrong prefetch does no harm.
template <int THREADS, typename T>
__device__ __forceinline__ void fetch_matrices(
    const int* adapters, const LoraParams& params, const T* matrix, long size, int num_rows,
    int stride, int row_bytes) {
  constexpr int kLine = 128;  // bytes
  constexpr int kLines = THREADS * 16 / kLine;
  const int at = int(threadIdx.x) % kLines * kLine;
  int fetched = -1;
#pragma unroll 1
  for (int i = 0; i < LORA_ROWS; i++) {
    const int row = int(blockIdx.y) * LORA_ROWS + i;
    const int adapter = row < params.num_rows ? adapters[row] : -1;
    if (adapter < 0 || adapter >= params.num_adapters || adapter == fetched || at >= row_bytes) {
      continue;
    }
    fetched = adapter;
#pragma unroll 1
    for (int r = threadIdx.x / kLines; r < num_rows; r += max(1, int(blockDim.x) / kLines)) {
      const T* from = matrix + adapter * size + long(r) * stride;
      fetch_to_l2(reinterpret_cast<const char*>(from) + at);
    }
  }
}

}  // namespace paged

// Rows: InPlace or InOrder.
template <typename T, typename Rows = paged::InPlace>
__global__ void __launch_bounds__(paged::LORA_DOWN_THREADS) lora_down_entry(
    const T* x, const int* adapters, const T* a_0, const T* a_1, const T* a_2, float* hidden,
    const __grid_constant__ paged::LoraParams params) {
  using namespace paged;
  let_next_kernel_begin();
  const int begin = int(blockIdx.x) % params.num_parts * LORA_DOWN_THREADS * chunk_size<T>();
  const int first_column = int(blockIdx.x) / params.num_parts * LORA_COLUMNS;
  const T* a = blockIdx.z == 0 ? a_0 : blockIdx.z == 1 ? a_1 : a_2;
  fetch_matrices<LORA_DOWN_THREADS>(
      adapters, params, a + long(first_column) * params.k + begin, long(params.rank) * params.k,
      min(int(LORA_COLUMNS), params.rank - first_column), params.k,
      int(sizeof(T)) * (params.k - begin));
  wait_for_kernel_before();
  lora_down<T, Rows>(x, adapters, a_0, a_1, a_2, hidden, params);
}

template <typename T, typename Result = paged::InPlace>
__global__ void __launch_bounds__(paged::LORA_UP_THREADS, 4) lora_up_entry(
    const T* base_0, const T* base_1, const T* base_2, const float* hidden, const int* adapters,
    const T* b_0, const T* b_1, const T* b_2, const T* residual, T* out_0, T* out_1, T* out_2,
    const __grid_constant__ paged::LoraParams params) {
  using namespace paged;
  let_next_kernel_begin();
  const int begin = int(blockIdx.x) * LORA_UP_THREADS * chunk_size<T>();
  const int last_target = params.is_gated ? 1 : int(blockIdx.z);
#pragma unroll 1
  for (int target = blockIdx.z; target <= last_target; target++) {
    const T* b = target == 0 ? b_0 : target == 1 ? b_1 : b_2;
    const int n = target == 0 ? params.n_0 : target == 1 ? params.n_1 : params.n_2;
    fetch_matrices<LORA_UP_THREADS>(
        adapters, params, b + begin, long(params.rank) * n, params.rank, n,
        int(sizeof(T)) * (n - begin));
  }
  wait_for_kernel_before();
  lora_up<T, Result>(
      base_0, base_1, base_2, hidden, adapters, b_0, b_1, b_2, residual, out_0, out_1, out_2,
      params);
}

#define LORA(host_name, function, ...) {host_name, function##_entry<__VA_ARGS__>},
#define ORDERED_LORA(dtype, type, run, apart)                    \
  {"lora_down_" #dtype "_ordered_" #run "_" #apart,              \
   lora_down_entry<type, mlx_paged::cuda::InOrder<run, apart>>}, \
      {"lora_up_" #dtype "_ordered_" #run "_" #apart,            \
       lora_up_entry<type, mlx_paged::cuda::InOrder<run, apart>>},

static const bool added = mlx_paged::cuda::add_kernels({
    // clang-format off
    PAGED_FOR_EACH_LORA_TEMPLATE(LORA)
    PAGED_FOR_EACH_CODE_ORDER(ORDERED_LORA, float16, half)
    PAGED_FOR_EACH_CODE_ORDER(ORDERED_LORA, bfloat16, metal::bfloat)
    // clang-format on
});
