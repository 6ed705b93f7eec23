// Copyright © 2026 the mlx_paged authors. Apache-2.0.
//
// Runs kernels that csrc/cuda/kernels shares with metal/ on the CPU (fibers.h). A program includes
// this file, then the kernels' source, whose kernels are found by host name.

#pragma once

#include <map>
#include <string>

#include "../compiled_kernels.h"
#include "fibers.h"

namespace {

int grid_z = 0;  // of the blocks that run
int compared = 0;
int failed = 0;

std::map<std::string, mlx_paged::cuda::CompiledKernel>& kernels() {
  static std::map<std::string, mlx_paged::cuda::CompiledKernel> all;
  return all;
}

// The kernel of this host name, as a pointer of type F.
template <typename F>
F kernel_named(const std::string& name) {
  return reinterpret_cast<F>(const_cast<void*>(kernels().at(name).symbol));
}

}  // namespace

bool mlx_paged::cuda::add_kernels(const std::vector<CompiledKernel>& more) {
  for (const auto& kernel : more) {
    kernels().emplace(kernel.host_name, kernel);
  }
  return true;
}

// Metal's language takes positions as CUDA has them.
#undef blockIdx
#define blockIdx make_uint3(blockIdx_.x, blockIdx_.y, grid_z)
#define gridDim make_uint3(0, 0, 0)  // not read by these kernels

// Declared for templates that no program instantiates.
bool __all_sync(unsigned int, bool);
int __popc(unsigned int);

namespace metal {
__thread unsigned char paged_threadgroup_memory[12288] __attribute__((aligned(16)));
}
