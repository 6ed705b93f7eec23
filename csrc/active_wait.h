// Copyright © 2026 the mlx_paged authors. Apache-2.0.
//
// Waits for an array without sleeping. A thread that sleeps until a GPU has finished runs slower
// for a while after it wakes up, because its core was powered down and its caches are cold.

#pragma once

#include <chrono>

#include "mlx/array.h"

namespace mlx_paged {

namespace mx = mlx::core;

// Polls until `a`, whose evaluation has started, is available, for at most `limit`. Returns false
// as soon as another thread runs on this core: polling would delay that thread, and the scheduler
// would make this one wait in turn.
bool wait_actively(const mx::array& a, std::chrono::nanoseconds limit);

}  // namespace mlx_paged
