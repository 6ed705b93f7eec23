// Copyright © 2026 the mlx_paged authors. Apache-2.0.
//
// One tile of tokens, in the two ways that attention reads one. With few lanes (decode) reading
// memory is all that costs. A pool is token-major, so a decode task takes all its heads of a few
// tokens before the next tokens: memory is then read in order, where a pass per head
// would touch a new page every token or two. With many lanes (prefill) a task has one head, whose
// tile is converted once, transposed, and multiplied as a small matrix product. Compiled once for
// each instruction set, see simd.h.

#pragma once

#include "attention_state.h"
#include "matmul.h"
#include "softmax.h"

namespace mlx_paged::cpu::MLX_PAGED_ISA {

constexpr int kChunk = 8;  // tokens of which decode takes all heads before the next
#if defined(__AVX512F__)
constexpr int kAtOnce = 4;  // tokens of which the registers hold the sums of four lanes
#else
constexpr int kAtOnce = 2;
#endif

// The pool's row of each of `count` tokens: all KV heads, `pool.head_dim` apart.
template <typename T>
inline void token_rows(
    const AttentionArgs& args, const PoolView& pool, const int32_t* block_table, int token,
    int count, const T** rows) {
  int block = token / args.block_size;
  int in_block = token % args.block_size;
  int64_t row_size = int64_t(args.num_kv_heads) * pool.head_dim;
  for (int i = 0; i < count; i++) {
    int64_t slot = int64_t(block_table[block]) * args.block_size + in_block;
    rows[i] = static_cast<const T*>(pool.data) + slot * row_size;
    if (++in_block == args.block_size) {
      in_block = 0;
      block++;
    }
  }
}

// One head of some tokens into the cache, while those before them are computed: blocks lie anywhere
// in memory, so the hardware does not prefetch them.
template <typename T>
inline void fetch(const T* const* rows, int begin, int end, int offset, int dim) {
  constexpr int kLine = 64 / sizeof(T);
  for (int i = begin; i < end; i++) {
    for (int d = 0; d < dim; d += kLine) {
      __builtin_prefetch(rows[i] + offset + d, 0, 2);
    }
  }
}

template <typename T>
inline void decode_tile(
    const AttentionArgs& args, const Item& item, const Layout& at, int head_begin, int head_end,
    int token, int count, float* scratch) {
  const T* keys[kTile];
  const T* values[kTile];
  int key_dim = args.keys.head_dim;
  int value_dim = args.values.head_dim;
  token_rows(args, args.keys, item.block_table, token, count, keys);
  token_rows(args, args.values, item.block_table, token, count, values);
  const T* next_keys[kTile];
  int num_next = min(kTile, item.token_end - token - count);
  token_rows(args, args.keys, item.block_table, token + count, num_next, next_keys);
  for (int chunk = 0; chunk < count; chunk += kChunk) {
    int end = min(chunk + kChunk, count);
    for (int head = head_begin; head < head_end; head++) {
      fetch(values, chunk, end, head * value_dim, value_dim);
      State state(at, scratch, head - head_begin);
      for_lanes(at.lanes, [&](int lane, auto group) {
        constexpr int kLanes = decltype(group)::kCount;
        const float* q = state.queries + lane * at.key_dim;
        float* scores = state.scores + lane * kTile;
        int t = chunk;
        for (; t + kAtOnce <= end; t += kAtOnce) {
          dot<kLanes, kAtOnce>(q, at.key_dim, keys + t, head * key_dim, key_dim, scores + t);
        }
        for (; t < end; t++) {
          dot<kLanes, 1>(q, at.key_dim, keys + t, head * key_dim, key_dim, scores + t);
        }
      });
    }
  }
  for (int head = head_begin; head < head_end; head++) {
    softmax_lanes(args, item, at, token, count, State(at, scratch, head - head_begin));
  }
  static const float ones[kTransposeFrom] = {1, 1, 1, 1, 1, 1, 1, 1, 1, 1, 1, 1, 1, 1, 1, 1, 1};
  for (int chunk = 0; chunk < count; chunk += kChunk) {
    int end = min(chunk + kChunk, count);
    for (int head = head_begin; head < head_end; head++) {
      fetch(next_keys, min(chunk, num_next), min(end, num_next), head * key_dim, key_dim);
      State state(at, scratch, head - head_begin);
      matmul(
          at.lanes, state.scores + chunk, kTile, values + chunk, head * value_dim, end - chunk,
          chunk == 0 ? state.alpha : ones, state.acc, at.value_dim, value_dim);
    }
  }
}

// One KV head of a tile as fp32 rows padded with zeros to whole vectors: in place where the pool
// holds just that, else in `buffer`.
template <typename T>
inline void convert_rows(
    const PoolView& pool, int kv_head, int count, int padded_dim, const T* const* tokens,
    float* buffer, const float** rows) {
  int dim = pool.head_dim;
  for (int i = 0; i < count; i++) {
    const T* row = tokens[i] + kv_head * dim;
    if constexpr (sizeof(T) == sizeof(float)) {
      if (padded_dim == dim) {
        rows[i] = row;
        continue;
      }
    }
    float* dst = buffer + i * padded_dim;
    int d = 0;
    for (; d + kWidth <= dim; d += kWidth) {
      store(dst + d, load(row + d));
    }
    if (d < dim) {
      store(dst + d, load_tail(row + d, dim - d));
    }
    rows[i] = dst;
  }
}

template <typename T>
inline void prefill_tile(
    const AttentionArgs& args, const Item& item, const Layout& at, int kv_head, int token,
    int count, float* scratch, const State& state) {
  const T* tokens[kTile];
  const float* rows[kTile];
  token_rows(args, args.keys, item.block_table, token, count, tokens);
  convert_rows(args.keys, kv_head, count, at.key_dim, tokens, scratch + at.keys, rows);

  float* transposed = scratch + at.values;
  const float* columns[kMaxHeadDim];
  for (int d = 0; d < at.key_dim; d++) {
    columns[d] = transposed + d * kTile;
    for (int t = 0; t < count; t++) {
      transposed[d * kTile + t] = rows[t][d];
    }
    for (int t = count; t < kTile; t++) {
      transposed[d * kTile + t] = 0;
    }
  }
  __builtin_memset(state.scores, 0, sizeof(float) * at.lanes * kTile);
  __builtin_memset(state.alpha, 0, sizeof(float) * at.lanes);
  matmul(
      at.lanes, state.queries, at.key_dim, columns, 0, at.key_dim, state.alpha, state.scores, kTile,
      kTile);

  softmax_lanes(args, item, at, token, count, state);
  token_rows(args, args.values, item.block_table, token, count, tokens);
  convert_rows(args.values, kv_head, count, at.value_dim, tokens, scratch + at.values, rows);
  matmul(
      at.lanes, state.scores, kTile, rows, 0, count, state.alpha, state.acc, at.value_dim,
      at.value_dim);
}

}  // namespace mlx_paged::cpu::MLX_PAGED_ISA
