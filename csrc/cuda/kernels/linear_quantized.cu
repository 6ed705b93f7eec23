// Copyright © 2026 the mlx_paged authors. Apache-2.0.
//
// Instantiates linear_quantized.h, linear_quantized_stream.h and expert_quantized_stream.h for
// weights of PAGED_CODE_BITS bits.

#include "expert_quantized_stream.h"

#include "../compiled_kernels.h"
#include "quantized_formats.h"

using namespace mlx_paged::cuda;

#define NAME(kernel, dtype, format, bits, group, tiles) \
  kernel "_" #dtype "_" #format "_" #bits "_" #group "_" #tiles
#define ROWS(dtype, type, format, bits, group, tiles)           \
  {NAME("linear_quantized", dtype, format, bits, group, tiles), \
   linear_quantized_entry<type, CodeFormat::format, bits, group, tiles>},
#define STREAM(dtype, type, format, bits, group, tiles)                \
  {NAME("linear_quantized_stream", dtype, format, bits, group, tiles), \
   linear_quantized_stream_entry<type, CodeFormat::format, bits, group, tiles>},
#define EXPERTS(dtype, type, format, bits, group, tiles)                                \
  {NAME("expert_quantized_stream", dtype, format, bits, group, tiles),                  \
   expert_quantized_stream_entry<type, CodeFormat::format, bits, group, tiles, false>}, \
      {NAME("expert_quantized_whole", dtype, format, bits, group, tiles),               \
       expert_quantized_stream_entry<type, CodeFormat::format, bits, group, tiles, true>},
#define TILES(dtype, type, format, bits, group) \
  ROWS(dtype, type, format, bits, group, 1)     \
  ROWS(dtype, type, format, bits, group, 2)     \
  STREAM(dtype, type, format, bits, group, 1)   \
  STREAM(dtype, type, format, bits, group, 2)   \
  STREAM(dtype, type, format, bits, group, 4)   \
  STREAM(dtype, type, format, bits, group, 8)   \
  EXPERTS(dtype, type, format, bits, group, 1)  \
  EXPERTS(dtype, type, format, bits, group, 4)

static const bool added = add_kernels({
    // clang-format off
    PAGED_FOR_EACH_CODE_FORMAT(TILES)
    // clang-format on
});
