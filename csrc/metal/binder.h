// Copyright © 2026 the mlx_paged authors. Apache-2.0.

#pragma once

#include <cstddef>
#include <cstdint>
#include <vector>

#include "../launch.h"
#include "mlx/stream.h"

namespace mlx_paged::gpu {

// Where an operand lies.
struct Place {
  mx::array array;
  int64_t offset;  // bytes from where the array begins
};

// Hands launches [begin, end) to the encoder of a stream; `places` by operand.
void encode_launches(
    const std::vector<Launch>& launches, size_t begin, size_t end, std::vector<Place>& places,
    mx::Stream stream);

}  // namespace mlx_paged::gpu
