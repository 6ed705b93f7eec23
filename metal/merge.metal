// Copyright © 2026 the mlx_paged authors. Apache-2.0.

#include "instantiate.h"
#include "kernel_table.h"
#include "merge.h"

#define MERGE(dtype, type, v_dim) \
  PAGED_INSTANTIATE("paged_merge_" #dtype "_" #v_dim, paged_merge<type, v_dim>)
#define MERGE_DIMS(...) PAGED_FOR_EACH_V_DIM(MERGE, __VA_ARGS__)
PAGED_FOR_EACH_DTYPE(MERGE_DIMS)
