// Copyright © 2026 the mlx_paged authors. Apache-2.0.

#include "../compiled_kernels.h"
#include "../msl/metal_stdlib"
#include "paged_decode_tensor.h"

#define TENSOR(dtype, type, dim, columns) \
  {"paged_decode_tensor_" #dtype "_" #dim "_n" #columns, decode_tensor_entry<type, dim, columns>},

static const bool added =
    mlx_paged::cuda::add_kernels({PAGED_FOR_EACH_TENSOR(TENSOR, PAGED_DTYPE)});
