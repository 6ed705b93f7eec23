// Copyright © 2026 the mlx_paged authors. Apache-2.0.
//
// Working set of an attention task: its item of the plan, its scratch, and the running state of its
// lanes. Compiled once per instruction set; see simd.h.

#pragma once

#include "attention.h"
#include "matmul.h"
#include "pool_types.h"
#include "simd.h"

namespace mlx_paged::cpu::MLX_PAGED_ISA {

constexpr int kConvertFrom = 17;  // lanes from which converting a tile first pays off
constexpr int kChunk = 8;         // tokens; decode reads all heads of a chunk before the next chunk

inline int round_up(int n, int multiple) {
  return (n + multiple - 1) / multiple * multiple;
}

// Functions of this namespace for the hooks of metal/attention_variant.h.
struct VectorMath {
  static VecF tanh(VecF x) { return MLX_PAGED_ISA::tanh(x); }
  static VecF distance(VecF tokens, int position) { return tokens - float(position); }
};

inline int min(int a, int b) {
  return a < b ? a : b;
}

inline int max(int a, int b) {
  return a > b ? a : b;
}

struct Item {
  const int32_t* block_table;
  int row_begin;
  int num_rows;
  int token_begin;
  int token_end;
  int partial_begin;
};

inline Item read_item(const AttentionArgs& args, int index) {
  const paged::WorkItem& work = args.work_items[index];
  Item item;
  item.block_table = args.block_tables + int64_t(work.sequence) * args.max_blocks;
  item.row_begin = work.row_begin;
  item.num_rows = work.row_end - work.row_begin;
  int lowest = 0x7fffffff;
  int highest = -1;
  for (int r = work.row_begin; r < work.row_end; r++) {
    paged::RowBounds bounds = paged::bounds_of_row(args.positions, r, args.options);
    lowest = min(lowest, bounds.first);
    highest = max(highest, bounds.last);
  }
  item.token_begin = max(work.first_block * args.block_size, lowest);
  item.token_end = min(work.last_block * args.block_size, highest + 1);
  item.partial_begin = work.partial_begin;
  return item;
}

// Number of tokens of the item from `token` to the end of its tile. Tiles are aligned to multiples
// of kTile regardless of the item's start, so that a row's sums have a fixed order.
inline int tokens_in_tile(const Item& item, int token) {
  return min(kTile - token % kTile, item.token_end - token);
}

// Offsets in a task's scratch, in floats: converted rows, transposed keys, then each head's state.
struct Layout {
  int lanes, key_dim, value_dim;  // dims padded to whole vectors
  size_t transposed, shared_end;
  size_t queries, acc, row_max, row_sum, alpha, scores, per_head;

  Layout(const AttentionArgs& args, int rows) {
    lanes = rows * (args.num_q_heads / args.num_kv_heads);
    key_dim = round_up(args.keys.head_dim, kWidth);
    value_dim = round_up(args.values.head_dim, kWidth);
    // Rows of keys, later of values. Decode converts int4 codes, a few tokens at a time.
    bool has_nibbles =
        args.keys.format == PoolFormat::int4 || args.values.format == PoolFormat::int4;
    int converted = lanes >= kConvertFrom ? kTile : has_nibbles ? kChunk : 0;
    transposed = size_t(converted) * max(key_dim, value_dim);
    shared_end = transposed;
#if defined(__AVX512F__)
    shared_end += lanes >= kConvertFrom ? kTransposed * key_dim : 0;
#endif
    place_state(size_t(lanes) * key_dim);
  }

  // Places the state of a head, whose queries take `query_floats`.
  void place_state(size_t query_floats) {
    size_t padded_lanes = round_up(lanes, kWidth);
    queries = 0;
    acc = queries + query_floats;
    row_max = acc + size_t(lanes) * value_dim;
    row_sum = row_max + padded_lanes;
    alpha = row_sum + padded_lanes;
    scores = alpha + padded_lanes;
    per_head = scores + size_t(lanes) * kTile;
  }
};

// Running state of one KV head's lanes, in a task's scratch.
struct State {
  float *queries, *acc, *row_max, *row_sum, *alpha, *scores;

  State(const Layout& at, float* scratch, int head) {
    float* base = scratch + at.shared_end + head * at.per_head;
    queries = base + at.queries;
    acc = base + at.acc;
    row_max = base + at.row_max;
    row_sum = base + at.row_sum;
    alpha = base + at.alpha;
    scores = base + at.scores;
  }

  // No key is seen yet.
  void clear_sums(const Layout& at) const {
    for (int lane = 0; lane < at.lanes; lane++) {
      row_max[lane] = -kInf;
      row_sum[lane] = 0;
    }
    __builtin_memset(acc, 0, sizeof(float) * at.lanes * at.value_dim);
  }
};

inline size_t scratch_size(const AttentionArgs& args, int rows, int num_heads) {
  Layout at(args, rows);
  return at.shared_end + num_heads * at.per_head;
}

// Loads the queries of the item's lanes, padded and scaled; lane = row * group + head.
template <typename T>
inline void load_queries(
    const AttentionArgs& args, const Item& item, int kv_head, const Layout& at, float* out) {
  int group = args.num_q_heads / args.num_kv_heads;
  int dim = args.keys.head_dim;
  for (int lane = 0; lane < at.lanes; lane++) {
    int64_t row = item.row_begin + lane / group;
    const T* q = static_cast<const T*>(args.queries) +
                 (row * args.num_q_heads + kv_head * group + lane % group) * dim;
    float* dst = out + size_t(lane) * at.key_dim;
    for (int d = 0; d < at.key_dim; d += kWidth) {
      store(dst + d, load_tail(q + d, min(kWidth, dim - d)) * args.options.scale);
    }
    if (rotates_keys(args.keys.format)) {
      rotate(dst, dim);
    }
    if (args.keys.format == PoolFormat::int4) {
      evens_first(dst, dim);
    }
  }
}

}  // namespace mlx_paged::cpu::MLX_PAGED_ISA
