// Copyright © 2026 the mlx_paged authors. Apache-2.0.
//
// CUDA's grids are large along x only. The kernels of kernels/data.cu whose tokens, pairs or blocks
// lie along another dim turn theirs; this is the host's side of it.

#pragma once

#include <stdexcept>
#include <string>
#include <utility>

#include "../launch.h"

namespace mlx_paged::cuda {

inline Extent kernel_grid(const Launch& launch) {
  constexpr uint32_t kMost = 65535;  // along y and z
  Extent grid = launch.grid;
  const auto& file = launch.kernel.file;
  if (file == "write_kv" || file == "copy_blocks") {
    std::swap(grid[0], grid[1]);
  } else if (file == "copy_strided") {
    std::swap(grid[0], grid[2]);
  }
  if (grid[1] > kMost || grid[2] > kMost) {
    throw std::invalid_argument(
        "[cuda] a grid of " + launch.kernel.host_name + " must have at most 65535 groups along y " +
        "and z but has " + std::to_string(grid[1]) + " and " + std::to_string(grid[2]));
  }
  return grid;
}

}  // namespace mlx_paged::cuda
