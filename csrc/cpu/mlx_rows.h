// Copyright © 2026 the mlx_paged authors. Apache-2.0.
//
// Reimplements some of MLX's CPU operations on float32 rows, with the same bits: MLX's loops, order
// and functions.

#pragma once

#include <cstdint>
#include <optional>

#include "../graph/op.h"

namespace mlx_paged::cpu {

// Softmax of `size` numbers; out may be x.
void mlx_softmax(const float* x, float* out, int64_t size);

// Writes indices of x partitioned around the kth number: smaller numbers before it, larger ones and
// NaNs after it. A negative kth counts from the end.
void mlx_argpartition(const float* x, uint32_t* out, int64_t size, int kth);

// Sums `count` rows of `inner` numbers.
void mlx_sum(const float* x, float* out, int64_t count, int64_t inner);

float mlx_maximum(float a, float b);  // NaN if either is

// Element-wise function of an operation; nothing for other operations. out may be x.
using ElementFunction = void (*)(const float* x, float* out, int64_t size);
std::optional<ElementFunction> mlx_function(Op op);

}  // namespace mlx_paged::cpu
