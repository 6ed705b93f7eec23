// Copyright © 2026 the mlx_paged authors. Apache-2.0.
//
// Instantiates expert_quantized_wgmma_entry for weights of PAGED_CODE_BITS bits on sm_90a.

#include "expert_quantized_wgmma.h"

#include "../compiled_kernels.h"
#include "quantized_formats.h"

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
  WGMMA(dtype, type, format, bits, group, 4)    \
  WGMMA(dtype, type, format, bits, group, 8)    \
  MANY_ROWS(dtype, type, format, bits, group)

static const bool added = add_kernels({
    // clang-format off
    PAGED_FOR_EACH_CODE_FORMAT(TILES)
    // clang-format on
});
