// Copyright © 2026 the mlx_paged authors. Apache-2.0.
//
// Keywords that differ for the other compilers that read these kernels.

#pragma once

// Placed before loops over arrays that must stay in registers, which requires compile-time indices.
#ifndef PAGED_UNROLL
#define PAGED_UNROLL _Pragma("clang loop unroll(full)")
#endif

// Marks the parameter that is the kernel's threadgroup memory, sized by the host.
#ifndef PAGED_SCRATCH
#define PAGED_SCRATCH [[threadgroup(0)]]
#endif

// Declares a kernel whose pipeline takes at most THREADS threads, so that the compiler can give
// each thread as many registers as that limit allows.
#ifndef PAGED_KERNEL
#define PAGED_KERNEL(THREADS) [[kernel, max_total_threads_per_threadgroup(THREADS)]] void
#endif

// Parameters of a kernel that locate a thread: its threadgroup, the threads of that, its index.
#define PAGED_THREAD_POSITION                                                                    \
  uint3 group_id [[threadgroup_position_in_grid]], uint3 group_size [[threads_per_threadgroup]], \
      uint thread_id [[thread_index_in_threadgroup]]

// ... and those that locate it by SIMD-group.
#define PAGED_SIMD_POSITION \
  uint simd_id [[simdgroup_index_in_threadgroup]], uint lane [[thread_index_in_simdgroup]]

// One instantiation of a kernel template under its host name.
#define PAGED_INSTANTIATE(name, ...) \
  template [[host_name(name)]] [[kernel]] decltype(__VA_ARGS__) __VA_ARGS__;
