// Copyright © 2026 the mlx_paged authors. Apache-2.0.
//
// Linear layers outside of whole steps on Apple GPUs: which kernel of metal/ multiplies how many
// rows, where calibration prefers it to MLX's.

#pragma once

#include <optional>
#include <vector>

#include "../kernel_names.h"
#include "../weight_format.h"
#include "mlx/array.h"
#include "mlx/stream.h"

namespace mlx_paged {

// Rows of x per threadgroup of the kernels that can multiply `num_rows` rows of 16 bits, best
// first, without rejected kernels. Up to PRODUCT_ROWS rows it is the kernel of whole steps, so that
// a row has the same bits there. Above them they are the kernels for tensor units, if those are
// allowed.
std::vector<int> separate_product_tiles(
    DType dtype, const std::optional<WeightCodes>& codes, int num_rows);

KernelName separate_product_kernel(
    DType dtype, const std::optional<WeightCodes>& codes, int tile_rows);

// Returns the first of these tiles whose kernel calibration allows for the rows of x; 0 if there is
// none, or if no kernel can read the inputs. in: those of a Linear, or with `codes` of a
// QuantizedLinear (primitives.h).
int separate_product_tile(
    const std::vector<mlx::core::array>& in, const std::optional<WeightCodes>& codes,
    mlx::core::Stream stream);

}  // namespace mlx_paged
