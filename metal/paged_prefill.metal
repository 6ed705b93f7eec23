// Copyright © 2026 the mlx_paged authors. Apache-2.0.

#include "instantiate.h"
#include "kernel_table.h"
#include "paged_prefill.h"

#define PREFILL(dtype, type, k_dim, v_dim, rows)                \
  PAGED_INSTANTIATE(                                            \
      "paged_prefill_" #dtype "_" #k_dim "_" #v_dim "_m" #rows, \
      paged_prefill<type, k_dim, v_dim, rows>)
#define PREFILL_DIMS(...) PAGED_FOR_EACH_PREFILL(PREFILL, __VA_ARGS__)
PAGED_FOR_EACH_DTYPE(PREFILL_DIMS)
