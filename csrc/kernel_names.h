// Copyright © 2026 the mlx_paged authors. Apache-2.0.
//
// The kernels of metal/ by host name, from the same table as the .metal files.

#pragma once

#include <string>
#include <vector>

#include "mlx/array.h"

namespace mlx_paged {

namespace mx = mlx::core;

// As host names have it: "float32", "float16" or "bfloat16".
std::string dtype_name(mx::Dtype dtype);

struct KernelName {
  std::string host_name;
  std::string file;           // of metal/, without a suffix
  std::string instantiation;  // template-id; empty: no template

  bool operator==(const KernelName&) const = default;
};

// Each names what metal/kernel_table.h has, or throws std::invalid_argument with what it does have.
KernelName decode_kernel(mx::Dtype dtype, int key_dim, int value_dim, int queries);
KernelName decode_matrix_kernel(mx::Dtype dtype, int key_dim, int value_dim, int rows);
KernelName prefill_kernel(mx::Dtype dtype, int key_dim, int value_dim, int rows);
KernelName merge_kernel(mx::Dtype dtype, int value_dim);
KernelName kernel_named(const std::string& name);

// The whole table.
const std::vector<KernelName>& kernel_names();

}  // namespace mlx_paged
