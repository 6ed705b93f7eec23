// Copyright © 2026 the mlx_paged authors. Apache-2.0.
//
// Low-rank adapters: the kernels of metal/lora.h.

#include "../../../metal/kernel_table.h"
#include "../compiled_kernels.h"
#include "../msl/metal_stdlib"
#include "dependent_launch.h"
#include "lora.h"

template <typename T>
__global__ void __launch_bounds__(paged::LORA_THREADS) lora_down_entry(
    const T* x, const int* adapters, const T* a, float* hidden,
    const __grid_constant__ paged::LoraParams params) {
  paged::begin_after_kernel_before();
  lora_down<T>(x, adapters, a, hidden, params);
}

template <typename T>
__global__ void __launch_bounds__(paged::LORA_THREADS) lora_up_entry(
    const T* base, const float* hidden, const int* adapters, const T* b, T* out,
    const __grid_constant__ paged::LoraParams params) {
  paged::begin_after_kernel_before();
  lora_up<T>(base, hidden, adapters, b, out, params);
}

#define LORA(host_name, function, ...) {host_name, function##_entry<__VA_ARGS__>},

static const bool added = mlx_paged::cuda::add_kernels({
    // clang-format off
    PAGED_FOR_EACH_LORA_TEMPLATE(LORA)
    // clang-format on
});
