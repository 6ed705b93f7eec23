// Copyright © 2026 the mlx_paged authors. Apache-2.0.
//
// The compiled kernels by host name. Each file in kernels/ registers its own.

#pragma once

#include <cstddef>
#include <cstdint>
#include <string>
#include <vector>

namespace mlx_paged::cuda {

struct CompiledKernel {
  const char* host_name;
  const void* symbol;  // the __global__ function
  size_t num_arguments;

  template <typename... Arguments>
  CompiledKernel(const char* host_name, void (*kernel)(Arguments...))
      : host_name(host_name),
        symbol(reinterpret_cast<const void*>(kernel)),
        num_arguments(sizeof...(Arguments)) {}
};

// Runs when the library is loaded; the return value only serves to initialize a static variable.
bool add_kernels(const std::vector<CompiledKernel>& kernels);

// Throws std::runtime_error with the name if this build has no such kernel.
const void* find_kernel(const std::string& host_name);

// The same, and checks the number of arguments: with too few, CUDA would read past their end.
const void* find_kernel(const std::string& host_name, size_t num_arguments);

// Loads a kernel and raises its limit of dynamic shared memory to at least `bytes`; launches of one
// kernel differ in size. Throws std::runtime_error.
void allow_shared_memory(const void* symbol, const std::string& host_name, uint32_t bytes);

}  // namespace mlx_paged::cuda
