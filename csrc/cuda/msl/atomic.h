// Copyright © 2026 the mlx_paged authors. Apache-2.0.
//
// Relaxed atomic operations.

#pragma once

#include "language.h"

namespace metal {

enum memory_order { memory_order_relaxed };

struct atomic_uint {
  uint value;
};

METAL_FUNC uint atomic_load_explicit(const volatile atomic_uint* at, memory_order) {
  return at->value;
}

METAL_FUNC void atomic_store_explicit(volatile atomic_uint* at, uint value, memory_order) {
  at->value = value;
}

METAL_FUNC uint atomic_fetch_add_explicit(atomic_uint* at, uint value, memory_order) {
  return atomicAdd(&at->value, value);
}

}  // namespace metal
