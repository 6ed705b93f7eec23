// Copyright © 2026 the mlx_paged authors. Apache-2.0.

#pragma once

#include <cstdlib>

namespace mlx_paged::cuda {

// Whether kernels serve that have not passed scripts/check_cuda.py on a GPU yet (docs/cuda.md lists
// them). That script asks for them.
inline bool takes_unchecked_kernels() {
  static const bool wanted = [] {
    const char* set = std::getenv("MLX_PAGED_UNCHECKED_KERNELS");
    return set && std::atoi(set) != 0;
  }();
  return wanted;
}

}  // namespace mlx_paged::cuda
