// Copyright © 2026 the mlx_paged authors. Apache-2.0.
//
// How paged_decode_tensor divides its work. The host includes this file too.

#pragma once

namespace paged {

enum {
  TENSOR_TOKENS = 16,  // of a tile: the rows of an mma
  TENSOR_QUERIES = 8,  // its columns
};

// Warps of a thread block. Several blocks fit a multiprocessor and start and end at different
// times, so that the memory always has something to do; head dim 256 leaves room for half as many
// warps.
constexpr int tensor_warps(int dim) {
  return dim <= 128 ? 4 : 2;
}

// Tiles that a warp has room for: one to work on, the other under way. More of them cost more in
// blocks that no longer fit than they gain.
constexpr int tensor_stages(int) {
  return 2;
}

constexpr int tensor_tile_bytes(int dim) {
  return 2 * TENSOR_TOKENS * dim * 2;  // keys and values, 16 bits each
}

// Elements from one query's results to the next, where the warps join them: no two lanes of a
// fragment meet in a bank.
constexpr int tensor_result_pitch(int dim) {
  return dim + 4;
}

// A warp's ring of tiles, which at the end holds its results instead.
constexpr int tensor_ring_bytes(int dim, int queries) {
  int ring = tensor_stages(dim) * tensor_tile_bytes(dim);
  int results = queries * tensor_result_pitch(dim) * 4;
  return ring > results ? ring : results;
}

// The rings, then the maxima and sums of every warp.
constexpr int tensor_scratch(int dim, int queries) {
  return tensor_warps(dim) * (tensor_ring_bytes(dim, queries) + queries * 2 * 4);
}

}  // namespace paged
