// Copyright © 2026 the mlx_paged authors. Apache-2.0.

#include "instantiate.h"
#include "kernel_table.h"
#include "paged_decode_matrix.h"

#define MATRIX(dtype, type, k_dim, v_dim, rows)                       \
  PAGED_INSTANTIATE(                                                  \
      "paged_decode_matrix_" #dtype "_" #k_dim "_" #v_dim "_m" #rows, \
      paged_decode_matrix<type, k_dim, v_dim, rows>)
#define MATRIX_NARROW(...) PAGED_FOR_EACH_NARROW_MATRIX(MATRIX, __VA_ARGS__)
#define MATRIX_WIDE(...) PAGED_FOR_EACH_WIDE_MATRIX(MATRIX, __VA_ARGS__)
#define MATRIX_DIMS(...)                                \
  PAGED_FOR_EACH_NARROW_DIM(MATRIX_NARROW, __VA_ARGS__) \
  PAGED_FOR_EACH_WIDE_DIM(MATRIX_WIDE, __VA_ARGS__)
PAGED_FOR_EACH_DTYPE(MATRIX_DIMS)
