// Copyright © 2026 the mlx_paged authors. Apache-2.0.

#include "instantiate.h"
#include "kernel_table.h"
#include "paged_decode.h"

#define DECODE(dtype, type, k_dim, v_dim, queries)                \
  PAGED_INSTANTIATE(                                              \
      "paged_decode_" #dtype "_" #k_dim "_" #v_dim "_q" #queries, \
      paged_decode<type, k_dim, v_dim, queries>)
#define DECODE_QUERIES(...) PAGED_FOR_EACH_DECODE_QUERIES(DECODE, __VA_ARGS__)
#define DECODE_DIMS(...) PAGED_FOR_EACH_HEAD_DIM(DECODE_QUERIES, __VA_ARGS__)
PAGED_FOR_EACH_DTYPE(DECODE_DIMS)
