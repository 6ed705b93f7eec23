// Copyright © 2026 the mlx_paged authors. Apache-2.0.
//
// The operations of a step's graph. op.cpp has the only table of MLX primitive names; everything
// above the kernels reads a graph through it.

#pragma once

#include <cstdint>

#include "mlx/array.h"

namespace mlx_paged {

namespace mx = mlx::core;

enum class Op : uint8_t {
  // Elementwise
  abs,
  add,
  as_type,
  copy,
  divide,
  erf,
  exp,
  maximum,
  minimum,
  multiply,
  negative,
  power,
  rsqrt,
  sigmoid,
  sqrt,
  square,
  stop_gradient,
  subtract,
  tanh,
  compiled,  // several of these that MLX fused into one kernel
  // Views
  broadcast,
  expand_dims,
  flatten,
  reshape,
  slice,
  split,
  squeeze,
  transpose,
  unflatten,
  // Other operations of MLX
  add_mm,
  arg_partition,
  concatenate,
  depends,
  dequantize,
  gather,
  gather_axis,
  masked_scatter,
  matmul,
  mlx_layer_norm,
  mlx_rms_norm,
  mlx_rope,
  quantized_matmul,
  softmax,
  sum,
  // Between devices
  all_gather,
  all_reduce,
  // Ours (primitives.h)
  clipped_swiglu,
  expert_linear,
  expert_lora,
  gelu,
  greedy_tokens,
  layer_norm,
  linear,
  lookup,
  lora,
  paged_attention,
  peer_sum,
  quantized_linear,
  rms_norm,
  rope,
  rope_rotations,
  silu_mul,
  write_kv,
  foreign,  // any other
};

// Dependence of row i of a result, along the first axis, on its inputs.
enum class RowRule : uint8_t {
  elementwise,  // row i of every input; inputs without rows are broadcast
  first,        // row i of the first input
  first_two,    // row i of the first two inputs; the second may be one for all rows
  first_three,  // row i of the first three inputs
  product,      // row i of the first input; the second is a matrix
  product_sum,  // such a product, added to row i of the last input
  reshape,      // the same elements in the same order
  broadcast,
  transpose,
  slice,
  split,
  concatenate,
  dependent,  // possibly other rows
};

// Returns the operation that makes `a`, which must have a primitive. A compiled function that only
// adds two arrays is an `add`.
Op op_of(const mx::array& a);
RowRule row_rule(Op op);

// True if the operation only changes the shape of its input, not the order of elements.
bool is_reshape(Op op);
// True if the operation selects or reorders elements without moving any.
bool is_view(Op op);
// True for operations that all ranks of a group run together.
bool is_collective(Op op);

}  // namespace mlx_paged
