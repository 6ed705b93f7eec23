// Copyright © 2026 the mlx_paged authors. Apache-2.0.
//
// Metal's words for nvcc. A kernel becomes a device function, which a __global__ function of
// kernels/ calls with the buffers and constants. What Metal hands a kernel by attribute becomes a
// default argument: an attribute between [[ and ]] expands to `]] = Source()[First()[0`, and the
// closing brackets of the attribute close the two subscripts.
//
// Lanes are numbered in Metal's order. A lane of Apple's 8 x 8 matrices holds other elements than
// the same lane of NVIDIA's, and the difference is an order of the bits of its number: with that
// renumbering, here and in the shuffles, both layouts are one.

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

// Threadgroup memory, of the size that the launch asks for.
struct ThreadgroupMemory {
  template <typename T>
  __device__ __forceinline__ operator T*() const {
    extern __shared__ __align__(16) unsigned char paged_threadgroup_memory[];
    return reinterpret_cast<T*>(paged_threadgroup_memory);
  }
};

}  // namespace metal

// These words are macros from here on: C++ and CUDA headers must be included before.
#define METAL_FUNC __device__ __forceinline__
#define PAGED_UNROLL _Pragma("unroll")
#define PAGED_SCRATCH = ::metal::ThreadgroupMemory()
#define PAGED_KERNEL(THREADS) __device__ __forceinline__ void
#ifndef PAGED_QUANTISED  // a file of kernels of quantised pools says which
#define PAGED_QUANTISED(params) false
#define PAGED_INT4_KEYS(params) false
#define PAGED_INT4_VALUES(params) false
#define PAGED_FP8(params) false
#endif

// CUDA's own word uses `device`, which becomes a macro below.
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
