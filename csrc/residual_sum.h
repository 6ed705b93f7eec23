// Copyright © 2026 the mlx_paged authors. Apache-2.0.
//
// Residuals of steps that are graphs of MLX's: model code adds a layer's product to what came into
// the layer, and a library's product can begin with that instead of zeros.

#pragma once

#include "mlx/array.h"

namespace mlx_paged {

namespace mx = mlx::core;

// If `sum` is x plus a product of as many rows, of which nothing has been evaluated: makes it the
// result of one product that adds x before it rounds. Arrays that share its descriptor, not its
// memory, stay what they were. Returns whether it did.
bool add_in_product(mx::array& sum);

}  // namespace mlx_paged
