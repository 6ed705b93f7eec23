// Copyright © 2026 the mlx_paged authors. Apache-2.0.
//
// How the attention kernels divide their work, as functions of the instantiation. The host includes
// this file too: threads and threadgroup memory of a launch follow from it.

#pragma once

namespace paged {

constexpr int ceil_div(int n, int m) {
  return (n + m - 1) / m;
}

constexpr int larger(int a, int b) {
  return a > b ? a : b;
}

// --- paged_decode: a lane's 16 bytes of a token

enum { DECODE_SIMD_GROUPS = 4 };

// Lanes that share a token: enough to hold its longer row in one chunk each, rounded up to a power
// of two for the reduction by shuffles, at most a SIMD-group.
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

// Steps whose loads are issued together: eight loads of 16 bytes a lane, K and V.
constexpr int decode_unroll(int chunks) {
  return chunks >= 4 ? 1 : 4 / chunks;
}

// Bytes: the values, maximum and sum of one query from each SIMD-group.
constexpr int decode_scratch(int v_dim) {
  return DECODE_SIMD_GROUPS * (v_dim + 2) * 4;
}

// --- paged_merge

enum { MERGE_SIMD_GROUPS = 4 };

// --- paged_decode_matrix: a SIMD-group's slice of the head dims

// So many that a slice of the results fits a SIMD-group's registers.
constexpr int matrix_simd_groups(int k_dim) {
  return k_dim < 256 ? 4 : 8;
}

// 8-wide columns of one SIMD-group's slice of a dim.
constexpr int matrix_slice(int dim, int simd_groups) {
  return ceil_div(dim / 8, simd_groups);
}

// Elements from one token to the next in a slice's tile; 16 bytes more than the slice is wide, so
// that the rows of a fragment lie in different banks.
constexpr int matrix_pitch(int k_dim, int v_dim, int item_size) {
  int groups = matrix_simd_groups(k_dim);
  return 8 * larger(matrix_slice(k_dim, groups), matrix_slice(v_dim, groups)) + 16 / item_size;
}

// Where the pieces of threadgroup memory begin, in bytes.
struct MatrixScratch {
  int scores;   // after the tiles [SIMD-group][tokens][pitch] of T: [SIMD-group][rows][tokens] fp32
  int weights;  // [rows][tokens] of T
  int factors;  // [rows] fp32
  int size;
};

constexpr MatrixScratch matrix_scratch_of(
    int k_dim, int v_dim, int item_size, int rows, int tokens) {
  int groups = matrix_simd_groups(k_dim);
  MatrixScratch at = {0, 0, 0, 0};
  at.scores = groups * tokens * matrix_pitch(k_dim, v_dim, item_size) * item_size;
  at.weights = at.scores + groups * rows * tokens * 4;
  at.factors = at.weights + rows * tokens * item_size;
  at.size = at.factors + rows * 4;
  return at;
}

// Tokens of a tile: as many as leave room for a second threadgroup in 32 KB.
constexpr int matrix_tokens(int k_dim, int v_dim, int item_size, int rows) {
  int tokens = 32;
  while (tokens > 8 && matrix_scratch_of(k_dim, v_dim, item_size, rows, tokens).size > 16 * 1024) {
    tokens /= 2;
  }
  return tokens;
}

constexpr MatrixScratch matrix_scratch(int k_dim, int v_dim, int item_size, int rows) {
  return matrix_scratch_of(
      k_dim, v_dim, item_size, rows, matrix_tokens(k_dim, v_dim, item_size, rows));
}

// --- paged_prefill: a SIMD-group's rows of the score matrix

enum { PREFILL_SIMD_GROUPS = 4 };

// Elements from one token to the next in a tile.
constexpr int prefill_pitch(int dim, int item_size) {
  return dim + 16 / item_size;
}

// Bytes: a tile of keys and one of values.
constexpr int prefill_scratch_of(int k_dim, int v_dim, int item_size, int tokens) {
  return tokens * (prefill_pitch(k_dim, item_size) + prefill_pitch(v_dim, item_size)) * item_size;
}

constexpr int prefill_tokens(int k_dim, int v_dim, int item_size) {
  int tokens = 32;
  while (tokens > 8 && prefill_scratch_of(k_dim, v_dim, item_size, tokens) > 16 * 1024) {
    tokens /= 2;
  }
  return tokens;
}

constexpr int prefill_scratch(int k_dim, int v_dim, int item_size) {
  return prefill_scratch_of(k_dim, v_dim, item_size, prefill_tokens(k_dim, v_dim, item_size));
}

}  // namespace paged
