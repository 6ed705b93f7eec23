// Copyright © 2026 the mlx_paged authors. Apache-2.0.
//
// Lets a grid's later blocks wait for its first ones. Blocks start in the order of their indices,
// and the first ones never wait for another block, so every wait ends.

#pragma once

namespace mlx_paged::cuda {

struct FinishedBlocks {
  unsigned int* count;  // in device memory; zero between launches
  int num_first;        // blocks that call add()
  int num_others;       // blocks that call wait()

  // Called by one thread of a block, after a barrier of all threads of it that wrote.
  __device__ __forceinline__ void add() const {
    __threadfence();
    increment();
  }

  // Waits for the first blocks. Called by one thread of a block; threads that meet it at a later
  // barrier see what the first blocks wrote.
  __device__ __forceinline__ void wait() const {
    int found;
    do {
      asm volatile("ld.acquire.gpu.global.u32 %0, [%1];" : "=r"(found) : "l"(count) : "memory");
    } while (found < num_first);
    increment();
  }

 private:
  // The last block's call sets the count to zero.
  __device__ __forceinline__ void increment() const {
    atomicInc(count, num_first + num_others - 1);
  }
};

}  // namespace mlx_paged::cuda
