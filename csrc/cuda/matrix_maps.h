// Copyright © 2026 the mlx_paged authors. Apache-2.0.
//
// Encodes the matrices of a launch as tensor maps for the copy engine (sm_90 and later).

#pragma once

#include <cuda.h>

#include <array>
#include <vector>

#include "../launch.h"
#include "linear_shape.h"

namespace mlx_paged::cuda {

// x, then codes, scales and biases of each weight. A kernel reads as many as it needs.
using EncodedMaps = std::array<CUtensorMap, 1 + 3 * kLinearMaxWeights>;

// `addresses`: of the operands. Throws std::runtime_error, which describes the rejected matrix.
EncodedMaps encode_maps(const Launch& launch, const std::vector<char*>& addresses);

}  // namespace mlx_paged::cuda
