// Copyright © 2026 the mlx_paged authors. Apache-2.0.
//
// Writes and reads rows of x in the order of a weight's codes. Chunks are 16 bytes and any vector
// type works, because Metal's language reads this header too.

#pragma once

#include "../code_order.h"

namespace mlx_paged::cuda {

// Regroups eight adjacent 16-bit elements as pairs of elements `APART` apart.
template <int APART, typename Chunk>
__device__ __forceinline__ Chunk pairs_of(Chunk x) {
  static_assert(APART == 1 || APART == 2 || APART == 4);
  constexpr unsigned int kLow = 0x5410;
  constexpr unsigned int kHigh = 0x7632;
  Chunk pairs = x;
  if constexpr (APART == 4) {
    pairs.x = __byte_perm(x.x, x.z, kLow);
    pairs.y = __byte_perm(x.x, x.z, kHigh);
    pairs.z = __byte_perm(x.y, x.w, kLow);
    pairs.w = __byte_perm(x.y, x.w, kHigh);
  } else if constexpr (APART == 2) {
    pairs.x = __byte_perm(x.x, x.y, kLow);
    pairs.y = __byte_perm(x.x, x.y, kHigh);
    pairs.z = __byte_perm(x.z, x.w, kLow);
    pairs.w = __byte_perm(x.z, x.w, kHigh);
  }
  return pairs;
}

// The inverse of pairs_of, which is its own inverse for distances of 1 and 2.
template <int APART, typename Chunk>
__device__ __forceinline__ Chunk chunk_of_pairs(Chunk pairs) {
  if constexpr (APART == 4) {
    constexpr unsigned int kLow = 0x5410;
    constexpr unsigned int kHigh = 0x7632;
    Chunk x = pairs;
    x.x = __byte_perm(pairs.x, pairs.y, kLow);
    x.z = __byte_perm(pairs.x, pairs.y, kHigh);
    x.y = __byte_perm(pairs.z, pairs.w, kLow);
    x.w = __byte_perm(pairs.z, pairs.w, kHigh);
    return x;
  } else {
    return pairs_of<APART>(pairs);
  }
}

// The indices of a chunk's pairs in code order.
template <int RUN, int APART>
struct InOrder {
  template <typename Chunk>
  __device__ __forceinline__ static Chunk read(const Chunk* row, int chunk) {
    constexpr CodeOrder kOrder = {RUN, APART};
    const unsigned int* from = reinterpret_cast<const unsigned int*>(row);
    Chunk pairs;
    pairs.x = from[index_of_pair(kOrder, 8 * chunk, 0) / 2];
    pairs.y = from[index_of_pair(kOrder, 8 * chunk, 1) / 2];
    pairs.z = from[index_of_pair(kOrder, 8 * chunk, 2) / 2];
    pairs.w = from[index_of_pair(kOrder, 8 * chunk, 3) / 2];
    return chunk_of_pairs<APART>(pairs);
  }

  template <typename Chunk>
  __device__ __forceinline__ static void write(Chunk* row, int chunk, Chunk x) {
    constexpr CodeOrder kOrder = {RUN, APART};
    const Chunk pairs = pairs_of<APART>(x);
    unsigned int* to = reinterpret_cast<unsigned int*>(row);
    to[index_of_pair(kOrder, 8 * chunk, 0) / 2] = pairs.x;
    to[index_of_pair(kOrder, 8 * chunk, 1) / 2] = pairs.y;
    to[index_of_pair(kOrder, 8 * chunk, 2) / 2] = pairs.z;
    to[index_of_pair(kOrder, 8 * chunk, 3) / 2] = pairs.w;
  }
};

}  // namespace mlx_paged::cuda

// The orders of all weights (code_order in quantized_shape.h). X(..., run, distance of a pair).
#define PAGED_FOR_EACH_CODE_ORDER(X, ...) \
  X(__VA_ARGS__, 32, 1)                   \
  X(__VA_ARGS__, 32, 2)                   \
  X(__VA_ARGS__, 32, 4)                   \
  X(__VA_ARGS__, 64, 1)                   \
  X(__VA_ARGS__, 64, 2)                   \
  X(__VA_ARGS__, 64, 4)
