// Copyright © 2026 the mlx_paged authors. Apache-2.0.
//
// Products of more rows than linear.cu serves, by cuBLASLt, as launches of a device program.

#pragma once

#include <cuda_runtime.h>

#include <cstdint>
#include <string>
#include <vector>

#include "../launch.h"
#include "products.h"

namespace mlx_paged::cuda {

inline bool is_library_product(const Launch& launch) {
  return launch.kernel.host_name == kLibraryProduct;
}

// Runs one on a stream, as its params say; `addresses` are those of its buffers. Throws
// std::runtime_error. The library loads kernels when it first runs a product, which must not happen
// while launches are captured.
void run_library_product(
    const Launch& launch, const std::vector<char*>& addresses, cudaStream_t stream);

}  // namespace mlx_paged::cuda
