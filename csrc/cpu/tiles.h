// Copyright © 2026 the mlx_paged authors. Apache-2.0.
//
// Two ways to read a tile of tokens. With few lanes (decode), reading memory is the only cost. A
// pool is token-major, so a decode task reads all its heads for a few tokens before the next ones,
// in memory order; a pass per head would touch a new page every token or two. With many lanes
// (prefill) a task has one head and converts its tile once for all lanes. Both add in the same
// order, so a row has the same bits in any step. Compiled once per instruction set; see simd.h.

#pragma once

#include "attention_state.h"
#include "matmul.h"
#include "softmax.h"

namespace mlx_paged::cpu::MLX_PAGED_ISA {

#if defined(__AVX512F__)
constexpr int kAtOnce = 4;  // tokens whose sums for four lanes fit the registers
#else
constexpr int kAtOnce = 2;
#endif

// Finds the pool's row of each of `count` tokens: all KV heads, `head_bytes` apart.
template <typename T>
inline void token_rows(
    const AttentionArgs& args, const PoolView& pool, const int32_t* block_table, int token,
    int count, const T** rows) {
  int block = token / args.block_size;
  int in_block = token % args.block_size;
  int64_t token_bytes = pool.token_bytes();
  int64_t block_bytes = pool.block_bytes();
  for (int i = 0; i < count; i++) {
    rows[i] = reinterpret_cast<const T*>(
        pool.data + block_table[block] * block_bytes + in_block * token_bytes);
    if (++in_block == args.block_size) {
      in_block = 0;
      block++;
    }
  }
}

// Finds the first head's part of each token's tail; the next head's is `tail_stride` further.
inline void token_tails(
    const AttentionArgs& args, const PoolView& pool, const int32_t* block_table, int token,
    int count, const char** tails) {
  int block = token / args.block_size;
  int in_block = token % args.block_size;
  int64_t head_bytes = pool.tail_head_bytes();
  const char* tail = pool.data + pool.tail_begin();
  for (int i = 0; i < count; i++) {
    tails[i] = tail + block_table[block] * pool.block_bytes() + in_block * head_bytes;
    if (++in_block == args.block_size) {
      in_block = 0;
      block++;
    }
  }
}

inline int64_t tail_stride(const PoolView& pool) {
  return pool.block_size * pool.tail_head_bytes();
}

// Multiplies each lane's scores or weights by the int8 scales of some tokens of a tile.
inline void scale_lanes(
    const AttentionArgs& args, const PoolView& pool, const Item& item, int kv_head, int token,
    int count, int lanes, float* scores) {
  Half halves[kTile] = {};
  int block = token / args.block_size;
  int in_block = token % args.block_size;
  for (int i = 0; i < count; block++, in_block = 0) {
    int run = min(count - i, args.block_size - in_block);
    int64_t scales = pool.scales_at(item.block_table[block], kv_head, in_block);
    __builtin_memcpy(halves + token % kTile + i, pool.data + scales, run * sizeof(Half));
    i += run;
  }
  for (int t = 0; t < kTile; t += kWidth) {
    VecF scales = load(halves + t);
    for (int lane = 0; lane < lanes; lane++) {
      float* s = scores + lane * kTile + t;
      store(s, load(s) * scales);
    }
  }
}

// Prefetches one head of some tokens while earlier ones are computed: blocks are scattered in
// memory, so the hardware does not prefetch them.
inline void fetch(const char* const* rows, int begin, int end, int64_t offset, int64_t bytes) {
  constexpr int kLine = 64;
  for (int i = begin; i < end; i++) {
    for (int64_t b = 0; b < bytes; b += kLine) {
      __builtin_prefetch(rows[i] + offset + b, 0, 2);
    }
  }
}

// Converts one head of `count` tokens to fp32 rows; int8 stays unscaled, see scale_lanes.
template <typename T>
inline void convert_rows(
    const PoolView& pool, int kv_head, int count, int padded_dim, const T* const* tokens,
    const char* const* tails, float* buffer, const float** rows) {
  for (int i = 0; i < count; i++) {
    rows[i] = buffer + i * padded_dim;
    convert_row<false>(
        pool, tokens[i] + kv_head * pool.head_bytes() / int(sizeof(T)),
        tails[i] + kv_head * tail_stride(pool), padded_dim, buffer + i * padded_dim);
  }
}

// Prefetches the scales of one head of a chunk of tokens, which are adjacent in a block.
inline void fetch_scales(
    const PoolView& pool, const char* const* tails, int begin, int end, int kv_head) {
  if (begin < end) {
    int64_t bytes = pool.tail_head_bytes();
    for (int64_t b = 0; b < bytes * (end - begin); b += 64) {
      __builtin_prefetch(tails[begin] + kv_head * tail_stride(pool) + b, 0, 2);
    }
  }
}

// Computes scores of tokens [begin, end) of a chunk whose first token is at `first` in its tile.
template <typename T>
inline void score_chunk(
    const Layout& at, const State& state, int first, const T* const* keys, int offset, int dim,
    int begin, int end) {
  for_lanes(at.lanes, [&](int lane, auto group) {
    constexpr int kLanes = decltype(group)::kCount;
    const float* q = state.queries + lane * at.key_dim;
    float* scores = state.scores + lane * kTile + first;
    int t = begin;
    for (; t + kAtOnce <= end; t += kAtOnce) {
      dot<kLanes, kAtOnce>(q, at.key_dim, keys + t, offset, dim, scores + t);
    }
    for (; t < end; t++) {
      dot<kLanes, 1>(q, at.key_dim, keys + t, offset, dim, scores + t);
    }
  });
}

// Computes decode's scores of a tile for all its heads.
template <typename T>
inline void score_heads(
    const AttentionArgs& args, const Item& item, const Layout& at, int head_begin, int head_end,
    int token, int count, float* scratch) {
  const PoolView& pool = args.keys;
  const T* keys[kTile];
  const char* tails[kTile];
  const char* values[kTile];
  const char* value_tails[kTile];
  token_rows(args, pool, item.block_table, token, count, keys);
  token_rows(args, args.values, item.block_table, token, count, values);
  if constexpr (kIsInt4<T>) {
    token_tails(args, pool, item.block_table, token, count, tails);
  }
  bool scaled = args.values.tail_head_bytes() > 0;
  if (scaled) {
    token_tails(args, args.values, item.block_table, token, count, value_tails);
  }
  int64_t value_bytes = args.values.head_bytes();
  int first = token % kTile;
  for (int chunk = 0; chunk < count; chunk += kChunk) {
    int end = min(chunk + kChunk, count);
    for (int head = head_begin; head < head_end; head++) {
      fetch(values, chunk, end, head * value_bytes, value_bytes);
      if (scaled) {
        fetch_scales(args.values, value_tails, chunk, end, head);
      }
      State state(at, scratch, head - head_begin);
      if constexpr (kIsInt4<T>) {
        const float* rows[kTile];
        convert_rows(
            pool, head, end - chunk, at.key_dim, keys + chunk, tails + chunk, scratch,
            rows + chunk);
        score_chunk(at, state, first, rows, 0, at.key_dim, chunk, end);
      } else {
        score_chunk(at, state, first, keys, head * pool.head_dim, pool.head_dim, chunk, end);
      }
    }
  }
}

// Adds a tile's weighted values to decode's sums, for all its heads.
template <typename T>
inline void mix_heads(
    const AttentionArgs& args, const Item& item, const Layout& at, int head_begin, int head_end,
    int token, int count, float* scratch) {
  const PoolView& pool = args.values;
  const T* values[kTile];
  const char* tails[kTile];
  const char* next_keys[kTile];
  const char* next_tails[kTile];
  int num_next = min(kTile, item.token_end - token - count);
  token_rows(args, pool, item.block_table, token, count, values);
  token_rows(args, args.keys, item.block_table, token + count, num_next, next_keys);
  if constexpr (kIsInt4<T>) {
    token_tails(args, pool, item.block_table, token, count, tails);
  }
  bool scaled = args.keys.tail_head_bytes() > 0;
  if (scaled) {
    token_tails(args, args.keys, item.block_table, token + count, num_next, next_tails);
  }
  int64_t key_bytes = args.keys.head_bytes();
  int first = token % kTile;
  static const float ones[kConvertFrom] = {1, 1, 1, 1, 1, 1, 1, 1, 1, 1, 1, 1, 1, 1, 1, 1, 1};
  for (int chunk = 0; chunk < count; chunk += kChunk) {
    int end = min(chunk + kChunk, count);
    for (int head = head_begin; head < head_end; head++) {
      int next_begin = min(chunk, num_next), next_end = min(end, num_next);
      fetch(next_keys, next_begin, next_end, head * key_bytes, key_bytes);
      if (scaled) {
        fetch_scales(args.keys, next_tails, next_begin, next_end, head);
      }
      State state(at, scratch, head - head_begin);
      const float* alpha = chunk == 0 ? state.alpha : ones;
      if constexpr (kIsInt4<T>) {
        const float* rows[kChunk];
        convert_rows(
            pool, head, end - chunk, at.value_dim, values + chunk, tails + chunk, scratch, rows);
        matmul(
            at.lanes, state.scores + first + chunk, kTile, rows, 0, end - chunk, alpha, state.acc,
            at.value_dim, at.value_dim);
      } else {
        matmul(
            at.lanes, state.scores + first + chunk, kTile, values + chunk, head * pool.head_dim,
            end - chunk, alpha, state.acc, at.value_dim, pool.head_dim);
      }
    }
  }
}

// Turns one head's scores into weights. Applies int8 scales here, once per token.
inline void weigh(
    const AttentionArgs& args, const Item& item, const Layout& at, int head, int token, int count,
    const State& state) {
  if (args.keys.format == PoolFormat::int8) {
    scale_lanes(args, args.keys, item, head, token, count, at.lanes, state.scores);
  }
  softmax_lanes(args, item, at, head, token, count, state);
  if (args.values.format == PoolFormat::int8) {
    scale_lanes(args, args.values, item, head, token, count, at.lanes, state.scores);
  }
}

inline void decode_tile(
    const AttentionArgs& args, const Item& item, const Layout& at, int head_begin, int head_end,
    int token, int count, float* scratch) {
  with_pool_type(args.dtype, args.keys.format, [&](auto type) {
    score_heads<decltype(type)>(args, item, at, head_begin, head_end, token, count, scratch);
  });
  for (int head = head_begin; head < head_end; head++) {
    weigh(args, item, at, head, token, count, State(at, scratch, head - head_begin));
  }
  with_pool_type(args.dtype, args.values.format, [&](auto type) {
    mix_heads<decltype(type)>(args, item, at, head_begin, head_end, token, count, scratch);
  });
}

// Returns one KV head of a tile as fp32 rows padded with zeros to whole vectors: in place if the
// pool holds exactly that, else in `buffer`.
inline void tile_rows(
    const AttentionArgs& args, const PoolView& pool, const Item& item, int kv_head, int token,
    int count, int padded_dim, float* buffer, const float** rows) {
  with_pool_type(args.dtype, pool.format, [&](auto type) {
    using T = decltype(type);
    const T* tokens[kTile];
    const char* tails[kTile];
    token_rows(args, pool, item.block_table, token, count, tokens);
    if constexpr (sizeof(T) == sizeof(float)) {
      if (padded_dim == pool.head_dim) {
        for (int i = 0; i < count; i++) {
          rows[i] = tokens[i] + kv_head * pool.head_dim;
        }
        return;
      }
    }
    token_tails(args, pool, item.block_table, token, count, tails);
    convert_rows(pool, kv_head, count, padded_dim, tokens, tails, buffer, rows);
  });
}

// Computes prefill's scores of the tile that contains the token at `first` in it.
inline void score_rows(
    const Layout& at, const State& state, int first, int count, const float* const* rows,
    [[maybe_unused]] float* scratch) {
#if defined(__AVX512F__)
  float* keys = scratch + at.transposed;
  for (int begin = first / kTransposed * kTransposed; begin < first + count; begin += kTransposed) {
    transpose_keys(rows, first, count, begin, at.key_dim, keys);
    for_lanes(at.lanes, [&](int lane, auto group) {
      dot_transposed<decltype(group)::kCount>(
          state.queries + size_t(lane) * at.key_dim, at.key_dim, keys, at.key_dim,
          state.scores + lane * kTile + begin);
    });
  }
#else
  score_chunk(at, state, first, rows, 0, at.key_dim, 0, count);
#endif
}

inline void prefill_tile(
    const AttentionArgs& args, const Item& item, const Layout& at, int kv_head, int token,
    int count, float* scratch, const State& state) {
  const float* rows[kTile];
  tile_rows(args, args.keys, item, kv_head, token, count, at.key_dim, scratch, rows);
  int first = token % kTile;
  score_rows(at, state, first, count, rows, scratch);
  weigh(args, item, at, kv_head, token, count, state);
  tile_rows(args, args.values, item, kv_head, token, count, at.value_dim, scratch, rows);
  matmul(
      at.lanes, state.scores + first, kTile, rows, 0, count, state.alpha, state.acc, at.value_dim,
      at.value_dim);
}

}  // namespace mlx_paged::cpu::MLX_PAGED_ISA
