// Copyright © 2026 the mlx_paged authors. Apache-2.0.
//
// Portable attention kernels for quantized pools. They test the pool's format and the bounds at run
// time; one kernel per combination would take too long to compile.

#define PAGED_QUANTIZED(params) true
#define PAGED_INT4_KEYS(params) ((params).key_format == paged::FORMAT_INT4)
#define PAGED_INT4_VALUES(params) ((params).value_format == paged::FORMAT_INT4)
#define PAGED_FP8(params) ((params).key_format == paged::FORMAT_FP8)

#include "../../../metal/kernel_table.h"
#include "../compiled_kernels.h"
#include "../msl/metal_simdgroup_matrix"
#include "../msl/metal_stdlib"
#include "../portable_shape.h"
#include "attention_arguments.h"
#include "dependent_launch.h"
#include "paged_decode.h"
#include "paged_decode_matrix.h"
#include "paged_prefill.h"

template <typename T, int K_DIM, int V_DIM, int QUERIES>
__global__ void __launch_bounds__(32 * paged::DECODE_SIMD_GROUPS)
    paged_decode_quantized_entry(ATTENTION_PARAMETERS) {
  paged::begin_after_kernel_before();
  paged_decode<T, K_DIM, V_DIM, QUERIES, paged::portable_decode_loads(QUERIES)>(
      ATTENTION_ARGUMENTS);
}

template <typename T, int K_DIM, int V_DIM, int ROWS>
__global__ void __launch_bounds__(32 * paged::portable_matrix_simd_groups(K_DIM))
    paged_decode_matrix_quantized_entry(ATTENTION_PARAMETERS) {
  paged::begin_after_kernel_before();
  paged_decode_matrix<T, K_DIM, V_DIM, ROWS, paged::portable_matrix_simd_groups(K_DIM)>(
      ATTENTION_ARGUMENTS);
}

template <typename T, int K_DIM, int V_DIM, int ROWS>
__global__ void __launch_bounds__(32 * paged::PREFILL_SIMD_GROUPS)
    paged_prefill_quantized_entry(ATTENTION_PARAMETERS) {
  paged::begin_after_kernel_before();
  paged_prefill<T, K_DIM, V_DIM, ROWS, paged::portable_prefill_tokens(K_DIM, V_DIM, sizeof(T))>(
      ATTENTION_ARGUMENTS);
}

#define QUANTIZED_ENTRY(host_name, function, ...) \
  {host_name "_quantized", function##_quantized_entry<__VA_ARGS__>},

static const bool added = mlx_paged::cuda::add_kernels({
    // clang-format off
    PORTABLE_FOR_EACH_DECODE(QUANTIZED_ENTRY, PAGED_DTYPE)
    PORTABLE_FOR_EACH_MATRIX(QUANTIZED_ENTRY, PAGED_DTYPE)
    PORTABLE_FOR_EACH_PREFILL(QUANTIZED_ENTRY, PAGED_DTYPE)
    // clang-format on
});
