// Copyright © 2026 the mlx_paged authors. Apache-2.0.
//
// Loads, stores and copies of shared memory by address, and thread block clusters (sm_90 and
// later).

#pragma once

#include <cuda_bf16.h>
#include <cuda_fp16.h>

#include "linear_math.h"

namespace mlx_paged::cuda {

__device__ __forceinline__ Eight load_shared(unsigned int address) {
  Eight v;
  asm volatile("ld.shared.v4.u32 {%0, %1, %2, %3}, [%4];"
               : "=r"(v.x), "=r"(v.y), "=r"(v.z), "=r"(v.w)
               : "r"(address)
               : "memory");
  return v;
}

__device__ __forceinline__ void load_shared_pair(
    unsigned int address, unsigned int& a, unsigned int& b) {
  asm volatile("ld.shared.v2.u32 {%0, %1}, [%2];" : "=r"(a), "=r"(b) : "r"(address) : "memory");
}

__device__ __forceinline__ unsigned int load_shared_word(unsigned int address) {
  unsigned int v;
  asm volatile("ld.shared.u32 %0, [%1];" : "=r"(v) : "r"(address) : "memory");
  return v;
}

__device__ __forceinline__ unsigned short load_shared_half(unsigned int address) {
  unsigned short v;
  asm volatile("ld.shared.u16 %0, [%1];" : "=h"(v) : "r"(address) : "memory");
  return v;
}

__device__ __forceinline__ unsigned int load_shared_byte(unsigned int address) {
  unsigned int v;
  asm volatile("ld.shared.u8 %0, [%1];" : "=r"(v) : "r"(address) : "memory");
  return v;
}

// A barrier of the block's first WARPS warps.
template <int WARPS>
__device__ __forceinline__ void barrier_of_warps() {
  asm volatile("bar.sync 1, %0;" ::"n"(32 * WARPS) : "memory");
}

// Zeros 16 bytes.
__device__ __forceinline__ void clear_shared(unsigned int address) {
  asm volatile("st.shared.v4.u32 [%0], {%1, %1, %1, %1};" ::"r"(address), "r"(0) : "memory");
}

__device__ __forceinline__ void store_shared(unsigned int address, Eight v) {
  asm volatile("st.shared.v4.u32 [%0], {%1, %2, %3, %4};" ::"r"(address), "r"(v.x), "r"(v.y),
               "r"(v.z), "r"(v.w)
               : "memory");
}

__device__ __forceinline__ void store_shared_word(unsigned int address, unsigned int v) {
  asm volatile("st.shared.u32 [%0], %1;" ::"r"(address), "r"(v) : "memory");
}

__device__ __forceinline__ void store_shared_half(unsigned int address, unsigned short v) {
  asm volatile("st.shared.u16 [%0], %1;" ::"r"(address), "h"(v) : "memory");
}

__device__ __forceinline__ void store_shared_byte(unsigned int address, unsigned int v) {
  asm volatile("st.shared.u8 [%0], %1;" ::"r"(address), "r"(v) : "memory");
}

// paged::copy_async of 16 bytes; bytes from number `bytes` on become zeros.
__device__ __forceinline__ void copy_part_async(
    unsigned int to, const void* from, int bytes, paged::CachePolicy policy) {
  asm volatile("cp.async.cg.shared.global.L2::cache_hint [%0], [%1], 16, %2, %3;" ::"r"(to),
               "l"(from), "r"(bytes), "l"(policy.bits)
               : "memory");
}

// Copies 4 or 8 bytes; zeros if `exists` is false.
template <int BYTES>
__device__ __forceinline__ void copy_few_async(unsigned int to, const void* from, bool exists) {
  static_assert(BYTES == 4 || BYTES == 8);
  asm volatile("cp.async.ca.shared.global [%0], [%1], %2, %3;" ::"r"(to), "l"(from), "n"(BYTES),
               "r"(exists ? BYTES : 0)
               : "memory");
}

// Loads data that the previous kernel may have written, so it bypasses the read-only cache.
__device__ __forceinline__ Eight load_x(const void* p) {
  Eight v;
  asm volatile("ld.global.v4.u32 {%0, %1, %2, %3}, [%4];"
               : "=r"(v.x), "=r"(v.y), "=r"(v.z), "=r"(v.w)
               : "l"(p)
               : "memory");
  return v;
}

// The same address, but reads through it bypass the read-only cache.
template <typename V>
__device__ __forceinline__ const V* as_written(const void* p) {
  asm volatile("" : "+l"(p));
  return static_cast<const V*>(p);
}

// (v & mask) | set in one instruction; for constants the compiler would emit two.
__device__ __forceinline__ unsigned int masked_or(
    unsigned int v, unsigned int mask, unsigned int set) {
  unsigned int out;
  asm("lop3.b32 %0, %1, %2, %3, 0xea;" : "=r"(out) : "r"(v), "r"(mask), "r"(set));
  return out;
}

#if !defined(__CUDA_ARCH__) || __CUDA_ARCH__ >= 900

__device__ __forceinline__ void cluster_barrier() {
  asm volatile(
      "barrier.cluster.arrive.aligned;\n"
      "barrier.cluster.wait.aligned;" ::
          : "memory");
}

// Keeps a block alive while others read its shared memory. Relaxed: it orders no writes to device
// memory.
__device__ __forceinline__ void end_of_cluster() {
  asm volatile(
      "barrier.cluster.arrive.relaxed.aligned;\n"
      "barrier.cluster.wait.aligned;" ::
          : "memory");
}

// Loads four floats from the same address in the shared memory of the cluster's block `rank`.
__device__ __forceinline__ float4 load_of_rank(unsigned int address, int rank) {
  unsigned int there;
  asm("mapa.shared::cluster.u32 %0, %1, %2;" : "=r"(there) : "r"(address), "r"(rank));
  float4 v;
  asm volatile("ld.shared::cluster.v4.f32 {%0, %1, %2, %3}, [%4];"
               : "=f"(v.x), "=f"(v.y), "=f"(v.z), "=f"(v.w)
               : "r"(there));
  return v;
}

#endif

__device__ __forceinline__ float4 sum_of(float4 a, float4 b) {
  return make_float4(a.x + b.x, a.y + b.y, a.z + b.z, a.w + b.w);
}

// Adds the parts' sums as a tree: pairs, then pairs of pairs.
__device__ __forceinline__ float4 sum_of_parts(float4 (&sum)[kLinearParts]) {
#pragma unroll
  for (int apart = 1; apart < kLinearParts; apart *= 2) {
#pragma unroll
    for (int i = 0; i < kLinearParts; i += 2 * apart) {
      sum[i] = sum_of(sum[i], sum[i + apart]);
    }
  }
  return sum[0];
}

}  // namespace mlx_paged::cuda
