// Copyright © 2026 the mlx_paged authors. Apache-2.0.
//
// The vectorised kernels, built once for each instruction set and chosen at run time.

#pragma once

#include "attention.h"
#include "int8.h"
#include "layer.h"
#include "product.h"

namespace mlx_paged::cpu {

struct Kernels {
  const char* simd;  // "avx512vnni", "avx512", "avx2", "baseline", "neon"
  AttentionKernels attention;
  PoolKernels pool;
  LayerKernels layer;
  ProductKernels product;
  Int8Kernels int8;
};

extern const Kernels kBaselineKernels;
#ifdef __x86_64__
extern const Kernels kAvx2Kernels;
extern const Kernels kAvx512Kernels;
extern const Int8Kernels kAvx512VnniInt8;  // the rest is AVX-512's
#endif

// The best build that this processor runs, or the one MLX_PAGED_SIMD names.
const Kernels& kernels();

}  // namespace mlx_paged::cpu
