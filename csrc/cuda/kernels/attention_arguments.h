// Copyright © 2026 the mlx_paged authors. Apache-2.0.
//
// The buffers and constants that all attention kernels share, and the dtype of a file.

#pragma once

// The dtype of metal/kernel_table.h that a file is compiled for: name and type.
#if defined(PAGED_DTYPE_float32)
#define PAGED_DTYPE float32, float
#elif defined(PAGED_DTYPE_float16)
#define PAGED_DTYPE float16, half
#elif defined(PAGED_DTYPE_bfloat16)
#define PAGED_DTYPE bfloat16, bfloat
#else
#error "define PAGED_DTYPE_<name> for one of the dtypes of metal/kernel_table.h"
#endif

// Pointers that the previous kernel may still write (dependent_launch.h) are not __restrict__: the
// compiler may move loads of constant data before the wait.
#define ATTENTION_PARAMETERS                                                                   \
  const T *queries, const T *key_pool, const T *value_pool, const int *__restrict__ positions, \
      const int *__restrict__ block_tables, const paged::WorkItem *__restrict__ work_items,    \
      const float *__restrict__ per_head, T *out, float *workspace,                               \
      const __grid_constant__ paged::AttentionParams params

#define ATTENTION_ARGUMENTS \
  queries, key_pool, value_pool, positions, block_tables, work_items, per_head, out, workspace, params

// The compiled kernel of an entry of metal/kernel_table.h.
#define ATTENTION_ENTRY(host_name, function, ...) \
  {host_name, function##_entry<__VA_ARGS__>},
