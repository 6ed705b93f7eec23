// Copyright © 2026 the mlx_paged authors. Apache-2.0.
//
// Places in one memory for values that are needed for a while each.

#pragma once

#include <cstdint>
#include <vector>

namespace mlx_paged {

struct Lifetime {
  uint64_t bytes;
  int first_use;  // both count steps
  int last_use;   // before the first: never used
};

struct Places {
  std::vector<int64_t> offsets;  // of each, in bytes, a multiple of 256; 0 for what is never used
  uint64_t bytes = 0;            // of all
};

// Those that are not needed at the same time share memory.
Places place(const std::vector<Lifetime>& lifetimes);

}  // namespace mlx_paged
