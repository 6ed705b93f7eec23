// Copyright © 2026 the mlx_paged authors. Apache-2.0.

#pragma once

#include <cstdint>

namespace mlx_paged::cuda {

// Params of rope_rows, which rotates dim i of each head with dim i + half_dims. Chunks have 16
// bytes.
struct RopeRowsParams {
  int64_t num_chunks;  // in the first halves of all heads
  int num_heads;
  int half_chunks;  // in half a head
};
static_assert(sizeof(RopeRowsParams) == 16, "the same for every compiler");

}  // namespace mlx_paged::cuda
