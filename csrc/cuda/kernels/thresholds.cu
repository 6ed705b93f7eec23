// Copyright © 2026 the mlx_paged authors. Apache-2.0.
//
// min-p, top-k and top-p without sorting.

#include "../../../metal/kernel_table.h"
#include "../compiled_kernels.h"
#include "../msl/metal_stdlib"
#include "dependent_launch.h"
#include "thresholds.h"

template <typename T>
__global__ void __launch_bounds__(paged::THRESHOLD_THREADS) sampling_thresholds_entry(
    const T* logits, const float* largest, const float* temperature, const float* floors,
    const int* top_k, const float* top_p, float* thresholds,
    const __grid_constant__ paged::ThresholdParams params) {
  paged::begin_after_kernel_before();
  sampling_thresholds<T>(logits, largest, temperature, floors, top_k, top_p, thresholds, params);
}

#define THRESHOLDS(host_name, function, ...) {host_name, function##_entry<__VA_ARGS__>},

static const bool added = mlx_paged::cuda::add_kernels({
    // clang-format off
    PAGED_FOR_EACH_THRESHOLD_TEMPLATE(THRESHOLDS)
    // clang-format on
});
