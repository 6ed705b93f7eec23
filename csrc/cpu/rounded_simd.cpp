// Copyright © 2026 the mlx_paged authors. Apache-2.0.
//
// Products of rounded activations for instruction sets with additional instructions for them.
// Compiled like kernels_simd.cpp.

#if defined(__AVX512BF16__)
#include "bfloat_kernel.h"
#endif
#include "integers_tile_kernel.h"
#include "kernels.h"

namespace mlx_paged::cpu {

const RoundedKernels MLX_PAGED_KERNELS = {
    MLX_PAGED_ISA::kIntegerKernels<1>,
    MLX_PAGED_ISA::kIntegerKernels<3>,
#if defined(__AVX512BF16__)
    {MLX_PAGED_ISA::round_bfloat, MLX_PAGED_ISA::bfloat_product},
#else
    {},
#endif
};

}  // namespace mlx_paged::cpu
