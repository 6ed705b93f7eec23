// Copyright © 2026 the mlx_paged authors. Apache-2.0.
//
// Which kernel serves a linear layer, over which grid.

#pragma once

#include "../launch.h"
#include "linear_params.h"

namespace mlx_paged::cuda {

// Whether thread blocks can form clusters: sm_90 and later, if this build has code for it.
bool has_clusters();

// For operands x, weight and `bias` (any of them, if there is none) and the result `output`. (Their
// sizes, of which CUDA's encoder takes no notice, are left out.)
Launch linear_launch(const LinearParams& params, mx::Dtype dtype, int bias, int output);

}  // namespace mlx_paged::cuda
