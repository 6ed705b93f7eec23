// Copyright © 2026 the mlx_paged authors. Apache-2.0.
//
// Destination of an item's results: the output, or fp32 partials that paged_merge reads.

#pragma once

#include <metal_stdlib>

#include "kernel_table.h"
#include "softmax_state.h"

using namespace metal;

namespace paged {

// Workspace of partials; see AttentionParams.
struct Partials {
  device float* values;
  device float* maxima;
  device float* sums;
};

METAL_FUNC Partials
partials_at(device float* workspace, int num_partials, int num_q_heads, int value_dim) {
  ulong rows = ulong(num_partials) * num_q_heads;
  Partials partials;
  partials.values = workspace;
  partials.maxima = workspace + rows * value_dim;
  partials.sums = partials.maxima + rows;
  return partials;
}

}  // namespace paged
