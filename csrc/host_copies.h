// Copyright © 2026 the mlx_paged authors. Apache-2.0.
//
// Host copies of arrays that were sent to a GPU. Launches depend on the contents of a
// plan, and reading those back from the GPU would wait for it.

#pragma once

#include <cstdint>
#include <memory>

#include "mlx/array.h"

namespace mlx_paged {

namespace mx = mlx::core;

// Records `copy` as the contents of the buffer of `a`, from its first byte on. The buffer is kept
// as well: MLX lets an operation write to one that has no other owner (donation), and the copy
// would be wrong. Both are dropped in a later call, when nothing else has the buffer or when many
// others have been recorded since.
void remember_host_copy(const mx::array& a, std::shared_ptr<const std::byte> copy);

// The bytes of `a` from its offset on; nullptr where no copy is known.
std::shared_ptr<const std::byte> find_host_copy(const mx::array& a);

}  // namespace mlx_paged
