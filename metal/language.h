// Copyright © 2026 the mlx_paged authors. Apache-2.0.
//
// What is spelled differently for the other compilers that read these kernels.

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

// One instantiation of a kernel template under its host name.
#define PAGED_INSTANTIATE(name, ...) \
  template [[host_name(name)]] [[kernel]] decltype(__VA_ARGS__) __VA_ARGS__;
