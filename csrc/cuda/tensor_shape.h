// Copyright © 2026 the mlx_paged authors. Apache-2.0.
//
// Work division and every instantiation of the NVIDIA-only attention kernels. The host includes
// this file too. X(...) receives the arguments after it and then an entry.

#pragma once

#include "../../metal/kernel_table.h"

namespace paged {

// --- paged_decode_tensor ---

enum {
  TENSOR_TOKENS = 16,  // tile size: the rows of an mma
  TENSOR_QUERIES = 8,  // its columns
};

// Warps per thread block. Several blocks fit a multiprocessor and start and end at different times,
// which keeps memory busy; head dim 256 leaves room for half as many warps.
constexpr int tensor_warps(int dim) {
  return dim <= 128 ? 4 : 2;
}

// Tiles per warp: one in use, one being copied. More would cost more in lost blocks than they gain.
constexpr int tensor_stages(int) {
  return 2;
}

constexpr int tensor_tile_bytes(int dim) {
  return 2 * TENSOR_TOKENS * dim * 2;  // keys and values, 16 bits each
}

// Elements between the queries' results where warps merge them; avoids bank conflicts within a
// fragment.
constexpr int tensor_result_pitch(int dim) {
  return dim + 4;
}

// A warp's ring of tiles. Its results reuse the memory at the end.
constexpr int tensor_ring_bytes(int dim, int queries) {
  int ring = tensor_stages(dim) * tensor_tile_bytes(dim);
  int results = queries * tensor_result_pitch(dim) * 4;
  return ring > results ? ring : results;
}

// The rings, then the maxima and sums of every warp.
constexpr int tensor_scratch(int dim, int queries) {
  return tensor_warps(dim) * (tensor_ring_bytes(dim, queries) + queries * 2 * 4);
}

// --- paged_decode_quantized ---

enum { QUANTIZED_TOKENS = 32 };  // per tile: about as many bytes as a 16-bit tile

// Codes and scales in a tile of keys or of values.
constexpr int quantized_rows_bytes(int format, int dim) {
  return QUANTIZED_TOKENS * (code_bytes(format, dim) + tail_bytes(format, dim));
}

constexpr int quantized_tile_bytes(int key_format, int value_format, int dim) {
  return quantized_rows_bytes(key_format, dim) + quantized_rows_bytes(value_format, dim);
}

constexpr int quantized_warps(int dim) {
  return tensor_warps(dim);
}

// Tiles per warp: one in use, one being copied.
constexpr int quantized_stages(int) {
  return 2;
}

// A warp's ring of tiles. Its results reuse the memory at the end.
constexpr int quantized_ring_bytes(int key_format, int value_format, int dim, int queries) {
  int tile = quantized_tile_bytes(key_format, value_format, dim);
  int ring = quantized_stages(tile) * tile;
  int results = queries * tensor_result_pitch(dim) * 4;
  return ring > results ? ring : results;
}

constexpr int quantized_scratch(int key_format, int value_format, int dim, int queries) {
  int ring = quantized_ring_bytes(key_format, value_format, dim, queries);
  return quantized_warps(dim) * (ring + queries * 2 * 4);
}

// Thread blocks per multiprocessor that the registers must allow.
constexpr int quantized_blocks(int key_format, int dim, int columns) {
  return columns > 1 ? 2 : dim > 64 && key_format != FORMAT_INT4 ? 3 : 4;
}

// --- quantize_rows, rotate_rows ---

enum {
  ROW_THREADS = 128,  // per thread block
  ROW_PART = 8,       // dims per lane
};

// --- paged_prefill_tensor ---

enum {
  PREFILL_TENSOR_TOKENS = 64,   // keys per tile
  PREFILL_TENSOR_QUERIES = 16,  // per warp: the rows of an mma
  PREFILL_TENSOR_WARPS = 8,     // maximum per thread block
};

// Bytes: two tiles of keys and of values; one pair is read while the other is copied.
constexpr int prefill_tensor_scratch(int dim) {
  return 2 * 2 * PREFILL_TENSOR_TOKENS * dim * 2;
}

// --- paged_prefill_wgmma ---

enum {
  WGMMA_WARPS = 4,          // consumer warps per group, and producer warps
  PREFILL_BOX_TOKENS = 16,  // tokens per copy; blocks have at least as many
};

// Bytes of 64 dims of a tile of keys or of values.
constexpr int prefill_wgmma_part() {
  return PREFILL_TENSOR_TOKENS * 64 * 2;
}

// Tiles of keys and values in flight: two in use, the others being copied.
constexpr int prefill_wgmma_stages(int dim) {
  return dim == 64 ? 6 : 4;
}

// Offset of the barriers, after the tiles (kernels/copy_ring.h).
constexpr int prefill_wgmma_barriers(int dim) {
  return prefill_wgmma_stages(dim) * 2 * (dim / 64) * prefill_wgmma_part();
}

constexpr int prefill_wgmma_scratch(int dim) {
  return prefill_wgmma_barriers(dim) + 16 * prefill_wgmma_stages(dim);
}

// --- merge_splits ---

enum {
  MERGE_HEADS = 4,     // query heads per thread block, one warp each
  MERGE_VECTORS = 12,  // vectors of four values of splits that a lane keeps in flight
};

}  // namespace paged

