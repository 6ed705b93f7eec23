// Copyright © 2026 the mlx_paged authors. Apache-2.0.
//
// What the host knows of arrays that it has sent to a GPU. Launches follow from the contents of a
// plan, and reading those back from the GPU would wait for it.

#pragma once

#include <cstdint>
#include <memory>

#include "mlx/array.h"

namespace mlx_paged {

namespace mx = mlx::core;

// Remembers that `copy` is what the buffer of `a` holds, from its first byte on. Forgotten when the
// buffer is freed, or when many others have been remembered since.
void remember_host_copy(const mx::array& a, std::shared_ptr<const std::byte> copy);

// The bytes of `a` from its offset on; nullptr where no copy is known.
std::shared_ptr<const std::byte> find_host_copy(const mx::array& a);

}  // namespace mlx_paged
