// Copyright © 2026 the mlx_paged authors. Apache-2.0.
//
// Places a step's temporaries in one allocation. Temporaries with disjoint lifetimes share memory.

#pragma once

#include <cstdint>
#include <vector>

namespace mlx_paged {

// The first and last step or phase that uses a temporary.
struct Lifetime {
  int64_t bytes;
  int first_use;
  int last_use;  // before the first: never used
};

struct MemoryPlan {
  std::vector<int64_t> offsets;  // one per lifetime, in bytes; multiples of 256; 0 if never used
  int64_t bytes = 0;
};

MemoryPlan plan_memory(const std::vector<Lifetime>& lifetimes);

}  // namespace mlx_paged
