// Copyright © 2026 the mlx_paged authors. Apache-2.0.
//
// Flags in memory that several GPUs share.

#pragma once

namespace mlx_paged::cuda {

// Stores a flag. A reader that sees its value also sees everything that this block wrote before its
// last barrier.
__device__ __forceinline__ void show_flag(unsigned int* flag, unsigned int value) {
  asm volatile("st.release.sys.u32 [%0], %1;" ::"l"(flag), "r"(value) : "memory");
}

__device__ __forceinline__ unsigned int shown_flag(const unsigned int* flag) {
  unsigned int value;
  asm volatile("ld.acquire.sys.u32 %0, [%1];" : "=r"(value) : "l"(flag) : "memory");
  return value;
}

// Waits until a flag, which only grows (and wraps around), reaches a value; for at most `patience`
// seconds if that is positive. Without a limit, the ranks' life monitor ends a process whose peer
// has died (engine/ranks/life.py), and its kernels with it; as a last resort, the kernel fails.
__device__ __forceinline__ void wait_for_flag(
    const unsigned int* flag, unsigned int value, int patience) {
  constexpr unsigned int kPolls = 1 << 12;  // between two reads of the clock
  constexpr int kMostSeconds = 120;
  const unsigned long long limit = (patience > 0 ? patience : kMostSeconds) * 1'000'000'000ull;
  unsigned long long begin = 0;
  for (unsigned int polls = 1; int(shown_flag(flag) - value) < 0; polls++) {
    if (polls % kPolls == 0) {
      unsigned long long now;
      asm volatile("mov.u64 %0, %globaltimer;" : "=l"(now));
      begin = begin ? begin : now;
      if (now - begin > limit) {
        if (patience > 0) {
          return;
        }
        __trap();
      }
    }
  }
}

}  // namespace mlx_paged::cuda
