// Copyright © 2026 the mlx_paged authors. Apache-2.0.
//
// The matrices of a launch as the copy engine is told of them (sm_90 and later).

#pragma once

#include <cuda.h>

#include <array>
#include <vector>

#include "../launch.h"
#include "linear_shape.h"

namespace mlx_paged::cuda {

// x, and of each weight its codes, scales and biases. A kernel takes what it needs of the
// beginning.
using EncodedMaps = std::array<CUtensorMap, 1 + 3 * kLinearMostWeights>;

// `addresses`: of operands. Throws std::runtime_error with what is wrong with a matrix.
EncodedMaps encode_maps(const Launch& launch, const std::vector<char*>& addresses);

}  // namespace mlx_paged::cuda
