// Copyright © 2026 the mlx_paged authors. Apache-2.0.

// Steps with bounds use bounds.cu; without them these kernels save a register per row.
#define PAGED_HAS_BOUNDS(options) false

#include "../../../metal/kernel_table.h"
#include "../compiled_kernels.h"
#include "../msl/metal_stdlib"
#include "../portable_shape.h"
#include "attention_arguments.h"
#include "dependent_launch.h"
#include "paged_decode.h"

template <typename T, int K_DIM, int V_DIM, int QUERIES>
__global__ void __launch_bounds__(32 * paged::DECODE_SIMD_GROUPS)
    paged_decode_entry(ATTENTION_PARAMETERS) {
  paged::begin_after_kernel_before();
  paged_decode<T, K_DIM, V_DIM, QUERIES, paged::portable_decode_loads(QUERIES)>(
      ATTENTION_ARGUMENTS);
}

static const bool added =
    mlx_paged::cuda::add_kernels({PORTABLE_FOR_EACH_DECODE(ATTENTION_ENTRY, PAGED_DTYPE)});
