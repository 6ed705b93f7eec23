// Copyright © 2026 the mlx_paged authors. Apache-2.0.
//
// Instantiations of the kernels of metal/ for NVIDIA GPUs. Threads there have twice the registers
// of Apple's, so tiles are larger and each loaded key serves more queries. The host includes this
// too.

#pragma once

#include "../../metal/attention_shape.h"
#include "../../metal/kernel_table.h"

namespace paged {

constexpr int portable_matrix_simd_groups(int k_dim) {
  return k_dim < 256 ? 4 : 8;
}

constexpr int portable_matrix_max_rows(int k_dim) {
  return k_dim <= 256 ? 64 : 32;
}

constexpr int portable_decode_max_queries(int) {
  return 3;
}

// Key loads that a lane keeps in flight.
constexpr int portable_decode_loads(int) {
  return 4;
}

constexpr int portable_prefill_tokens(int k_dim, int v_dim, int item_size) {
  int tokens = 32;
  while (tokens > 8 && prefill_scratch(k_dim, v_dim, item_size, tokens) > 16 * 1024) {
    tokens /= 2;
  }
  return tokens;
}

constexpr int portable_prefill_max_rows(int k_dim) {
  return k_dim > 256 ? 0 : k_dim > 128 ? 32 : 64;
}

}  // namespace paged

// Like the lists in metal/kernel_table.h.
#define PORTABLE_FOR_EACH_DECODE(X, ...) \
  PAGED_FOR_EACH_HEAD_DIM(PAGED_DECODE_QUERIES, X, __VA_ARGS__)

#define PORTABLE_FOR_EACH_MATRIX(X, ...)                          \
  PAGED_FOR_EACH_DIM_TO_256(PORTABLE_MATRICES_64, X, __VA_ARGS__) \
  PAGED_FOR_EACH_WIDE_DIM(PAGED_MATRICES_32, X, __VA_ARGS__)
#define PORTABLE_MATRICES_64(X, dtype, type, k_dim, v_dim) \
  PAGED_MATRICES_32(X, dtype, type, k_dim, v_dim)          \
  PAGED_MATRIX(X, dtype, type, k_dim, v_dim, 64)

#define PORTABLE_FOR_EACH_PREFILL(X, ...)                         \
  PAGED_FOR_EACH_DIM_TO_128(PORTABLE_PREFILLS_64, X, __VA_ARGS__) \
  PAGED_FOR_EACH_LARGE_DIM(PAGED_PREFILLS_32, X, __VA_ARGS__)
// The largest tiles of each, for kernels/bounds.cu and general.cu.
#define PORTABLE_FOR_EACH_LARGEST(X, ...)                         \
  PAGED_FOR_EACH_DIM_TO_128(PORTABLE_TILES_64_64, X, __VA_ARGS__) \
  PAGED_FOR_EACH_LARGE_DIM(PORTABLE_TILES_64_32, X, __VA_ARGS__)  \
  PAGED_FOR_EACH_WIDE_DIM(PORTABLE_TILES_32, X, __VA_ARGS__)
#define PORTABLE_TILES_64_64(X, dtype, type, k_dim, v_dim) \
  PAGED_MATRIX(X, dtype, type, k_dim, v_dim, 64)           \
  PAGED_PREFILL(X, dtype, type, k_dim, v_dim, 64)
#define PORTABLE_TILES_64_32(X, dtype, type, k_dim, v_dim) \
  PAGED_MATRIX(X, dtype, type, k_dim, v_dim, 64)           \
  PAGED_PREFILL(X, dtype, type, k_dim, v_dim, 32)
#define PORTABLE_TILES_32(X, dtype, type, k_dim, v_dim) \
  PAGED_MATRIX(X, dtype, type, k_dim, v_dim, 32)

#define PORTABLE_PREFILLS_64(X, dtype, type, k_dim, v_dim) \
  PAGED_PREFILLS_32(X, dtype, type, k_dim, v_dim)          \
  PAGED_PREFILL(X, dtype, type, k_dim, v_dim, 64)
