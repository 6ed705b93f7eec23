// Copyright © 2026 the mlx_paged authors. Apache-2.0.

#pragma once

#include <atomic>
#include <chrono>
#include <random>
#include <thread>

namespace mlx_paged::cuda {

inline void show_flag(unsigned int* flag, unsigned int value) {
  std::atomic_ref(*flag).store(value, std::memory_order_release);
}

// A block that goes on late now and then still reads what others may write again.
inline void wait_for_flag(const unsigned int* flag, unsigned int value, int) {
  static std::atomic<unsigned int> seed = 0;
  thread_local std::minstd_rand rng(++seed);
  std::atomic_ref shown(*const_cast<unsigned int*>(flag));
  while (int(shown.load(std::memory_order_acquire) - value) < 0) {
    std::this_thread::yield();
    fibers::yield();
  }
  if (rng() % 16 == 0) {
    std::this_thread::sleep_for(std::chrono::microseconds(rng() % 100));
  }
}

}  // namespace mlx_paged::cuda
