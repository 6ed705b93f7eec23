// Copyright © 2026 the mlx_paged authors. Apache-2.0.
//
// Products of rounded activations for instruction sets with additional instructions for them.
// Compiled like kernels_simd.cpp. For AMX, CMake also names the class of tiles (MLX_PAGED_TILES).

#if defined(MLX_PAGED_TILES)
#include "amx_attention_kernel.h"
#include "amx_bfloat_kernel.h"
#include "amx_integers_kernel.h"
#include "amx_rounded_attention_kernel.h"
#endif
#if defined(__AVX512BF16__)
#include "bfloat_kernel.h"
#endif
#include "integers_tile_kernel.h"
#include "kernels.h"

namespace mlx_paged::cpu {

const RoundedKernels MLX_PAGED_KERNELS = {
#if defined(MLX_PAGED_TILES)
    MLX_PAGED_ISA::kAmxKernelsOf<4, 1, 32, MLX_PAGED_ISA::MLX_PAGED_TILES>,
    {MLX_PAGED_ISA::kAmxKernelsOf<4, 3, 32, MLX_PAGED_ISA::MLX_PAGED_TILES>,
     MLX_PAGED_ISA::kAmxKernelsOf<4, 3, 64, MLX_PAGED_ISA::MLX_PAGED_TILES>},
    {MLX_PAGED_ISA::kAmxKernelsOf<8, 3, 32, MLX_PAGED_ISA::MLX_PAGED_TILES>,
     MLX_PAGED_ISA::kAmxKernelsOf<8, 3, 64, MLX_PAGED_ISA::MLX_PAGED_TILES>},
#else
    MLX_PAGED_ISA::kIntegerKernels<1, 32>,
    {MLX_PAGED_ISA::kIntegerKernels<3, 32>, MLX_PAGED_ISA::kIntegerKernels<3, 64>},
    {MLX_PAGED_ISA::kIntegerKernels<3, 32>, MLX_PAGED_ISA::kIntegerKernels<3, 64>},
#endif
#if defined(MLX_PAGED_TILES)
    MLX_PAGED_ISA::kAmxBFloatKernels<1, MLX_PAGED_ISA::MLX_PAGED_TILES>,
    MLX_PAGED_ISA::kAmxBFloatKernels<3, MLX_PAGED_ISA::MLX_PAGED_TILES>,
#elif defined(__AVX512BF16__)
    {MLX_PAGED_ISA::round_bfloat, MLX_PAGED_ISA::bfloat_product},
    {},
#else
    {},
    {},
#endif
#if defined(MLX_PAGED_TILES)
    {MLX_PAGED_ISA::tile_scratch_size,
     MLX_PAGED_ISA::attend_by_tiles<MLX_PAGED_ISA::MLX_PAGED_TILES>, MLX_PAGED_ISA::merge},
    {MLX_PAGED_ISA::rounded_scratch_size,
     MLX_PAGED_ISA::attend_rounded<MLX_PAGED_ISA::MLX_PAGED_TILES>, MLX_PAGED_ISA::merge},
#else
    {},
    {},
#endif
};

}  // namespace mlx_paged::cpu
