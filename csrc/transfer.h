// Copyright © 2026 the mlx_paged authors. Apache-2.0.
//
// A step's numbers to the GPU and back, for backends where MLX's own way is slow (CUDA).

#pragma once

#include <vector>

#include "launch.h"
#include "mlx/utils.h"

namespace mlx_paged {

// Numbers of the host: dense, 4 bytes each.
struct HostArray {
  const void* data;
  mx::Shape shape;
  mx::Dtype dtype;
};

// True if `upload` and `to_host` are there.
bool has_transfers();

// The arrays on the GPU, sent as one. The numbers are copied before this returns. With `stays` they
// lie in pinned memory, for a kernel that reads them once, and nothing has to be evaluated.
Arrays upload(const std::vector<HostArray>& arrays, mx::StreamOrDevice s = {}, bool stays = false);

// An int32 array where the host can read it without moving it.
mx::array to_host(const mx::array& a, mx::StreamOrDevice s = {});

}  // namespace mlx_paged
