// Copyright © 2026 the mlx_paged authors. Apache-2.0.
//
// The kernels of metal/ by host name, from the same table as the .metal files.

#pragma once

#include <string>
#include <vector>

#include "dtype.h"

namespace mlx_paged {

struct KernelName {
  std::string host_name;
  std::string file;           // of metal/
  std::string instantiation;  // template-id; empty: no template

  bool operator==(const KernelName&) const = default;
};

// Whose GPU: tiles are as large as a thread's registers allow.
enum class Gpu { apple, nvidia };

// Each names a kernel of metal/kernel_table.h (with Gpu::nvidia of cuda/portable_shape.h), or
// throws std::invalid_argument with those it has. `size` is the last template argument and `unit`
// the letter before it in the host name.
KernelName attention_kernel(
    Gpu gpu, const char* function, DType dtype, int key_dim, int value_dim, const char* unit,
    int size);
// True if there are attention kernels for these head dims.
bool has_kernels(int key_dim, int value_dim);

// A kernel of quantised_pool.h with registers for heads of up to `most_dims`.
KernelName quantised_kernel(const std::string& function, DType dtype, int most_dims);

KernelName merge_kernel(DType dtype, int value_dim);
KernelName kernel_named(const std::string& name);

// The whole table.
const std::vector<KernelName>& kernel_names();

}  // namespace mlx_paged
