// Copyright © 2026 the mlx_paged authors. Apache-2.0.
//
// Transfers of a step's data to the GPU and back, for backends where MLX's own transfers are slow
// (CUDA).

#pragma once

#include <vector>

#include "launch.h"
#include "mlx/utils.h"

namespace mlx_paged {

// Dense host data with 4-byte elements.
struct HostArray {
  const void* data;
  mx::Shape shape;
  mx::Dtype dtype;
};

// True if `upload` and `to_host` are available.
bool has_transfers();

// Sends the arrays to the GPU in one transfer. Copies the data before it returns. With `stays` the
// arrays are in pinned memory, for a kernel that reads them once, and need no evaluation.
Arrays upload(const std::vector<HostArray>& arrays, mx::StreamOrDevice s = {}, bool stays = false);

// Returns an int32 array that the host can read without migrating it.
mx::array to_host(const mx::array& a, mx::StreamOrDevice s = {});

}  // namespace mlx_paged
