// Copyright © 2026 the mlx_paged authors. Apache-2.0.
//
// What a layer's attention has and another's lacks. In Metal these are function constants: a
// pipeline has no code for what its layers lack. The host gives them with a launch
// (csrc/launch.h), in this order. A compiler without function constants defines the words below
// as conditions on the params.

#pragma once

#include <metal_stdlib>

#include "kernel_table.h"

using namespace metal;

#ifndef PAGED_HAS_WINDOW
constant bool paged_has_window [[function_constant(0)]];
constant bool paged_has_softcap [[function_constant(1)]];
constant bool paged_has_sinks [[function_constant(2)]];
#define PAGED_HAS_WINDOW(params) paged_has_window
#define PAGED_HAS_SOFTCAP(params) paged_has_softcap
#define PAGED_HAS_SINKS(params) paged_has_sinks
#endif
