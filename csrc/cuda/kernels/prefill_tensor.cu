// Copyright © 2026 the mlx_paged authors. Apache-2.0.

#include "../compiled_kernels.h"
#include "../msl/metal_stdlib"
#include "paged_prefill_tensor.h"

#define TENSOR(dtype, type, dim, warps) \
  {"paged_prefill_tensor_" #dtype "_" #dim "_w" #warps, prefill_tensor_entry<type, dim, warps>},

static const bool added =
    mlx_paged::cuda::add_kernels({PAGED_FOR_EACH_PREFILL_TENSOR(TENSOR, PAGED_DTYPE)});
