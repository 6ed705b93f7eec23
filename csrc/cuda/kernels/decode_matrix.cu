// Copyright © 2026 the mlx_paged authors. Apache-2.0.

#include "../../../metal/kernel_table.h"
#include "../kernel_table.h"
#include "../msl/metal_simdgroup_matrix"
#include "../msl/metal_stdlib"
#include "attention_arguments.h"
#include "paged_decode_matrix.h"

template <typename T, int K_DIM, int V_DIM, int ROWS>
__global__ void __launch_bounds__(32 * paged::matrix_simd_groups(K_DIM))
    decode_matrix_entry(ATTENTION_PARAMETERS) {
  paged_decode_matrix<T, K_DIM, V_DIM, ROWS>(ATTENTION_ARGUMENTS);
}

#define MATRIX(dtype, type, k_dim, v_dim, rows)                    \
  {"paged_decode_matrix_" #dtype "_" #k_dim "_" #v_dim "_m" #rows, \
   (const void*)decode_matrix_entry<type, k_dim, v_dim, rows>},
#define MATRIX_NARROW(...) PAGED_FOR_EACH_NARROW_MATRIX(MATRIX, __VA_ARGS__)
#define MATRIX_WIDE(...) PAGED_FOR_EACH_WIDE_MATRIX(MATRIX, __VA_ARGS__)

static const bool added = mlx_paged::cuda::add_kernels({PAGED_FOR_EACH_NARROW_DIM(
    MATRIX_NARROW, PAGED_DTYPE) PAGED_FOR_EACH_WIDE_DIM(MATRIX_WIDE, PAGED_DTYPE)});
