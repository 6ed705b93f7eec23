// Copyright © 2026 the mlx_paged authors. Apache-2.0.
//
// Portable kernels for steps with bounds. They have the largest tiles only: few steps have bounds,
// and most rows of those belong to an image.

#define PAGED_HAS_BOUNDS(options) true

#include "../../../metal/kernel_table.h"
#include "../compiled_kernels.h"
#include "../msl/metal_simdgroup_matrix"
#include "../msl/metal_stdlib"
#include "../portable_shape.h"
#include "attention_arguments.h"
#include "dependent_launch.h"
#include "paged_decode_matrix.h"
#include "paged_prefill.h"

template <typename T, int K_DIM, int V_DIM, int ROWS>
__global__ void __launch_bounds__(32 * paged::portable_matrix_simd_groups(K_DIM))
    paged_decode_matrix_bounds_entry(ATTENTION_PARAMETERS) {
  paged::begin_after_kernel_before();
  paged_decode_matrix<T, K_DIM, V_DIM, ROWS, paged::portable_matrix_simd_groups(K_DIM)>(
      ATTENTION_ARGUMENTS);
}

template <typename T, int K_DIM, int V_DIM, int ROWS>
__global__ void __launch_bounds__(32 * paged::PREFILL_SIMD_GROUPS)
    paged_prefill_bounds_entry(ATTENTION_PARAMETERS) {
  paged::wait_for_kernel_before();
  paged_prefill<T, K_DIM, V_DIM, ROWS, paged::portable_prefill_tokens(K_DIM, V_DIM, sizeof(T))>(
      ATTENTION_ARGUMENTS);
}

#define BOUNDS_ENTRY(host_name, function, ...) \
  {host_name "_bounds", function##_bounds_entry<__VA_ARGS__>},

static const bool added =
    mlx_paged::cuda::add_kernels({PORTABLE_FOR_EACH_LARGEST(BOUNDS_ENTRY, PAGED_DTYPE)});
