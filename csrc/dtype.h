// Copyright © 2026 the mlx_paged authors. Apache-2.0.
//
// The dtypes of pools and activations, from the list in metal/kernel_table.h. No standard headers
// here: the vectorised CPU kernels include this file (cpu/simd.h says why).

#pragma once

#include "../metal/kernel_table.h"

namespace mlx::core {
struct Dtype;
}

namespace mlx_paged {

#define MLX_PAGED_DTYPE(unused, name, type) name,
enum class DType { PAGED_FOR_EACH_DTYPE(MLX_PAGED_DTYPE, unused) };
#undef MLX_PAGED_DTYPE

// As kernels' host names have it: "float32", "float16" or "bfloat16".
const char* name_of(DType dtype);

bool is_supported(const mlx::core::Dtype& dtype);

// Of a supported dtype; Validator has checked it.
DType dtype_of(const mlx::core::Dtype& dtype);

}  // namespace mlx_paged
