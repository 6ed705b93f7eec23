// Copyright © 2026 the mlx_paged authors. Apache-2.0.

#pragma once

#include <cstddef>

namespace mlx_paged::cpu {

// Returns the calling thread's scratch memory, 64-byte aligned, valid until the thread's next call.
// It grows to the largest request and stays allocated, because every layer needs it again. Throws
// OutOfMemory.
float* thread_scratch(size_t num_floats);

}  // namespace mlx_paged::cpu
