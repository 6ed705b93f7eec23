// Copyright © 2026 the mlx_paged authors. Apache-2.0.

#include "compiled_kernels.h"

#include <cuda_runtime.h>

#include <mutex>
#include <stdexcept>
#include <unordered_map>

namespace mlx_paged::cuda {

namespace {
std::unordered_map<std::string, CompiledKernel>& table() {
  static std::unordered_map<std::string, CompiledKernel> kernels;
  return kernels;
}

const CompiledKernel& kernel_of(const std::string& host_name) {
  auto found = table().find(host_name);
  if (found == table().end()) {
    throw std::runtime_error("[cuda] this build has no kernel " + host_name);
  }
  return found->second;
}
}  // namespace

bool add_kernels(const std::vector<CompiledKernel>& kernels) {
  for (const auto& kernel : kernels) {
    table().emplace(kernel.host_name, kernel);
  }
  return true;
}

const void* find_kernel(const std::string& host_name) {
  return kernel_of(host_name).symbol;
}

const void* find_kernel(const std::string& host_name, size_t num_arguments) {
  const auto& kernel = kernel_of(host_name);
  if (kernel.num_arguments != num_arguments) {
    throw std::runtime_error(
        "[cuda] " + host_name + " takes " + std::to_string(kernel.num_arguments) +
        " arguments but got " + std::to_string(num_arguments));
  }
  return kernel.symbol;
}

void allow_shared_memory(const void* symbol, const std::string& host_name, uint32_t bytes) {
  static std::mutex mutex;  // between query and update
  std::lock_guard lock(mutex);
  cudaFuncAttributes attributes;
  auto status = cudaFuncGetAttributes(&attributes, symbol);
  if (status == cudaSuccess && attributes.maxDynamicSharedSizeBytes < int(bytes)) {
    status = cudaFuncSetAttribute(symbol, cudaFuncAttributeMaxDynamicSharedMemorySize, int(bytes));
  }
  if (status != cudaSuccess) {
    cudaGetLastError();  // clears the error, so that the next call does not report it
    throw std::runtime_error(
        "[cuda] cannot get " + std::to_string(bytes) + " bytes of shared memory for " + host_name +
        ": " + cudaGetErrorString(status));
  }
}

}  // namespace mlx_paged::cuda
