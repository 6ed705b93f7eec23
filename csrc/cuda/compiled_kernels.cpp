// Copyright © 2026 the mlx_paged authors. Apache-2.0.

#include "compiled_kernels.h"

#include <cuda_runtime.h>

#include <mutex>
#include <stdexcept>
#include <unordered_map>

namespace mlx_paged::cuda {

namespace {
std::unordered_map<std::string, const void*>& table() {
  static std::unordered_map<std::string, const void*> kernels;
  return kernels;
}
}  // namespace

bool add_kernels(const std::vector<CompiledKernel>& kernels) {
  for (const auto& kernel : kernels) {
    table().emplace(kernel.host_name, kernel.symbol);
  }
  return true;
}

const void* find_kernel(const std::string& host_name) {
  auto found = table().find(host_name);
  if (found == table().end()) {
    throw std::runtime_error("[cuda] this build has no kernel " + host_name);
  }
  return found->second;
}

void allow_shared_memory(const void* symbol, const std::string& host_name, uint32_t bytes) {
  static std::mutex mutex;  // between asking and setting
  std::lock_guard lock(mutex);
  cudaFuncAttributes found;
  auto status = cudaFuncGetAttributes(&found, symbol);
  if (status == cudaSuccess && found.maxDynamicSharedSizeBytes < int(bytes)) {
    status = cudaFuncSetAttribute(symbol, cudaFuncAttributeMaxDynamicSharedMemorySize, int(bytes));
  }
  if (status != cudaSuccess) {
    cudaGetLastError();  // (the next call must not report it again)
    throw std::runtime_error(
        "[cuda] " + std::to_string(bytes) + " bytes of shared memory for " + host_name + ": " +
        cudaGetErrorString(status));
  }
}

}  // namespace mlx_paged::cuda
