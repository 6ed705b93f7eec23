// Copyright © 2026 the mlx_paged authors. Apache-2.0.

#include <cuda.h>

#include "../compiled_kernels.h"
#include "../msl/metal_stdlib"
#include "paged_prefill_wgmma.h"

#define WGMMA(dtype, type, dim, warps) \
  {"paged_prefill_wgmma_" #dtype "_" #dim "_w" #warps, prefill_wgmma_entry<type, dim, warps>},

static const bool added =
    mlx_paged::cuda::add_kernels({PAGED_FOR_EACH_PREFILL_WGMMA(WGMMA, PAGED_DTYPE)});
