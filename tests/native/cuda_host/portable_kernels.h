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
#define blockDim make_uint3(fibers::block->fibers.size(), 1, 1)
#define gridDim make_uint3(0, 0, 0)  // not read by these kernels

inline float __shfl_xor_sync(unsigned int, float v, int mask) {
  struct Operand {
    float from;
    int mask;
    float* to;
  };
  float to;
  fibers::together_in_warp(Operand{v, mask, &to}, [](Operand* lanes) {
    for (int lane = 0; lane < 32; lane++) {
      *lanes[lane].to = lanes[lane ^ lanes[lane].mask].from;
    }
  });
  return to;
}

template <typename T>
inline T __shfl_sync(unsigned int, T v, int lane) {
  struct Operand {
    T from;
    int lane;
    T* to;
  };
  T to;
  fibers::together_in_warp(Operand{v, lane, &to}, [](Operand* lanes) {
    for (int i = 0; i < 32; i++) {
      *lanes[i].to = lanes[lanes[i].lane].from;
    }
  });
  return to;
}

// Declared for templates that no program instantiates.
bool __all_sync(unsigned int, bool);
int __popc(unsigned int);

namespace metal {
__thread unsigned char paged_threadgroup_memory[12288] __attribute__((aligned(16)));
}
