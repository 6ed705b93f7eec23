// Copyright © 2026 the mlx_paged authors. Apache-2.0.
//
// Attention options that a layer or a step has and another lacks. In Metal these are function
// constants: a pipeline has no code for options that it lacks. The host passes them with a launch
// (csrc/launch.h), in this order. A compiler without function constants defines the words below as
// conditions on the params.

#pragma once

#include <metal_stdlib>

#include "kernel_table.h"

using namespace metal;

#ifndef PAGED_HAS_WINDOW
constant bool paged_has_window [[function_constant(0)]];
constant bool paged_has_softcap [[function_constant(1)]];
constant bool paged_has_sinks [[function_constant(2)]];
constant bool paged_has_bounds [[function_constant(3)]];
// Pools are quantised; keys or values have 4 bits; both are e4m3. Neither of the last two: int8.
constant bool paged_quantised [[function_constant(4)]];
constant bool paged_int4_keys [[function_constant(5)]];
constant bool paged_int4_values [[function_constant(6)]];
constant bool paged_fp8 [[function_constant(7)]];
#define PAGED_HAS_WINDOW(params) paged_has_window
#define PAGED_HAS_SOFTCAP(params) paged_has_softcap
#define PAGED_HAS_SINKS(params) paged_has_sinks
#define PAGED_HAS_BOUNDS(params) paged_has_bounds
#define PAGED_QUANTISED(params) paged_quantised
#define PAGED_INT4_KEYS(params) paged_int4_keys
#define PAGED_INT4_VALUES(params) paged_int4_values
#define PAGED_FP8(params) paged_fp8
#endif
