// Copyright © 2026 the mlx_paged authors. Apache-2.0.
//
// Portable kernels that serve every option of attention, with or without bounds, on pools of every
// format. They serve layers with an option that no other kernel supports (has_row_options), so
// that the others keep their registers. They have the largest tiles only.

#define PAGED_SERVES_ROW_OPTIONS true
#define PAGED_QUANTIZED(params) ((params).key_format != paged::FORMAT_PLAIN)
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
#include "paged_decode_matrix.h"
#include "paged_prefill.h"

template <typename T, int K_DIM, int V_DIM, int ROWS>
__global__ void __launch_bounds__(32 * paged::portable_matrix_simd_groups(K_DIM))
    paged_decode_matrix_general_entry(ATTENTION_PARAMETERS) {
  paged::begin_after_kernel_before();
  paged_decode_matrix<T, K_DIM, V_DIM, ROWS, paged::portable_matrix_simd_groups(K_DIM)>(
      ATTENTION_ARGUMENTS);
}

template <typename T, int K_DIM, int V_DIM, int ROWS>
__global__ void __launch_bounds__(32 * paged::PREFILL_SIMD_GROUPS)
    paged_prefill_general_entry(ATTENTION_PARAMETERS) {
  paged::wait_for_kernel_before();
  paged_prefill<T, K_DIM, V_DIM, ROWS, paged::portable_prefill_tokens(K_DIM, V_DIM, sizeof(T))>(
      ATTENTION_ARGUMENTS);
}

#define GENERAL_ENTRY(host_name, function, ...) \
  {host_name "_general", function##_general_entry<__VA_ARGS__>},

static const bool added =
    mlx_paged::cuda::add_kernels({PORTABLE_FOR_EACH_LARGEST(GENERAL_ENTRY, PAGED_DTYPE)});
