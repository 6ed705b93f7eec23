// Copyright © 2026 the mlx_paged authors. Apache-2.0.
//
// Tables of the vectorized kernels. Compiled once per instruction set: CMake defines MLX_PAGED_ISA
// (the namespace), MLX_PAGED_KERNELS (the table's name) and MLX_PAGED_SIMD_NAME, and sets the
// flags.

#include "attention_kernel.h"
#include "bitmask_kernel.h"
#include "draw_kernel.h"
#include "integers_tile_kernel.h"
#include "kernels.h"
#include "layer_kernel.h"
#include "pool_kernel.h"
#include "product_kernel.h"
#include "threshold_kernel.h"

namespace mlx_paged::cpu {

const Kernels MLX_PAGED_KERNELS = {
    MLX_PAGED_SIMD_NAME,
    {MLX_PAGED_ISA::scratch_size, MLX_PAGED_ISA::attend, MLX_PAGED_ISA::merge},
    {MLX_PAGED_ISA::quantize, MLX_PAGED_ISA::dequantize},
    {MLX_PAGED_ISA::rope, MLX_PAGED_ISA::rms_norm, MLX_PAGED_ISA::silu_mul,
     MLX_PAGED_ISA::layer_norm, MLX_PAGED_ISA::gelu, MLX_PAGED_ISA::clipped_swiglu,
     MLX_PAGED_ISA::greedy, MLX_PAGED_ISA::draw, MLX_PAGED_ISA::bitmask, MLX_PAGED_ISA::thresholds,
     MLX_PAGED_ISA::lora_down, MLX_PAGED_ISA::lora_up},
    {MLX_PAGED_ISA::few_rows, MLX_PAGED_ISA::unpack, MLX_PAGED_ISA::kMaxProductRows,
     MLX_PAGED_ISA::kMaxPackedRows},
#if defined(__AVX2__) && !defined(__AVX512F__)
    {MLX_PAGED_ISA::kIntegerKernels<1, 32>,
     {MLX_PAGED_ISA::kIntegerKernels<3, 32>, MLX_PAGED_ISA::kIntegerKernels<3, 64>},
     {},
     {},
     {},
     {},
     {}},
#else
    {MLX_PAGED_ISA::kIntegerKernels<1, 32>, {}, {}, {}, {}, {}, {}},
#endif
};

}  // namespace mlx_paged::cpu
