// Copyright © 2026 the mlx_paged authors. Apache-2.0.
//
// The vectorized kernels, built once per instruction set and selected at run time.

#pragma once

#include "attention.h"
#include "bfloat.h"
#include "integers.h"
#include "layer.h"
#include "product.h"

namespace mlx_paged::cpu {

struct RoundedKernels {
  IntegerKernels int8;
  // Three-digit products that replace float32 ones, for weights of 4 and of 8 bits: first for
  // groups of 32, then for larger ones. `product` is null where it would be slower.
  IntegerKernels wide4[2];
  IntegerKernels wide8[2];
  BFloatKernels bfloat;  // empty except for AVX-512 with BF16
  // Splits activations into three bfloat16 parts: as exact as float32. Empty except for AMX.
  BFloatKernels wide_bfloat;
  // Attention of plain pools, empty except for AMX: of bfloat16, and of float32 rounded to it,
  // which int8 activations allow.
  AttentionKernels bfloat_attention;
  AttentionKernels rounded_attention;
};

struct Kernels {
  // "amx", "avx512bf16", "amx_emulated", "avx512vnni", "avx512", "avx2", "baseline", "neon"
  const char* simd;
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
// Tables for rounded products; kAvx512Kernels supplies the rest.
extern const RoundedKernels kAvx512VnniKernels;
extern const RoundedKernels kAvx512Bf16Kernels;
extern const RoundedKernels kAmxKernels;
extern const RoundedKernels kAmxEmulatedKernels;
#endif

// Returns the kernels that multiply such activations and weights as integers, or null.
const IntegerKernels* integer_kernels(Activations activations, const WeightView& weights);

// Returns the kernels of these queries and pools.
const AttentionKernels& attention_kernels(const AttentionArgs& args);

// Returns the best build for this processor, or the one that MLX_PAGED_SIMD selects.
const Kernels& kernels();

}  // namespace mlx_paged::cpu
