// Copyright © 2026 the mlx_paged authors. Apache-2.0.
//
// The compiled kernels by host name. Each file of kernels/ enters its own.

#pragma once

#include <cstdint>
#include <string>
#include <vector>

namespace mlx_paged::cuda {

struct CompiledKernel {
  const char* host_name;
  const void* symbol;  // of the __global__ function
};

// Called when the library is loaded; the result only gives the caller something to initialise.
bool add_kernels(const std::vector<CompiledKernel>& kernels);

// Throws std::runtime_error with the name if this build has no such kernel.
const void* find_kernel(const std::string& host_name);

// Loads a kernel, and lets it have that many bytes of dynamic shared memory or more: one kernel is
// launched with different sizes. Throws std::runtime_error.
void allow_shared_memory(const void* symbol, const std::string& host_name, uint32_t bytes);

}  // namespace mlx_paged::cuda
