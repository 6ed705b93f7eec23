// Copyright © 2026 the mlx_paged authors. Apache-2.0.
//
// Spellings that differ for the other compilers that read these kernels.

#pragma once

// Before loops over arrays that must stay in registers: an index known at compile time keeps them
// there.
#ifndef PAGED_UNROLL
#define PAGED_UNROLL _Pragma("clang loop unroll(full)")
#endif

// After a parameter that is the kernel's threadgroup memory, of the size that the host asks for.
#ifndef PAGED_SCRATCH
#define PAGED_SCRATCH [[threadgroup(0)]]
#endif

// Before a kernel's name. A pipeline of it takes at most THREADS threads, and the compiler gives
// each of them as many registers as so few can have.
#ifndef PAGED_KERNEL
#define PAGED_KERNEL(THREADS) [[kernel, max_total_threads_per_threadgroup(THREADS)]] void
#endif

// One instantiation of a kernel template under its host name.
#define PAGED_INSTANTIATE(name, ...) \
  template [[host_name(name)]] [[kernel]] decltype(__VA_ARGS__) __VA_ARGS__;
