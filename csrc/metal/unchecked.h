// Copyright © 2026 the mlx_paged authors. Apache-2.0.

#pragma once

#include <cstdlib>

namespace mlx_paged {

// Whether what has not run on an Apple GPU yet serves: device programs (docs/metal-kernels.md),
// which bench/mac_report.py asks for.
inline bool takes_unchecked_kernels() {
  static const bool wanted = [] {
    const char* set = std::getenv("MLX_PAGED_UNCHECKED_KERNELS");
    return set && std::atoi(set) != 0;
  }();
  return wanted;
}

}  // namespace mlx_paged
