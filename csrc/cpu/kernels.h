// Copyright © 2026 the mlx_paged authors. Apache-2.0.
//
// The vectorised kernels, built once for each instruction set and chosen at run time.

#pragma once

#include "attention.h"
#include "bfloat.h"
#include "integers.h"
#include "layer.h"
#include "product.h"

namespace mlx_paged::cpu {

struct RoundedKernels {
  IntegerKernels int8;
  // Three-digit products that replace float32 ones. `product` is null where it would be slower.
  IntegerKernels wide;
  BFloatKernels bfloat;  // none, but of AVX-512 with BF16
};

struct Kernels {
  const char* simd;  // "avx512bf16", "avx512vnni", "avx512", "avx2", "baseline", "neon"
  AttentionKernels attention;
  PoolKernels pool;
  LayerKernels layer;
  ProductKernels product;
  RoundedKernels rounded;
};

extern const Kernels kBaselineKernels;
#ifdef __x86_64__
extern const Kernels kAvx2Kernels;
extern const Kernels kAvx512Kernels;
// The rest is AVX-512's.
extern const RoundedKernels kAvx512VnniKernels;
extern const RoundedKernels kAvx512Bf16Kernels;
#endif

// The kernels that multiply such activations with such weights as integers; null if there are none.
const IntegerKernels* integer_kernels(Activations activations, const WeightView& weights);

// The best build that this processor runs, or the one MLX_PAGED_SIMD names.
const Kernels& kernels();

}  // namespace mlx_paged::cpu
