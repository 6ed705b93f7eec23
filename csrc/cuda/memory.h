// Copyright © 2026 the mlx_paged authors. Apache-2.0.

#pragma once

#include "mlx/array.h"
#include "mlx/stream.h"

namespace mlx_paged::cuda {

namespace mx = mlx::core;

// Gives `a` device memory, in the order of the stream. allocator::malloc would give it memory that
// the CPU shares, page by page. Only within eval_gpu, before arrays are registered with the
// encoder.
void allocate(mx::array& a, mx::Stream stream);

}  // namespace mlx_paged::cuda
