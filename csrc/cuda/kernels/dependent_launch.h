// Copyright © 2026 the mlx_paged authors. Apache-2.0.
//
// Programmatic dependent launch (sm_90 and later): a kernel of a step may begin while the one
// before it ends. Each kernel waits before it touches what others write, in every block and before
// any returns, so that a kernel's end implies the end of all before it. Before its wait a kernel may
// read what no kernel of the step writes: weights, the step's plan, keys and values of earlier
// steps. Launched otherwise, all of these do nothing.

#pragma once

namespace paged {

// Until the kernels before have ended and what they wrote is seen.
__device__ __forceinline__ void wait_for_kernel_before() {
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 900
  asm volatile("griddepcontrol.wait;" ::: "memory");
#endif
}

// The next kernel may begin once every block of this one has come here or ended.
__device__ __forceinline__ void let_next_kernel_begin() {
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 900
  asm volatile("griddepcontrol.launch_dependents;" ::: "memory");
#endif
}

// How a kernel begins that has nothing to do before its wait. The next one may still have: it is
// on a multiprocessor, with what no kernel writes under way, when this one has ended.
__device__ __forceinline__ void begin_after_kernel_before() {
  let_next_kernel_begin();
  wait_for_kernel_before();
}

// Before the wait, of a line of 128 bytes that is read after it.
__device__ __forceinline__ void fetch_to_l2(const void* line) {
#if defined(__CUDA_ARCH__)
  asm volatile("prefetch.global.L2 [%0];" ::"l"(line));
#endif
}

}  // namespace paged
