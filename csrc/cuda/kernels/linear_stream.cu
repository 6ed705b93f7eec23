// Copyright © 2026 the mlx_paged authors. Apache-2.0.
//
// Instantiates linear_stream.h for 16-bit weights.

#include "linear_stream.h"

#include "../compiled_kernels.h"

using namespace mlx_paged::cuda;

#define LINEAR(dtype, type, tiles) \
  {"linear_stream_" #dtype "_" #tiles, linear_stream_entry<type, tiles, false>},
#define WGMMA(dtype, type) \
  {"linear_stream_wgmma_" #dtype "_8", linear_stream_entry<type, kWgmmaTiles, true>},

static const bool added = add_kernels({
    // clang-format off
    PAGED_FOR_EACH_LINEAR_STREAM(LINEAR, float16, __half)
    PAGED_FOR_EACH_LINEAR_STREAM(LINEAR, bfloat16, __nv_bfloat16)
    WGMMA(float16, __half)
    WGMMA(bfloat16, __nv_bfloat16)
    // clang-format on
});
