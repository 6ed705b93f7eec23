// Copyright © 2026 the mlx_paged authors. Apache-2.0.
//
// Metal's keywords for nvcc. A kernel becomes a device function, called by a __global__ function in
// kernels/ with the buffers and constants. Arguments that Metal passes by attribute become default
// arguments: an attribute between [[ and ]] expands to `]] = Source()[First()[0`, and its closing
// brackets close the two subscripts.
//
// Lanes are numbered in Metal's order. Apple's and NVIDIA's layouts of 8 x 8 matrices differ only
// by a permutation of the bits of the lane number; with this renumbering, here and in the shuffles,
// they are the same.

#pragma once

#include <cuda_bf16.h>
#include <cuda_fp16.h>

#include <cmath>
#include <cstdint>

namespace metal {

typedef unsigned char uchar;
typedef unsigned short ushort;
typedef unsigned int uint;
typedef unsigned long ulong;
typedef __nv_bfloat16 bfloat;

// Bits 0 to 4 of Metal's number are bits 0, 2, 3, 1, 4 of the hardware's.
__device__ __forceinline__ uint metal_lane(uint lane) {
  return (lane & 0x11) | ((lane >> 1) & 6) | ((lane & 2) << 2);
}

__device__ __forceinline__ uint hardware_lane(uint lane) {
  return (lane & 0x11) | ((lane & 6) << 1) | ((lane & 8) >> 2);
}

struct First {
  __device__ __forceinline__ constexpr int operator[](int index) const { return index; }
};

#define PAGED_BUILT_IN(Name, Type, value)                                   \
  struct Name {                                                             \
    __device__ __forceinline__ Type operator[](int) const { return value; } \
  };
PAGED_BUILT_IN(GroupPosition, uint3, blockIdx)
PAGED_BUILT_IN(GroupSize, uint3, blockDim)
PAGED_BUILT_IN(GridSize, uint3, gridDim)
PAGED_BUILT_IN(ThreadIndex, uint, (threadIdx.x & ~31u) | metal_lane(threadIdx.x & 31))
PAGED_BUILT_IN(SimdIndex, uint, threadIdx.x / 32)
PAGED_BUILT_IN(LaneIndex, uint, metal_lane(threadIdx.x & 31))
#undef PAGED_BUILT_IN

// Threadgroup memory, sized by the launch.
struct ThreadgroupMemory {
  template <typename T>
  __device__ __forceinline__ operator T*() const {
    extern __shared__ __align__(16) unsigned char paged_threadgroup_memory[];
    return reinterpret_cast<T*>(paged_threadgroup_memory);
  }
};

}  // namespace metal

// These keywords are macros from here on; include C++ and CUDA headers first.
#define METAL_FUNC __device__ __forceinline__
#define PAGED_UNROLL _Pragma("unroll")
#define PAGED_SCRATCH = ::metal::ThreadgroupMemory()
#define PAGED_KERNEL(THREADS) __device__ __forceinline__ void
#ifndef PAGED_QUANTIZED  // files for quantized pools define their own
#define PAGED_QUANTIZED(params) false
#define PAGED_INT4_KEYS(params) false
#define PAGED_INT4_VALUES(params) false
#define PAGED_FP8(params) false
#endif

// CUDA's definition uses `device`, which becomes a macro below.
#undef __device__
#define __device__ __attribute__((__device__))

#define device
#define thread
#define threadgroup
#define constant const

#define buffer(index)
#define threadgroup_position_in_grid ]] = ::metal::GroupPosition()[::metal::First()[0
#define threads_per_threadgroup ]] = ::metal::GroupSize()[::metal::First()[0
#define threadgroups_per_grid ]] = ::metal::GridSize()[::metal::First()[0
#define thread_index_in_threadgroup ]] = ::metal::ThreadIndex()[::metal::First()[0
#define simdgroup_index_in_threadgroup ]] = ::metal::SimdIndex()[::metal::First()[0
#define thread_index_in_simdgroup ]] = ::metal::LaneIndex()[::metal::First()[0
