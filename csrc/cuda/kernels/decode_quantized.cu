// Copyright © 2026 the mlx_paged authors. Apache-2.0.

#include "../compiled_kernels.h"
#include "../msl/metal_stdlib"
#include "paged_decode_quantized.h"

#define QUANTIZED_TENSOR(dtype, type, dim, columns, suffix, keys, values) \
  {"paged_decode_tensor_" #dtype "_" #dim "_n" #columns "_" #suffix,      \
   decode_quantized_entry<type, dim, columns, paged::keys, paged::values>},

static const bool added =
    mlx_paged::cuda::add_kernels({PAGED_FOR_EACH_QUANTIZED_TENSOR(QUANTIZED_TENSOR, PAGED_DTYPE)});
