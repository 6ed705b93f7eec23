// Copyright © 2026 the mlx_paged authors. Apache-2.0.
//
// Stands in for csrc/cuda/kernels/finished_blocks.h where kernels run on the CPU, one cluster after
// another: blocks that are waited for have finished before, or belong to the same cluster.

#pragma once

#include <atomic>

#include "../fibers.h"

namespace mlx_paged::cuda {

struct FinishedBlocks {
  unsigned int* count;
  int num_first;
  int num_others;

  void add() const { increment(); }

  void wait() const {
    while (int(std::atomic_ref(*count)) < num_first) {
      fibers::require(blockIdx.x < num_first, "the first blocks have finished");
      fibers::yield();
    }
    increment();
  }

 private:
  void increment() const {
    std::atomic_ref at(*count);
    unsigned int before = at;
    while (!at.compare_exchange_weak(before, (before + 1) % (num_first + num_others))) {
    }
  }
};

}  // namespace mlx_paged::cuda
