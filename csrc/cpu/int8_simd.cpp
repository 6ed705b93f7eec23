// Copyright © 2026 the mlx_paged authors. Apache-2.0.
//
// The products of int8 activations for instruction sets that have more for these than for the other
// kernels. Compiled like kernels_simd.cpp.

#include "int8_tile_kernel.h"
#include "kernels.h"

namespace mlx_paged::cpu {

const Int8Kernels MLX_PAGED_KERNELS = {
    MLX_PAGED_ISA::quantise_int8, MLX_PAGED_ISA::int8_product, MLX_PAGED_ISA::kLeastTileRows};

}  // namespace mlx_paged::cpu
