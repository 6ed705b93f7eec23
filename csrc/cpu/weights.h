// Copyright © 2026 the mlx_paged authors. Apache-2.0.
//
// Weights among a node's inputs, in the form that CPU kernels read. The arrays are dense.

#pragma once

#include "../primitives.h"
#include "experts.h"
#include "product.h"

namespace mlx_paged::cpu {

// `weight`: followed by its scales and biases if quantized. The matrices of several experts are
// stacked into one.
WeightView weights_of(const mx::array* weight, const WeightCodes& codes);

// in: the inputs of the node.
ExpertWeights weights_of(const ExpertLinear& node, const Arrays& in);

// Reads row `id` of an embedding, counted from the end if negative; NaN if there is no such row.
void read_row(const WeightView& weights, int64_t id, float* out);

}  // namespace mlx_paged::cpu
