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
  std::string file;           // in metal/
  std::string instantiation;  // template-id; empty if not a template

  bool operator==(const KernelName&) const = default;
};

// GPU vendor. Tiles are as large as a thread's registers allow.
enum class Gpu { apple, nvidia };

// Looks up a kernel in metal/kernel_table.h (Gpu::nvidia: cuda/portable_shape.h). Throws
// std::invalid_argument, which lists the supported head dims. `size` is the last template argument,
// and `unit` the letter before it in the host name.
KernelName attention_kernel(
    Gpu gpu, const char* function, DType dtype, int key_dim, int value_dim, const char* unit,
    int size);
// True if there are attention kernels for these head dims.
bool has_kernels(int key_dim, int value_dim);

// Returns a kernel of quantized_pool.h with registers for heads of up to `max_dims` dims.
KernelName quantized_kernel(const std::string& function, DType dtype, int max_dims);

KernelName merge_kernel(DType dtype, int value_dim);
KernelName kernel_named(const std::string& name);

// The complete table.
const std::vector<KernelName>& kernel_names();

}  // namespace mlx_paged
