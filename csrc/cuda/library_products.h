// Copyright © 2026 the mlx_paged authors. Apache-2.0.
//
// cuBLASLt products for more rows than linear.cu serves, as launches of a device program.

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

// Runs a library product on a stream; `addresses` are those of its buffers. Throws
// std::runtime_error. cuBLASLt loads kernels when it first runs a product, so that must not happen
// during a capture.
void run_library_product(
    const Launch& launch, const std::vector<char*>& addresses, cudaStream_t stream);

}  // namespace mlx_paged::cuda
