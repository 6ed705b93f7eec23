// Copyright © 2026 the mlx_paged authors. Apache-2.0.
//
// Draws the next tokens.

#include "draw.h"

#include "../../../metal/kernel_table.h"
#include "../compiled_kernels.h"
#include "../msl/metal_stdlib"
#include "dependent_launch.h"

template <typename T>
__global__ void __launch_bounds__(paged::DRAW_THREADS) draw_tokens_entry(
    const T* logits, const int* greedy, const float* largest, const float* temperature,
    const unsigned* keys, const float* thresholds, paged::DrawnToken* parts,
    const __grid_constant__ paged::DrawParams params) {
  paged::begin_after_kernel_before();
  draw_tokens<T>(logits, greedy, largest, temperature, keys, thresholds, parts, params);
}

__global__ void __launch_bounds__(32) merge_draws_entry(
    const int* greedy, const float* temperature, const paged::DrawnToken* parts, int* tokens,
    const __grid_constant__ paged::DrawParams params) {
  paged::begin_after_kernel_before();
  merge_draws(greedy, temperature, parts, tokens, params);
}

#define DRAW(host_name, function, ...) {host_name, function##_entry<__VA_ARGS__>},

static const bool added = mlx_paged::cuda::add_kernels({
    // clang-format off
    PAGED_FOR_EACH_DRAW_TEMPLATE(DRAW)
    {"merge_draws", merge_draws_entry},
    // clang-format on
});
