// Copyright © 2026 the mlx_paged authors. Apache-2.0.
//
// Some of MLX's own CPU operations on rows of float32, to the same bits: its loops in its order, on
// its functions.

#pragma once

#include <cstdint>
#include <optional>

#include "../graph/op.h"

namespace mlx_paged::cpu {

// All of `size` numbers; out may be x.
void mlx_softmax(const float* x, float* out, int64_t size);

// out: the numbers' places, with that of the one that is kth in order at kth, those of smaller ones
// before it, and those of larger ones and NaNs after it. A negative kth counts from the end.
void mlx_argpartition(const float* x, uint32_t* out, int64_t size, int kth);

// Sums of `count` rows of `inner` numbers.
void mlx_sum(const float* x, float* out, int64_t count, int64_t inner);

float mlx_maximum(float a, float b);  // NaN where one is

// The function of each element that an operation computes; none for other operations. out may be x.
using ElementFunction = void (*)(const float* x, float* out, int64_t size);
std::optional<ElementFunction> mlx_function(Op op);

}  // namespace mlx_paged::cpu
