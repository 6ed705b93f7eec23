// Copyright © 2026 the mlx_paged authors. Apache-2.0.

#pragma once

#include <vector>

#include "mlx/array.h"
#include "mlx/backend/cpu/encoder.h"

namespace mlx_paged::cpu {

namespace mx = mlx::core;

// The array itself where its rows are dense, else a copy that lives as long as the queued work.
mx::array dense(const mx::array& in, mx::cpu::CommandEncoder& encoder);

// A primitive's inputs, those from `first` on dense.
std::vector<mx::array> dense_inputs(
    const std::vector<mx::array>& in, size_t first, mx::cpu::CommandEncoder& encoder);

}  // namespace mlx_paged::cpu
