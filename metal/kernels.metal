// Copyright © 2026 the mlx_paged authors. Apache-2.0.
//
// Includes every kernel, for a library compiled ahead of time and for the simulator. MLX compiles
// one at a time (csrc/kernel_source.cpp).

#include "data.h"
#include "draw.h"
#include "experts.h"
#include "greedy.h"
#include "kernel_table.h"
#include "language.h"
#include "layer.h"
#include "lora.h"
#include "paged_decode.h"
#include "paged_decode_matrix.h"
#include "paged_merge.h"
#include "paged_prefill.h"
#include "products.h"
#include "quantized_pool.h"
#include "thresholds.h"

#define INSTANTIATE(name, function, ...) PAGED_INSTANTIATE(name, function<__VA_ARGS__>)
PAGED_FOR_EACH_DATA_TEMPLATE(INSTANTIATE)
PAGED_FOR_EACH_QUANTIZED_TEMPLATE(INSTANTIATE)
PAGED_FOR_EACH_LAYER_TEMPLATE(INSTANTIATE)
PAGED_FOR_EACH_PRODUCT_TEMPLATE(INSTANTIATE)
PAGED_FOR_EACH_EXPERT_TEMPLATE(INSTANTIATE)
PAGED_FOR_EACH_LORA_TEMPLATE(INSTANTIATE)
PAGED_FOR_EACH_GREEDY_TEMPLATE(INSTANTIATE)
PAGED_FOR_EACH_DRAW_TEMPLATE(INSTANTIATE)
PAGED_FOR_EACH_THRESHOLD_TEMPLATE(INSTANTIATE)
PAGED_FOR_EACH_ATTENTION_TEMPLATE(INSTANTIATE)

#if __METAL_VERSION__ >= 400 && defined(__HAVE_TENSOR__)
#include "tensor_prefill.h"
#include "tensor_product.h"

PAGED_FOR_EACH_TENSOR_TEMPLATE(INSTANTIATE)
#endif
