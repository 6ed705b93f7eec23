// Copyright © 2026 the mlx_paged authors. Apache-2.0.
//
// Programmatic dependent launch (sm_90 and later): a kernel of a step can start while the previous
// one ends. Every block of every kernel waits before it touches data that other kernels write, and
// before it returns, so a kernel's end implies the end of all earlier ones. Before the wait a
// kernel may read data that no kernel of the step writes: weights, the step's plan, keys and values
// of earlier steps. In an ordinary launch these functions do nothing.

#pragma once

namespace paged {

// Waits until earlier kernels have ended and their writes are visible.
__device__ __forceinline__ void wait_for_kernel_before() {
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 900
  asm volatile("griddepcontrol.wait;" ::: "memory");
#endif
}

// Lets the next kernel start once every block of this one has called this or ended.
__device__ __forceinline__ void let_next_kernel_begin() {
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 900
  asm volatile("griddepcontrol.launch_dependents;" ::: "memory");
#endif
}

// Starts a kernel that has no work before its wait. The next kernel may have some, so it is allowed
// to start first: its loads are then under way when this kernel ends.
__device__ __forceinline__ void begin_after_kernel_before() {
  let_next_kernel_begin();
  wait_for_kernel_before();
}

// Prefetches a 128-byte line into L2. Called before the wait for a line read after it.
__device__ __forceinline__ void fetch_to_l2(const void* line) {
#if defined(__CUDA_ARCH__)
  asm volatile("prefetch.global.L2 [%0];" ::"l"(line));
#endif
}

}  // namespace paged
