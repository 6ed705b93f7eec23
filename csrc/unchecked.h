// Copyright © 2026 the mlx_paged authors. Apache-2.0.

#pragma once

#include <cstdlib>

namespace mlx_paged {

// Whether those serve that have not passed their tests on a GPU of this kind yet: on NVIDIA's
// docs/cuda.md lists them, and scripts/check_cuda.py asks for them; on Apple's it is device
// programs, which bench/mac_report.py asks for.
inline bool takes_unchecked_kernels() {
  static const bool wanted = [] {
    const char* set = std::getenv("MLX_PAGED_UNCHECKED_KERNELS");
    return set && std::atoi(set) != 0;
  }();
  return wanted;
}

}  // namespace mlx_paged
