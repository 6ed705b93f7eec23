// Copyright © 2026 the mlx_paged authors. Apache-2.0.
//
// Dtypes of activations and pools, from the list in metal/kernel_table.h. Includes no standard
// headers, because the vectorized CPU kernels include this file (see cpu/simd.h).

#pragma once

#include "../metal/kernel_table.h"
#include "pool_format.h"

namespace mlx::core {
struct Dtype;
class array;
}  // namespace mlx::core

namespace mlx_paged {

#define MLX_PAGED_DTYPE(unused, name, type) name,
enum class DType { PAGED_FOR_EACH_DTYPE(MLX_PAGED_DTYPE, unused) };
#undef MLX_PAGED_DTYPE

// The dtype's part of kernel host names: "float32", "float16" or "bfloat16".
const char* name_of(DType dtype);

bool is_supported(const mlx::core::Dtype& dtype);

// Converts a dtype that Validator has checked.
DType dtype_of(const mlx::core::Dtype& dtype);

// True if pools can have this dtype. format_of() returns the format it stands for.
bool is_pool_dtype(const mlx::core::Dtype& dtype);
PoolFormat format_of(const mlx::core::Dtype& dtype);

// Last extent of a pool with this head dim.
int last_extent(const mlx::core::Dtype& dtype, int head_dim);

// The layout of a pool that Validator has checked.
PoolLayout layout_of(const mlx::core::array& pool);

}  // namespace mlx_paged
