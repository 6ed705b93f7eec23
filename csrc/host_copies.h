// Copyright © 2026 the mlx_paged authors. Apache-2.0.
//
// Host copies of arrays that were sent to a GPU. Launches depend on a plan's contents, and reading
// those back would wait for the GPU.

#pragma once

#include <cstdint>
#include <memory>

#include "mlx/array.h"

namespace mlx_paged {

namespace mx = mlx::core;

// Records `copy` as the contents of the buffer of `a`, from its first byte on. Keeps the buffer as
// well: without another owner MLX could donate it to an operation, and the copy would be stale. A
// later call drops both when nothing else has the buffer or many others have been recorded since.
void remember_host_copy(const mx::array& a, std::shared_ptr<const std::byte> copy);

// Returns the bytes of `a` from its offset on; nullptr if no copy is known.
std::shared_ptr<const std::byte> find_host_copy(const mx::array& a);

}  // namespace mlx_paged
