// Copyright © 2026 the mlx_paged authors. Apache-2.0.
//
// Online softmax in base 2 and its output: final rows or partials. Compiled once per instruction
// set; see simd.h.

#pragma once

#include "attention_state.h"

namespace mlx_paged::cpu::MLX_PAGED_ISA {

// Positions of a vector's tokens, starting at `token`.
inline VecF tokens_from(int token) {
  VecF tokens;
  for (int i = 0; i < kWidth; i++) {
    tokens[i] = float(token + i);
  }
  return tokens;
}

// Turns one lane's scores, `count` tokens of the tile that contains `token`, into probabilities
// relative to its new running maximum. Returns the factor for earlier sums.
inline float softmax_tile(
    const AttentionArgs& args, paged::AttentionRow row, int token, int count, float* scores,
    float* row_max, float* row_sum) {
  int tile = token - token % kTile;
  if (paged::changes_logits(args.options)) {
    VecF tokens = tokens_from(tile);
    for (int t = 0; t < kTile; t += kWidth) {
      VecF score = load(scores + t);
      store(scores + t, paged::logit<VectorMath>(score, tokens + float(t), row, args.options));
    }
  }
  if (count < kTile || row.bounds.first > tile || row.bounds.last < tile + kTile - 1) {
    for (int t = 0; t < kTile; t++) {
      bool exists = tile + t >= token && tile + t < token + count;
      bool seen = exists && paged::visible(row, tile + t, args.options);
      scores[t] = seen ? scores[t] : -kInf;
    }
  }
  VecF tile_max = load(scores);
  for (int t = kWidth; t < kTile; t += kWidth) {
    tile_max = max(tile_max, load(scores + t));
  }
  float new_max = max(tile_max);
  new_max = *row_max > new_max ? *row_max : new_max;
  // For a lane that has seen no key, keeps the sums at zero and avoids (-inf) - (-inf).
  float reference = new_max == -kInf ? 0.0f : new_max;
  VecF tile_sum = {};
  for (int t = 0; t < kTile; t += kWidth) {
    VecF p = exp2(load(scores + t) - reference);
    store(scores + t, p);
    tile_sum += p;
  }
  float alpha = exp2(*row_max - reference);
  *row_max = new_max;
  *row_sum = *row_sum * alpha + sum(tile_sum);
  return alpha;
}

inline void softmax_lanes(
    const AttentionArgs& args, const Item& item, const Layout& at, int kv_head, int token,
    int count, const State& state) {
  int group = args.num_q_heads / args.num_kv_heads;
  for (int lane = 0; lane < at.lanes; lane++) {
    paged::AttentionRow row = paged::attention_row(
        args.positions, item.row_begin + lane / group, args.per_head,
        kv_head * group + lane % group, args.num_q_heads, args.options);
    state.alpha[lane] = softmax_tile(
        args, row, token, count, state.scores + lane * kTile, state.row_max + lane,
        state.row_sum + lane);
  }
}

template <typename T>
inline void finish_lane(
    const AttentionArgs& args, const float* acc, float row_max, float row_sum, int64_t row,
    int head) {
  float scale = 1.0f;
  if (args.options.has_sinks) {
    float sink = args.per_head[head] * PAGED_LOG2E;
    float new_max = sink > row_max ? sink : row_max;
    float reference = new_max == -kInf ? 0.0f : new_max;  // as in softmax_tile
    scale = exp2(row_max - reference);
    row_sum = row_sum * scale + exp2(sink - reference);
  }
  // A row that sees no key is defined as zero.
  float factor = row_sum == 0.0f ? 0.0f : scale / row_sum;
  int dim = args.values.head_dim;
  T* out = static_cast<T*>(args.out) + (row * args.num_q_heads + head) * dim;
  for (int d = 0; d < dim; d++) {
    store_as(out + d, acc[d] * factor);
  }
}

template <typename T>
inline void finish(
    const AttentionArgs& args, const Item& item, const Layout& at, int kv_head,
    const State& state) {
  int group = args.num_q_heads / args.num_kv_heads;
  for (int lane = 0; lane < at.lanes; lane++) {
    int row = lane / group;
    int head = kv_head * group + lane % group;
    float* lane_acc = state.acc + size_t(lane) * at.value_dim;
    if (args.values.format == PoolFormat::int4) {
      dims_in_order(lane_acc, args.values.head_dim);
    }
    if (item.partial_begin < 0) {
      finish_lane<T>(
          args, lane_acc, state.row_max[lane], state.row_sum[lane], item.row_begin + row, head);
      continue;
    }
    int64_t partial = int64_t(item.partial_begin + row) * args.num_q_heads + head;
    args.partial_max[partial] = state.row_max[lane];
    args.partial_sum[partial] = state.row_sum[lane];
    __builtin_memcpy(
        args.partial_out + partial * args.values.head_dim, lane_acc,
        sizeof(float) * args.values.head_dim);
  }
}

}  // namespace mlx_paged::cpu::MLX_PAGED_ISA
