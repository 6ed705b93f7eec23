// Copyright © 2026 the mlx_paged authors. Apache-2.0.

#pragma once

#include <cstddef>

namespace mlx_paged::cpu {

// Memory of the calling thread, 64-byte aligned, until its next call. It grows to the largest task
// of the thread so far and stays: a step's layers need the same again. Throws OutOfMemory.
float* thread_scratch(size_t num_floats);

}  // namespace mlx_paged::cpu
