// Copyright © 2026 the mlx_paged authors. Apache-2.0.
//
// A ring of stages in shared memory that the copy engine fills (sm_90 and later). One thread has it
// copy tiles; warps wait until a stage is full, read it, and release it. Nothing else waits.

#pragma once

#include <cuda.h>

#include "linear_math.h"
#include "operand_maps.h"
#include "tensor_core.h"

namespace mlx_paged::cuda {

#if !defined(__CUDA_ARCH__) || __CUDA_ARCH__ >= 900

template <int STAGES>
struct CopyRing {
  unsigned int barriers;  // where they are in shared memory: copy_ring_bytes(STAGES)

  // By one thread, before any other uses it. `readers`: warps; `fillers`: threads that call `expect`
  // for each use of a stage.
  __device__ __forceinline__ void begin(int readers, int fillers = 1) const {
#pragma unroll
    for (int i = 0; i < STAGES; i++) {
      initialise(full(i), fillers);
      initialise(free(i), readers);
    }
    asm volatile("fence.mbarrier_init.release.cluster;" ::: "memory");
  }

  // Waits until nobody reads what was in a stage before. It is full when `bytes` have come. `round`:
  // how often it was used before.
  __device__ __forceinline__ void expect(int stage, int round, int bytes) const {
    if (round > 0) {
      wait_until_released(stage, round - 1);
    }
    expect_at_once(stage, bytes);
  }

  // The same where it is known that nobody reads it.
  __device__ __forceinline__ void expect_at_once(int stage, int bytes) const {
    asm volatile("mbarrier.arrive.expect_tx.shared.b64 _, [%0], %1;" ::"r"(full(stage)), "r"(bytes)
                 : "memory");
  }

  // A box of a matrix, from row `row` and column `column` on, which is a multiple of 16 bytes.
  __device__ __forceinline__ void copy(
      int stage, unsigned int to, const CUtensorMap* map, int column, int row,
      paged::CachePolicy policy) const {
    asm volatile(
        "cp.async.bulk.tensor.2d.shared::cluster.global.mbarrier::complete_tx::bytes"
        ".L2::cache_hint [%0], [%1, {%2, %3}], [%4], %5;" ::"r"(to),
        "l"(map), "r"(column), "r"(row), "r"(full(stage)), "l"(policy.bits)
        : "memory");
  }

  // Copies contiguous bytes. Addresses and sizes are multiples of 16 bytes.
  __device__ __forceinline__ void copy_bytes(
      int stage, unsigned int to, const void* from, int bytes, paged::CachePolicy policy) const {
    asm volatile(
        "cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes.L2::cache_hint"
        " [%0], [%1], %2, [%3], %4;" ::"r"(to),
        "l"(from), "r"(bytes), "r"(full(stage)), "l"(policy.bits)
        : "memory");
  }

  __device__ __forceinline__ void wait_until_full(int stage, int round) const {
    wait(full(stage), round & 1);
  }

  // By every lane of a warp that has read it.
  __device__ __forceinline__ void release(int stage, int lane) const {
    __syncwarp();
    if (lane == 0) {
      asm volatile("mbarrier.arrive.shared.b64 _, [%0];" ::"r"(free(stage)) : "memory");
    }
  }

  // Until all readers have released a stage once more than `round` times.
  __device__ __forceinline__ void wait_until_released(int stage, int round) const {
    wait(free(stage), round & 1);
  }

 private:
  __device__ __forceinline__ unsigned int full(int stage) const { return barriers + stage * 8; }
  __device__ __forceinline__ unsigned int free(int stage) const {
    return barriers + (STAGES + stage) * 8;
  }

  __device__ __forceinline__ static void initialise(unsigned int barrier, int count) {
    asm volatile("mbarrier.init.shared.b64 [%0], %1;" ::"r"(barrier), "r"(count) : "memory");
  }

  __device__ __forceinline__ static void wait(unsigned int barrier, int parity) {
    asm volatile(
        "{\n"
        ".reg .pred done;\n"
        "again:\n"
        "mbarrier.try_wait.parity.shared.b64 done, [%0], %1;\n"
        "@!done bra again;\n"
        "}" ::"r"(barrier),
        "r"(parity)
        : "memory");
  }
};

// By one lane of each of so many warps that have read something: whether it is the last of them.
__device__ __forceinline__ bool is_last(unsigned int counter, int warps) {
  unsigned int before;
  asm volatile("atom.acq_rel.cta.shared::cta.inc.u32 %0, [%1], %2;"
               : "=r"(before)
               : "r"(counter), "r"(warps - 1)
               : "memory");
  return before + 1 == warps;
}

// Blocks of this block's cluster; 1: it was launched without. (volatile: a call finds it again,
// and no registers keep what follows from it.)
__device__ __forceinline__ int cluster_size() {
  unsigned int size;
  asm volatile("mov.u32 %0, %%cluster_nctaid.x;" : "=r"(size));
  return int(size);
}

#endif

}  // namespace mlx_paged::cuda