// Head dim and tiles of 8 queries. One more tile of each would not fit the registers.
#define PAGED_FOR_EACH_TENSOR(X, ...) \
  X(__VA_ARGS__, 64, 1)               \
  X(__VA_ARGS__, 64, 2)               \
  X(__VA_ARGS__, 64, 3)               \
  X(__VA_ARGS__, 64, 4)               \
  X(__VA_ARGS__, 128, 1)              \
  X(__VA_ARGS__, 128, 2)              \
  X(__VA_ARGS__, 128, 3)              \
  X(__VA_ARGS__, 256, 1)

// Pairs of key and value formats with kernels: name suffix, key format, value format.
#define PAGED_QUANTIZED_FORMATS(X, ...)               \
  X(__VA_ARGS__, int8, FORMAT_INT8, FORMAT_INT8)      \
  X(__VA_ARGS__, int8_int4, FORMAT_INT8, FORMAT_INT4) \
  X(__VA_ARGS__, int4, FORMAT_INT4, FORMAT_INT4)      \
  X(__VA_ARGS__, fp8, FORMAT_FP8, FORMAT_FP8)

// Head dim, tiles of 8 queries, and a line of PAGED_QUANTIZED_FORMATS.
#define PAGED_FOR_EACH_QUANTIZED_TENSOR(X, ...)   \
  PAGED_QUANTIZED_FORMATS(X, __VA_ARGS__, 64, 1)  \
  PAGED_QUANTIZED_FORMATS(X, __VA_ARGS__, 64, 2)  \
  PAGED_QUANTIZED_FORMATS(X, __VA_ARGS__, 128, 1) \
  PAGED_QUANTIZED_FORMATS(X, __VA_ARGS__, 128, 2)

// Head dim.
#define PAGED_FOR_EACH_ROTATED_ROWS(X, ...) \
  X(__VA_ARGS__, 64)                        \
  X(__VA_ARGS__, 128)                       \
  X(__VA_ARGS__, 256)

// Head dim and a line of PAGED_QUANTIZED_FORMATS.
#define PAGED_FOR_EACH_QUANTIZED_ROWS(X, ...)  \
  PAGED_QUANTIZED_FORMATS(X, __VA_ARGS__, 64)  \
  PAGED_QUANTIZED_FORMATS(X, __VA_ARGS__, 128) \
  PAGED_QUANTIZED_FORMATS(X, __VA_ARGS__, 256)

// Head dim and warps.
#define PAGED_FOR_EACH_PREFILL_TENSOR(X, ...) \
  PAGED_PREFILL_TENSORS(X, __VA_ARGS__, 64)   \
  PAGED_PREFILL_TENSORS(X, __VA_ARGS__, 128)
#define PAGED_PREFILL_TENSORS(X, ...) \
  X(__VA_ARGS__, 2)                   \
  X(__VA_ARGS__, 4)                   \
  X(__VA_ARGS__, 6)                   \
  X(__VA_ARGS__, 8)

// The same for sm_90a; counts only consumer warps.
#define PAGED_FOR_EACH_PREFILL_WGMMA(X, ...) \
  X(__VA_ARGS__, 64, 4)                      \
  X(__VA_ARGS__, 64, 8)                      \
  X(__VA_ARGS__, 128, 4)                     \
  X(__VA_ARGS__, 128, 8)
