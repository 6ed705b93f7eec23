// Copyright © 2026 the mlx_paged authors. Apache-2.0.
//
// Hands launches to MLX's CUDA encoder as they are. All decisions were made in launch.h.

#pragma once

#include <vector>

#include "../launch.h"
#include "mlx/array.h"
#include "mlx/stream.h"

namespace mlx_paged::cuda {

// Encodes the launches of one operation, whose outputs have their memory already. `pools` are the
// operands that are pools. MLX's encoder orders a kernel after earlier writers of its arrays only,
// so a kernel that reads a pool is registered as a writer of it: later writes then wait for it.
void encode(
    const LaunchList& list, const std::vector<mx::array>& in, std::vector<mx::array>& out,
    const std::vector<int>& pools, mx::Stream stream);

}  // namespace mlx_paged::cuda
