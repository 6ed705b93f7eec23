// Copyright © 2026 the mlx_paged authors. Apache-2.0.

#include "compiled_kernels.h"

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

}  // namespace mlx_paged::cuda
