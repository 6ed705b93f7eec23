// Copyright © 2026 the mlx_paged authors. Apache-2.0.
//
// Waiting for an array without sleeping. A thread that sleeps until a GPU has finished runs slower
// for a while when it is woken: its core was switched off, and the caches of that are empty.

#pragma once

#include <chrono>

#include "mlx/array.h"

namespace mlx_paged {

namespace mx = mlx::core;

// Looks again and again until `a`, whose evaluation has begun, is available; at most for `limit`,
// and no longer than nothing else runs on this thread's core. Returns whether nothing else did: to
// that, a thread that does not sleep is a bad neighbour, and gets its own turn late.
bool wait_actively(const mx::array& a, std::chrono::nanoseconds limit);

}  // namespace mlx_paged
