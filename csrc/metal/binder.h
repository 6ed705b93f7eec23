// Copyright © 2026 the mlx_paged authors. Apache-2.0.
//
// Hands launches to MLX's Metal encoder as they are. All decisions were made in launch.h.

#pragma once

#include <vector>

#include "../launch.h"
#include "mlx/array.h"
#include "mlx/stream.h"

namespace mlx_paged::metal {

// Encodes the launches of one operation, whose outputs have their memory already. Every array is
// registered with the encoder, what is written as input and output both, so that MLX orders
// launches that share a buffer.
void encode(
    const LaunchList& list, const std::vector<mx::array>& in, std::vector<mx::array>& out,
    mx::Stream stream);

}  // namespace mlx_paged::metal
