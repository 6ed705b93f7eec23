// Copyright © 2026 the mlx_paged authors. Apache-2.0.
//
// Flags in memory that several GPUs share.

#pragma once

namespace mlx_paged::cuda {

// Stores a flag. Whoever sees its value sees everything that this block wrote before its last
// barrier.
__device__ __forceinline__ void show_flag(unsigned int* flag, unsigned int value) {
  asm volatile("st.release.sys.u32 [%0], %1;" ::"l"(flag), "r"(value) : "memory");
}

__device__ __forceinline__ unsigned int shown_flag(const unsigned int* flag) {
  unsigned int value;
  asm volatile("ld.acquire.sys.u32 %0, [%1];" : "=r"(value) : "l"(flag) : "memory");
  return value;
}

// Waits until a flag, which only grows (and wraps around), has reached a value. The life monitor of
// the ranks ends a process whose peer has died (engine/ranks/life.py), and its kernels with it.
// This limit is the last resort: beyond it, the kernel fails.
__device__ __forceinline__ void wait_for_flag(const unsigned int* flag, unsigned int value) {
  constexpr unsigned int kPolls = 1 << 12;                // between two looks at the clock
  constexpr unsigned long long kLimit = 120'000'000'000;  // ns
  unsigned long long begin = 0;
  for (unsigned int polls = 1; int(shown_flag(flag) - value) < 0; polls++) {
    if (polls % kPolls == 0) {
      unsigned long long now;
      asm volatile("mov.u64 %0, %globaltimer;" : "=l"(now));
      begin = begin ? begin : now;
      if (now - begin > kLimit) {
        __trap();
      }
    }
  }
}

}  // namespace mlx_paged::cuda
