// Copyright © 2026 the mlx_paged authors. Apache-2.0.
//
// Words and halves of shared memory by the addresses that cp.async and ldmatrix take.

#pragma once

#include "../msl/metal_stdlib"

namespace paged {

__device__ __forceinline__ void read_shared(unsigned int (&to)[4], unsigned int at) {
  asm volatile("ld.shared.v4.u32 {%0, %1, %2, %3}, [%4];"
               : "=r"(to[0]), "=r"(to[1]), "=r"(to[2]), "=r"(to[3])
               : "r"(at));
}

__device__ __forceinline__ void read_shared(unsigned int (&to)[2], unsigned int at) {
  asm volatile("ld.shared.v2.u32 {%0, %1}, [%2];" : "=r"(to[0]), "=r"(to[1]) : "r"(at));
}

__device__ __forceinline__ unsigned int read_shared(unsigned int at) {
  unsigned int word;
  asm volatile("ld.shared.u32 %0, [%1];" : "=r"(word) : "r"(at));
  return word;
}

__device__ __forceinline__ float read_shared_half(unsigned int at) {
  unsigned short half;
  asm volatile("ld.shared.u16 %0, [%1];" : "=h"(half) : "r"(at));
  return __half2float(__ushort_as_half(half));
}

__device__ __forceinline__ void write_shared(unsigned int at, unsigned int word) {
  asm volatile("st.shared.u32 [%0], %1;" ::"r"(at), "r"(word) : "memory");
}

__device__ __forceinline__ void write_shared_half(unsigned int at, unsigned short half) {
  asm volatile("st.shared.u16 [%0], %1;" ::"r"(at), "h"(half) : "memory");
}

}  // namespace paged
