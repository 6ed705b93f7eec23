// Copyright © 2026 the mlx_paged authors. Apache-2.0.
//
// How paged_prefill_tensor divides its work, and every instantiation of it, once. The host includes
// this file too. X(...) receives the arguments given after it, a head dim and warps.

#pragma once

namespace paged {

enum {
  PREFILL_TENSOR_TOKENS = 64,   // of a tile of keys
  PREFILL_TENSOR_QUERIES = 16,  // of a warp: the rows of an mma
  PREFILL_TENSOR_WARPS = 8,     // of a thread block, at most
};

// Bytes: two tiles of keys and of values, one pair being read while the other is on its way.
constexpr int prefill_tensor_scratch(int dim) {
  return 2 * 2 * PREFILL_TENSOR_TOKENS * dim * 2;
}

}  // namespace paged

#define PAGED_FOR_EACH_PREFILL_TENSOR(X, ...) \
  X(__VA_ARGS__, 64, 2)                       \
  X(__VA_ARGS__, 64, 4)                       \
  X(__VA_ARGS__, 64, 6)                       \
  X(__VA_ARGS__, 64, 8)                       \
  X(__VA_ARGS__, 128, 2)                      \
  X(__VA_ARGS__, 128, 4)                      \
  X(__VA_ARGS__, 128, 6)                      \
  X(__VA_ARGS__, 128, 8)
