// Copyright © 2026 the mlx_paged authors. Apache-2.0.
//
// Products of few rows and lookups by the kernels of metal/. Those for NVIDIA are in
// cuda/products.h.

#pragma once

#include <optional>
#include <string>
#include <vector>

#include "../launch.h"
#include "../weight_format.h"
#include "executable.h"

namespace mlx_paged {

// Why products.h has no kernel for rows of k elements in this format; nothing if it has one.
std::optional<std::string> unsupported_weight(const std::optional<WeightCodes>& codes, int64_t k);

// log2 of the units (metal/quantized_weights.h) per group of a scale.
int group_shift_of(const std::optional<WeightCodes>& codes);

// Rows of x per threadgroup, for a step of `num_rows` rows.
int product_rows_of(int num_rows);

// Rows of the weight per threadgroup.
int product_columns_of(int rows);

// The kernel for `rows` rows per threadgroup; function: "product_rows" or "expert_rows".
KernelName product_kernel(
    const char* function, DType dtype, const std::optional<WeightCodes>& codes, int rows);

KernelName lookup_kernel(DType dtype, const WeightCodes& codes);

// Units of a row of k elements.
int lookup_units(int64_t k);

// Binds a weight with its scales and biases. A format without them gets the weight again, because
// arguments must be buffers.
void bind_weight(
    Launch& launch, const ProductStep::Part& part, const std::vector<StepOperand>& operands);

// Launches of one product. Throws UnsupportedGraph if no kernel serves it.
std::vector<Launch> portable_product_launches(
    const ProductStep& step, const std::vector<StepOperand>& operands);

// True if the kernels can multiply with these inputs of a QuantizedLinear (primitives.h).
bool serves_quantized_linear(const Arrays& in, const WeightCodes& codes);

}  // namespace mlx_paged
