// Copyright © 2026 the mlx_paged authors. Apache-2.0.

#include "../../../metal/kernel_table.h"
#include "../kernel_table.h"
#include "../msl/metal_stdlib"
#include "attention_arguments.h"
#include "paged_decode.h"

template <typename T, int K_DIM, int V_DIM, int QUERIES>
__global__ void __launch_bounds__(32 * paged::DECODE_SIMD_GROUPS)
    decode_entry(ATTENTION_PARAMETERS) {
  paged_decode<T, K_DIM, V_DIM, QUERIES>(ATTENTION_ARGUMENTS);
}

#define DECODE(dtype, type, k_dim, v_dim, queries)             \
  {"paged_decode_" #dtype "_" #k_dim "_" #v_dim "_q" #queries, \
   (const void*)decode_entry<type, k_dim, v_dim, queries>},
#define DECODE_QUERIES(...) PAGED_FOR_EACH_DECODE_QUERIES(DECODE, __VA_ARGS__)

static const bool added =
    mlx_paged::cuda::add_kernels({PAGED_FOR_EACH_HEAD_DIM(DECODE_QUERIES, PAGED_DTYPE)});
