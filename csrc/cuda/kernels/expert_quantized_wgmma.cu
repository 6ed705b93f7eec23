// Copyright © 2026 the mlx_paged authors. Apache-2.0.
//
// Instantiates expert_quantized_wgmma_entry for weights of PAGED_CODE_BITS bits on sm_90a.

#include "expert_quantized_wgmma.h"

#include "../compiled_kernels.h"

using namespace mlx_paged::cuda;

#define WGMMA(dtype, type, format, bits, group, tiles)                                     \
  {"expert_quantized_wgmma_" #dtype "_" #format "_" #bits "_" #group "_" #tiles,           \
   expert_quantized_wgmma_entry<type, CodeFormat::format, bits, group, tiles, false>},     \
      {"expert_quantized_whole_wgmma_" #dtype "_" #format "_" #bits "_" #group "_" #tiles, \
       expert_quantized_wgmma_entry<type, CodeFormat::format, bits, group, tiles, true>},
#if PAGED_CODE_BITS == 4 || PAGED_CODE_BITS == 8
#define MANY_ROWS(dtype, type, format, bits, group) WGMMA(dtype, type, format, bits, group, 16)
#else
#define MANY_ROWS(dtype, type, format, bits, group)
#endif
#define TILES(dtype, type, format, bits, group) \
  WGMMA(dtype, type, format, bits, group, 8)    \
  MANY_ROWS(dtype, type, format, bits, group)
#define DTYPES(format, bits, group)           \
  TILES(float16, __half, format, bits, group) \
  TILES(bfloat16, __nv_bfloat16, format, bits, group)
#define GROUPS(bits)       \
  DTYPES(affine, bits, 32) \
  DTYPES(affine, bits, 64) \
  DTYPES(affine, bits, 128)

static const bool added = add_kernels({
    // clang-format off
    GROUPS(PAGED_CODE_BITS)
#if PAGED_CODE_BITS == 4
    DTYPES(mxfp4, 4, 32)
#elif PAGED_CODE_BITS == 8
    DTYPES(mxfp8, 8, 32)
#endif
    // clang-format on
});
