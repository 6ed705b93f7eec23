// Copyright © 2026 the mlx_paged authors. Apache-2.0.

#pragma once

#include <cstddef>
#include <cstdint>
#include <vector>

#include "../launch.h"
#include "mlx/stream.h"

namespace mlx_paged::gpu {

// Location of an operand.
struct Location {
  mx::array array;
  int64_t offset;  // bytes into the array
};

// Passes launches [begin, end) to a stream's encoder; `locations` is indexed by operand.
void encode_launches(
    const std::vector<Launch>& launches, size_t begin, size_t end, std::vector<Location>& locations,
    mx::Stream stream);

}  // namespace mlx_paged::gpu
