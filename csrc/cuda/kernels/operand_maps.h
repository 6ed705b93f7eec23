// Copyright © 2026 the mlx_paged authors. Apache-2.0.
//
// The last argument of kernels whose operands the copy engine reads. CUtensorMap is CUDA's type, or
// a stand-in from a test that runs kernels without CUDA.

#pragma once

#include "linear_math.h"

namespace mlx_paged::cuda {

// Operands of a product as the copy engine sees them (matrix_maps.h).
struct StreamMaps {
  CUtensorMap x;
  CUtensorMap weights[kLinearMaxWeights];
};

struct QuantizedMaps {
  struct Weight {
    CUtensorMap codes;
    CUtensorMap scales;
    CUtensorMap biases;  // equal to scales if the format has no biases
  };
  CUtensorMap x;
  Weight weights[kLinearMaxWeights];
};

// KV pools for attention: [slots][KV heads x dims], in boxes of 16 tokens x 64 dims of a head.
struct PoolMaps {
  CUtensorMap keys;
  CUtensorMap values;
};

}  // namespace mlx_paged::cuda
