// Copyright © 2026 the mlx_paged authors. Apache-2.0.
//
// Attention of one work item for some KV heads. All query rows of the item and all query heads of a
// group ("lanes") share one pass over the item's keys and values, with an fp32 online softmax in
// base 2 (Milakov & Gimelshein 2018; tiled like FlashAttention, Dao 2022). Compiled once per
// instruction set; see simd.h.

#pragma once

#include "attention_state.h"
#include "softmax.h"
#include "tiles.h"

namespace mlx_paged::cpu::MLX_PAGED_ISA {

template <typename T>
inline void attend_as(
    const AttentionArgs& args, int index, int head_begin, int head_end, float* scratch) {
  Item item = read_item(args, index);
  Layout at(args, item.num_rows);
  for (int head = head_begin; head < head_end; head++) {
    State state(at, scratch, head - head_begin);
    load_queries<T>(args, item, head, at, state.queries);
    state.clear_sums(at);
  }
  for (int token = item.token_begin, count; token < item.token_end; token += count) {
    count = tokens_in_tile(item, token);
    if (at.lanes < kConvertFrom) {
      decode_tile(args, item, at, head_begin, head_end, token, count, scratch);
    } else {
      for (int head = head_begin; head < head_end; head++) {
        prefill_tile(
            args, item, at, head, token, count, scratch, State(at, scratch, head - head_begin));
      }
    }
  }
  for (int head = head_begin; head < head_end; head++) {
    finish<T>(args, item, at, head, State(at, scratch, head - head_begin));
  }
}

template <typename T>
inline void merge_as(const AttentionArgs& args, int index, int row) {
  const paged::MergeItem& item = args.merge_items[index];
  int dim = args.values.head_dim;
  for (int head = 0; head < args.num_q_heads; head++) {
    auto partial = [&](int split) {
      int64_t p = item.partial_begin + int64_t(split) * (item.row_end - item.row_begin) +
                  (row - item.row_begin);
      return p * args.num_q_heads + head;
    };
    float row_max = -kInf;
    for (int i = 0; i < item.num_splits; i++) {
      float split_max = args.partial_max[partial(i)];
      row_max = split_max > row_max ? split_max : row_max;
    }
    float reference = row_max == -kInf ? 0.0f : row_max;
    float acc[kMaxHeadDim] = {};
    float row_sum = 0;
    for (int i = 0; i < item.num_splits; i++) {
      int64_t p = partial(i);
      float weight = exp2(args.partial_max[p] - reference);
      row_sum += weight * args.partial_sum[p];
      for (int d = 0; d < dim; d++) {
        acc[d] += weight * args.partial_out[p * dim + d];
      }
    }
    finish_lane<T>(args, acc, row_max, row_sum, row, head);
  }
}

inline void attend(
    const AttentionArgs& args, int item, int head_begin, int head_end, float* scratch) {
  with_type(args.dtype, [&](auto type) {
    attend_as<decltype(type)>(args, item, head_begin, head_end, scratch);
  });
}

inline void merge(const AttentionArgs& args, int item, int row) {
  with_type(args.dtype, [&](auto type) { merge_as<decltype(type)>(args, item, row); });
}

}  // namespace mlx_paged::cpu::MLX_PAGED_ISA
