// Copyright © 2026 the mlx_paged authors. Apache-2.0.
//
// Buffers and constants shared by all attention kernels, and the dtype that a file is compiled for.

#pragma once

// The dtype from metal/kernel_table.h that a file is compiled for: name and type.
#if defined(PAGED_DTYPE_float32)
#define PAGED_DTYPE float32, float
#elif defined(PAGED_DTYPE_float16)
#define PAGED_DTYPE float16, half
#elif defined(PAGED_DTYPE_bfloat16)
#define PAGED_DTYPE bfloat16, bfloat
#else
#error "define PAGED_DTYPE_<name> for one of the dtypes of metal/kernel_table.h"
#endif

// Pointers to data that the previous kernel may still write (dependent_launch.h) are not
// __restrict__, because the compiler may hoist loads of constant data above the wait.
#define ATTENTION_PARAMETERS                                                                   \
  const T *queries, const T *key_pool, const T *value_pool, const int *__restrict__ positions, \
      const int *__restrict__ block_tables, const paged::WorkItem *__restrict__ work_items,    \
      const float *__restrict__ per_head, T *out, float *workspace,                            \
      const __grid_constant__ paged::AttentionParams params

#define ATTENTION_ARGUMENTS                                                                     \
  queries, key_pool, value_pool, positions, block_tables, work_items, per_head, out, workspace, \
      params

// Table entry for a kernel listed in metal/kernel_table.h.
#define ATTENTION_ENTRY(host_name, function, ...) {host_name, function##_entry<__VA_ARGS__>},
