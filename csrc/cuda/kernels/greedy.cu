// Copyright © 2026 the mlx_paged authors. Apache-2.0.
//
// Greedy selection of the next tokens.

#include "greedy.h"

#include "../../../metal/kernel_table.h"
#include "../compiled_kernels.h"
#include "../msl/metal_stdlib"
#include "dependent_launch.h"

template <typename T>
__global__ void __launch_bounds__(paged::GREEDY_THREADS) greedy_tokens_entry(
    const T* logits, int* tokens, float* largest, int* reported,
    const __grid_constant__ paged::GreedyParams params) {
  paged::begin_after_kernel_before();
  greedy_tokens<T>(logits, tokens, largest, reported, params);
}

#define GREEDY(host_name, function, ...) {host_name, function##_entry<__VA_ARGS__>},

static const bool added = mlx_paged::cuda::add_kernels({
    // clang-format off
    PAGED_FOR_EACH_GREEDY_TEMPLATE(GREEDY)
    // clang-format on
});
