// Copyright © 2026 the mlx_paged authors. Apache-2.0.
//
// Programmatic dependent launch (sm_90 and later): a kernel of a step may begin while the one
// before it ends. Each kernel waits before it touches what others write, in every block and before
// any returns, so that a kernel's end implies the end of all before it. Launched otherwise, both do
// nothing.

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

}  // namespace paged
