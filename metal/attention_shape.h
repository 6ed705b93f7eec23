// Copyright © 2026 the mlx_paged authors. Apache-2.0.
//
// Work division of the attention kernels, as functions of the template arguments. The host includes
// this file too and derives a launch's threads and threadgroup memory from it.

#pragma once

namespace paged {

constexpr int ceil_div(int n, int m) {
  return (n + m - 1) / m;
}

constexpr int larger(int a, int b) {
  return a > b ? a : b;
}

// --- paged_decode: each lane loads 16 bytes of a token

enum { DECODE_SIMD_GROUPS = 4 };

// Lanes that share a token: enough to hold its longer row in one chunk each, rounded up to a power
// of two for reductions by shuffles, at most a SIMD-group.
constexpr int decode_token_lanes(int k_dim, int v_dim, int chunk) {
  int chunks = ceil_div(larger(k_dim, v_dim), chunk);
  int lanes = 1;
  while (lanes < chunks && lanes < 32) {
    lanes *= 2;
  }
  return lanes;
}

constexpr int decode_lane_chunks(int dim, int chunk, int token_lanes) {
  return ceil_div(dim, chunk * token_lanes);
}

// Key loads of 16 bytes that a lane keeps in flight, and as many of values. Three queries leave
// registers for half as many.
constexpr int decode_loads(int queries) {
  return queries < 3 ? 4 : 2;
}

// Steps whose loads are issued together.
constexpr int decode_unroll(int chunks, int loads) {
  return chunks >= loads ? 1 : loads / chunks;
}

// Bytes: values, maximum and sum of one query from each SIMD-group.
constexpr int decode_scratch(int v_dim) {
  return DECODE_SIMD_GROUPS * (v_dim + 2) * 4;
}

// Maximum queries. From four on, the padding of the matrix units costs less; with the widest heads
// a lane has registers for one.
constexpr int decode_max_queries(int k_dim) {
  return k_dim > 256 ? 1 : 3;
}

// --- paged_merge

enum { MERGE_SIMD_GROUPS = 4 };

// --- paged_decode_matrix: each SIMD-group has a slice of the head dims

// Chosen so that a slice of the results fits a SIMD-group's registers. A template argument of the
// kernel, because other GPUs have more registers per thread.
constexpr int matrix_simd_groups(int k_dim) {
  return k_dim < 192 ? 4 : 8;
}

// Maximum rows of a matrix: queries, results and scores of a SIMD-group's slice must fit 112 of the
// 128 registers that a thread of an Apple GPU can address (tests/native/test_metal_registers.py).
constexpr int matrix_max_rows(int k_dim, int item_size) {
  int rows = k_dim > 256 ? 16 : k_dim >= 80 ? 32 : 64;
  return item_size == 4 && (rows == 64 || k_dim >= 112) ? rows / 2 : rows;
}

// 8-wide columns of one SIMD-group's slice of a dim.
constexpr int matrix_slice(int dim, int simd_groups) {
  return ceil_div(dim / 8, simd_groups);
}

// Elements between tokens in a slice's tile: 16 bytes more than the slice, so that rows of a
// fragment lie in different banks.
constexpr int matrix_pitch(int k_dim, int v_dim, int item_size, int groups) {
  return 8 * larger(matrix_slice(k_dim, groups), matrix_slice(v_dim, groups)) + 16 / item_size;
}

// Byte offsets of the parts of threadgroup memory.
struct MatrixScratch {
  int scores;   // after the tiles [SIMD-group][tokens][pitch] of T: [SIMD-group][rows][tokens] fp32
  int weights;  // [rows][tokens] of T
  int factors;  // [rows] fp32
  int size;
};

constexpr MatrixScratch matrix_scratch_of(
    int k_dim, int v_dim, int item_size, int rows, int groups, int tokens) {
  MatrixScratch at = {0, 0, 0, 0};
  at.scores = groups * tokens * matrix_pitch(k_dim, v_dim, item_size, groups) * item_size;
  at.weights = at.scores + groups * rows * tokens * 4;
  at.factors = at.weights + rows * tokens * item_size;
  at.size = at.factors + rows * 4;
  return at;
}

// Tokens per tile: as many as leave room for a second threadgroup in 32 KB.
constexpr int matrix_tokens(int k_dim, int v_dim, int item_size, int rows, int groups) {
  int tokens = 32;
  while (tokens > 8 &&
         matrix_scratch_of(k_dim, v_dim, item_size, rows, groups, tokens).size > 16 * 1024) {
    tokens /= 2;
  }
  return tokens;
}

constexpr MatrixScratch matrix_scratch(int k_dim, int v_dim, int item_size, int rows, int groups) {
  return matrix_scratch_of(
      k_dim, v_dim, item_size, rows, groups, matrix_tokens(k_dim, v_dim, item_size, rows, groups));
}

// --- paged_prefill: each SIMD-group has rows of the score matrix

enum { PREFILL_SIMD_GROUPS = 4 };

// Maximum rows per tile; 0: the head's queries and results do not fit the registers of SIMD-groups
// that divide only the rows, and paged_decode_matrix serves it.
constexpr int prefill_max_rows(int k_dim, int item_size) {
  return k_dim > 128 ? 0 : k_dim >= 80 || item_size == 4 ? 32 : 64;
}

// Elements between tokens in a tile.
constexpr int prefill_pitch(int dim, int item_size) {
  return dim + 16 / item_size;
}

// Bytes of a tile of keys and a tile of values.
constexpr int prefill_scratch(int k_dim, int v_dim, int item_size, int tokens) {
  return tokens * (prefill_pitch(k_dim, item_size) + prefill_pitch(v_dim, item_size)) * item_size;
}

// Tokens per tile. The scores of a SIMD-group with 16 rows take twice the registers, and so do fp32
// queries, which leaves room for fewer keys and values in flight.
constexpr int prefill_tokens(int k_dim, int v_dim, int item_size, int rows) {
  int tokens = rows > 32 ? 16 : 32;
  int max_chunks = item_size == 4 ? 384 : 512;  // 16-byte chunks in a tile of keys
  while (tokens > 8 && (prefill_scratch(k_dim, v_dim, item_size, tokens) > 16 * 1024 ||
                        tokens * k_dim * item_size > 16 * max_chunks)) {
    tokens /= 2;
  }
  return tokens;
}

// --- tensor_prefill: each SIMD-group has MATMUL_ROWS rows of the score matrix

enum { MATMUL_ROWS = 16, MATMUL_TOKENS = 32 };

// Maximum rows per tile; 0: paged_prefill serves the head. With wider heads than 128 a SIMD-group's
// queries and results do not fit its registers.
constexpr int matmul_max_rows(int k_dim, int item_size) {
  return item_size != 2 || k_dim > 128 ? 0 : 64;
}

// Byte offsets of the parts of threadgroup memory.
struct MatmulScratch {
  int values;   // after the keys [tokens][pitch] of T: the same of values
  int scores;   // [rows][tokens] fp32
  int weights;  // [rows][tokens] of T
  int factors;  // [rows] fp32
  int size;
};

constexpr MatmulScratch matmul_scratch(int k_dim, int v_dim, int item_size, int rows) {
  MatmulScratch at = {0, 0, 0, 0, 0};
  at.values = MATMUL_TOKENS * prefill_pitch(k_dim, item_size) * item_size;
  at.scores = prefill_scratch(k_dim, v_dim, item_size, MATMUL_TOKENS);
  at.weights = at.scores + rows * MATMUL_TOKENS * 4;
  at.factors = at.weights + rows * MATMUL_TOKENS * item_size;
  at.size = at.factors + rows * 4;
  return at;
}

}  // namespace paged
