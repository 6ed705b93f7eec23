// Copyright © 2026 the mlx_paged authors. Apache-2.0.

#include "../../../metal/kernel_table.h"
#include "../compiled_kernels.h"
#include "../msl/metal_stdlib"
#include "peer_sum.h"

template <typename T, int RANKS>
__global__ void __launch_bounds__(mlx_paged::cuda::kPeerThreads) peer_sum_entry(
    const uint4* x, unsigned int* rounds, uint4* out,
    const __grid_constant__ mlx_paged::cuda::PeerSumParams params) {
  paged::begin_after_kernel_before();
  mlx_paged::cuda::peer_sum<T, RANKS>(x, rounds, out, params);
}

#define PEER_SUMS(dtype, type)                            \
  {"peer_sum_" #dtype "_2", peer_sum_entry<type, 2>},     \
      {"peer_sum_" #dtype "_4", peer_sum_entry<type, 4>}, \
      {"peer_sum_" #dtype "_8", peer_sum_entry<type, 8>},

static const bool added = mlx_paged::cuda::add_kernels({
    // clang-format off
    PEER_SUMS(float32, float)
    PEER_SUMS(float16, half)
    PEER_SUMS(bfloat16, bfloat)
    PEER_SUMS(int32, int)
    // clang-format on
});
