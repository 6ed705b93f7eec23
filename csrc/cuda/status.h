// Copyright © 2026 the mlx_paged authors. Apache-2.0.

#pragma once

#include <cuda_runtime.h>

#include <stdexcept>
#include <string>

namespace mlx_paged::cuda {

// Throws if a call of the CUDA runtime failed. `what` names what is missing.
inline void check(cudaError_t status, const std::string& what) {
  if (status != cudaSuccess) {
    cudaGetLastError();  // clears the error, so that the next call does not report it
    throw std::runtime_error("[cuda] " + what + ": " + cudaGetErrorString(status));
  }
}

}  // namespace mlx_paged::cuda
