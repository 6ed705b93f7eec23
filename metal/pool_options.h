// Copyright © 2026 the mlx_paged authors. Apache-2.0.
//
// Formats of a layer's pools. Function constants in Metal, like the options of attention_variant.h;
// compilers without function constants define these macros as conditions on the params.

#pragma once

#include <metal_stdlib>

#include "kernel_table.h"

using namespace metal;

#ifndef PAGED_QUANTIZED
// Quantized pools; 4-bit keys; 4-bit values; both e4m3. int8 unless one of the latter is set.
constant bool paged_quantized [[function_constant(0)]];
constant bool paged_int4_keys [[function_constant(1)]];
constant bool paged_int4_values [[function_constant(2)]];
constant bool paged_fp8 [[function_constant(3)]];
#define PAGED_QUANTIZED(params) paged_quantized
#define PAGED_INT4_KEYS(params) paged_int4_keys
#define PAGED_INT4_VALUES(params) paged_int4_values
#define PAGED_FP8(params) paged_fp8
#endif
