// Copyright © 2026 the mlx_paged authors. Apache-2.0.
//
// Weights among a node's inputs as CPU kernels read them. The arrays are dense and have data.

#pragma once

#include "../primitives.h"
#include "experts.h"
#include "product.h"

namespace mlx_paged::cpu {

// `weight`: followed by its scales and biases where it is quantized. The matrices of several
// experts become one.
WeightView weights_of(const mx::array* weight, const WeightCodes& codes);

// in: the inputs of the node.
ExpertWeights weights_of(const ExpertLinear& node, const Arrays& in);

// Row `id` of an embedding, counted from the end if negative; NaN where there is no such row.
void read_row(const WeightView& weights, int64_t id, float* out);

}  // namespace mlx_paged::cpu
