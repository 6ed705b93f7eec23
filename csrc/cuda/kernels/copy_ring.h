// Copyright © 2026 the mlx_paged authors. Apache-2.0.
//
// A ring of stages in shared memory that the copy engine (TMA, sm_90 and later) fills. One thread
// issues the copies; each warp waits until a stage is full, reads it and releases it.

#pragma once

#include <cuda.h>

#include "linear_math.h"
#include "operand_maps.h"
#include "tensor_core.h"

namespace mlx_paged::cuda {

#if !defined(__CUDA_ARCH__) || __CUDA_ARCH__ >= 900

template <int STAGES>
struct CopyRing {
  unsigned int barriers;  // their address in shared memory; copy_ring_bytes(STAGES) bytes

  // Initializes the barriers. One thread calls it before any other use. `readers`: number of
  // reading warps; `fillers`: number of threads that call `expect` for each use of a stage.
  __device__ __forceinline__ void begin(int readers, int fillers = 1) const {
#pragma unroll
    for (int i = 0; i < STAGES; i++) {
      initialise(full(i), fillers);
      initialise(free(i), readers);
    }
    asm volatile("fence.mbarrier_init.release.cluster;" ::: "memory");
  }

  // Waits until every warp has released the stage, then marks it full once `bytes` arrive. `round`:
  // how often the stage was used before.
  __device__ __forceinline__ void expect(int stage, int round, int bytes) const {
    if (round > 0) {
      wait_until_released(stage, round - 1);
    }
    expect_at_once(stage, bytes);
  }

  // expect() for a stage that is known to be free.
  __device__ __forceinline__ void expect_at_once(int stage, int bytes) const {
    asm volatile("mbarrier.arrive.expect_tx.shared.b64 _, [%0], %1;" ::"r"(full(stage)), "r"(bytes)
                 : "memory");
  }

  // Copies a box of a matrix that starts at row `row` and column `column`, a multiple of 16 bytes.
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

  // Called by every lane of a warp that has read the stage. `none`: 0 as the result of the last
  // loads (none_after), because the hardware does not wait for loads before it arrives: the stage
  // was filled again before they had read it where something held them up, such as a fence.
  __device__ __forceinline__ void release(int stage, int lane, unsigned int none = 0) const {
    __syncwarp();
    if (lane == 0) {
      asm volatile("mbarrier.arrive.shared.b64 _, [%0];" ::"r"(free(stage) + none) : "memory");
    }
  }

  // Waits until all readers have released a stage `round` + 1 times.
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

// Counts `warps` arrivals, one lane per warp, and returns true to the last one.
__device__ __forceinline__ bool is_last(unsigned int counter, int warps) {
  unsigned int before;
  asm volatile("atom.acq_rel.cta.shared::cta.inc.u32 %0, [%1], %2;"
               : "=r"(before)
               : "r"(counter), "r"(warps - 1)
               : "memory");
  return before + 1 == warps;
}

// Number of blocks in this block's cluster; 1 without a cluster. volatile keeps the compiler from
// holding the result in registers between calls.
__device__ __forceinline__ int cluster_size() {
  unsigned int size;
  asm volatile("mov.u32 %0, %%cluster_nctaid.x;" : "=r"(size));
  return int(size);
}

#endif

}  // namespace mlx_paged::cuda
