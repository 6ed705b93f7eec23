// Copyright © 2026 the mlx_paged authors. Apache-2.0.
//
// Mixtures of experts in steps of few rows: routing, products of each pair with its expert's
// matrix, and their weighted sum. A pair is a row and one of its experts; pairs of one expert are
// adjacent, so its matrix is read once. All kernels compute in fp32 and round where separate
// operations would have rounded.

#pragma once

#include <metal_stdlib>

#include "few_rows.h"
#include "kernel_table.h"
#include "language.h"
#include "quantized_weights.h"
#include "vector_load.h"

using namespace metal;

namespace paged {

// Maps a float to a key with the same order, above 0.
METAL_FUNC uint sort_key(float value) {
  uint bits = as_type<uint>(value);
  uint key = bits & 0x80000000u ? ~bits : bits | 0x80000000u;
  return max(key, 1u);
}

// Keys of a lane's experts, number `lane` + 32 i: the order of their values. Of equal ones, the
// last or the first is the largest.
template <typename T>
struct ExpertKeys {
  uint keys[ROUTE_CHUNKS];  // 0: taken, or no such expert

  METAL_FUNC void set(int i, float value, int, bool) thread { keys[i] = sort_key(value); }

  // Takes the largest of all lanes' experts and returns its number.
  METAL_FUNC int take(int lane, bool prefers_last) thread {
    uint key = 0u;
    int index = 0;
    PAGED_UNROLL
    for (int i = 0; i < ROUTE_CHUNKS; i++) {
      see(keys[i], lane + 32 * i, prefers_last, key, index);
    }
    PAGED_UNROLL
    for (ushort offset = 16; offset > 0; offset /= 2) {
      uint other = simd_shuffle_xor(key, offset);
      see(other, simd_shuffle_xor(index, offset), prefers_last, key, index);
    }
    PAGED_UNROLL
    for (int i = 0; i < ROUTE_CHUNKS; i++) {
      keys[i] = lane + 32 * i == index ? 0u : keys[i];
    }
    return index;
  }

  METAL_FUNC void see(
      uint other, int other_index, bool prefers_last, thread uint& key, thread int& index) thread {
    bool is_later = other_index > index;
    if (other > key || (other == key && is_later == prefers_last)) {
      key = other;
      index = other_index;
    }
  }
};

// Values of 16 bits leave the lower bits of their keys for the experts' numbers, so that one
// instruction finds the largest.
struct ExpertKeysOf16Bits {
  enum : uint { NUMBERS = 0x1fff };
  uint keys[ROUTE_CHUNKS];

  METAL_FUNC void set(int i, float value, int lane, bool prefers_last) thread {
    uint number = uint(lane + 32 * i);
    uint key = max(sort_key(value) & ~NUMBERS, NUMBERS + 1u);
    keys[i] = key | (prefers_last ? number : NUMBERS - number);
  }

  METAL_FUNC int take(int, bool prefers_last) thread {
    uint largest = 0u;
    PAGED_UNROLL
    for (int i = 0; i < ROUTE_CHUNKS; i++) {
      largest = max(largest, keys[i]);
    }
    largest = simd_max(largest);
    PAGED_UNROLL
    for (int i = 0; i < ROUTE_CHUNKS; i++) {
      keys[i] = keys[i] == largest ? 0u : keys[i];
    }
    uint number = largest & NUMBERS;
    return int(prefers_last ? number : NUMBERS - number);
  }
};
template <>
struct ExpertKeys<half> : ExpertKeysOf16Bits {};
template <>
struct ExpertKeys<bfloat> : ExpertKeysOf16Bits {};

}  // namespace paged

// Routes rows to experts. From the router's logits it computes the weight of each pair, the pairs
// sorted by expert (`sorted_pairs`: row * top_k + i in sorted order), and items of up to
// `item_rows` pairs of one expert (`items`: expert, first index, count; count 0 past the last).
// Experts of a row, and ties, are ordered as in a stable sort whose first or last `top_k` are
// taken. grid: one threadgroup.
template <typename T>
PAGED_KERNEL(paged::ROUTE_THREADS)
route_experts(
    device const T* logits [[buffer(0)]], device T* weights [[buffer(1)]],
    device int* sorted_pairs [[buffer(2)]], device int* items [[buffer(3)]],
    constant paged::RouteParams& params [[buffer(4)]], threadgroup int* experts PAGED_SCRATCH,
    uint3 group_size [[threads_per_threadgroup]], uint thread_id [[thread_index_in_threadgroup]],
    PAGED_SIMD_POSITION) {
  using namespace paged;
  int threads = int(group_size.x);
  int top_k = params.top_k;
  int num_pairs = params.num_rows * top_k;
  int num_fours = (num_pairs + 3) / 4;
  // Threads count the pairs of an expert in segments of all pairs.
  int num_segments = max(threads / params.num_experts, 1);
  int num_counts = num_segments * params.num_experts;
  int segment_fours = (num_fours + num_segments - 1) / num_segments;
  threadgroup int* counts = experts + 4 * num_fours;  // [segment][expert]
  // For each expert, the number of pairs in the lower half and the number of items in the upper,
  // then those of all experts before it.
  threadgroup int* totals = counts + num_counts;
  threadgroup int* firsts = totals + params.num_experts;
  if (int(thread_id) < 4 * num_fours - num_pairs) {
    experts[num_pairs + int(thread_id)] = 0x7fffffff;  // sorts after all others
  }
  for (int row = int(simd_id); row < params.num_rows; row += threads / 32) {
    float values[ROUTE_CHUNKS];
    float largest = -INFINITY;
    PAGED_UNROLL
    for (int i = 0; i < ROUTE_CHUNKS; i++) {
      int expert = int(lane) + 32 * i;
      bool exists = expert < params.num_experts;
      values[i] = exists ? float(logits[row * params.num_experts + expert]) : -INFINITY;
      largest = max(largest, values[i]);
    }
    if (params.softmax_first) {
      largest = simd_max(largest);
      float total = 0.0f;
      PAGED_UNROLL
      for (int i = 0; i < ROUTE_CHUNKS; i++) {
        values[i] = precise::exp(values[i] - largest);
        total += values[i];
      }
      float factor = 1.0f / simd_sum(total);
      PAGED_UNROLL
      for (int i = 0; i < ROUTE_CHUNKS; i++) {
        values[i] = rounded<T>(values[i] * factor);
      }
    }
    ExpertKeys<T> keys;
    PAGED_UNROLL
    for (int i = 0; i < ROUTE_CHUNKS; i++) {
      keys.keys[i] = 0u;
      if (int(lane) + 32 * i < params.num_experts) {
        keys.set(i, values[i], int(lane), params.takes_last);
      }
    }
    int expert = 0;  // of the lane's pair
    float score = 0.0f;
    for (int pair = 0; pair < top_k; pair++) {
      int best = keys.take(int(lane), params.takes_last);
      float value = 0.0f;
      PAGED_UNROLL
      for (int i = 0; i < ROUTE_CHUNKS; i++) {
        value = int(lane) + 32 * i == best ? values[i] : value;
      }
      value = simd_shuffle(value, ushort(best % 32));
      if (int(lane) == (params.takes_last ? top_k - 1 - pair : pair)) {
        expert = best;
        score = value;
      }
    }
    bool is_pair = int(lane) < top_k;
    if (!params.softmax_first) {
      float highest = simd_max(is_pair ? score : -INFINITY);
      score = is_pair ? precise::exp(score - highest) : 0.0f;
      score = rounded<T>(score * (1.0f / simd_sum(score)));
    }
    if (params.normalizes) {
      score /= rounded<T>(simd_sum(is_pair ? score : 0.0f));
    }
    if (is_pair) {
      weights[row * top_k + int(lane)] = T(score);
      experts[row * top_k + int(lane)] = expert;
    }
  }
  threadgroup_barrier(mem_flags::mem_threadgroup);
  for (int i = int(thread_id); i < num_counts; i += threads) {
    int expert = i % params.num_experts;
    int first = i / params.num_experts * segment_fours;
    int count = 0;
    for (int f = first; f < min(first + segment_fours, num_fours); f++) {
      int4 four = ((threadgroup const int4*)experts)[f];
      count += (four.x == expert) + (four.y == expert) + (four.z == expert) + (four.w == expert);
    }
    counts[i] = count;
  }
  threadgroup_barrier(mem_flags::mem_threadgroup);
  for (int expert = int(thread_id); expert < params.num_experts; expert += threads) {
    int count = 0;
    for (int segment = 0; segment < num_segments; segment++) {
      count += counts[segment * params.num_experts + expert];
    }
    int num_items = (count + params.item_rows - 1) / params.item_rows;
    totals[expert] = count | num_items << 16;
  }
  threadgroup_barrier(mem_flags::mem_threadgroup);
  for (int expert = int(thread_id); expert < params.num_experts; expert += threads) {
    int before = 0;
    for (int other = 0; other < expert; other++) {
      before += totals[other];
    }
    firsts[expert] = before;
    int index = before & 0xffff;
    int item = before >> 16;
    int count = totals[expert] & 0xffff;
    for (int i = 0; i < count; i += params.item_rows) {
      items[3 * item] = expert;
      items[3 * item + 1] = index + i;
      items[3 * item + 2] = min(count - i, params.item_rows);
      item++;
    }
    if (expert == params.num_experts - 1) {
      for (; item < params.max_items; item++) {
        items[3 * item + 2] = 0;
      }
    }
  }
  threadgroup_barrier(mem_flags::mem_threadgroup);
  // An expert's pairs lie behind those of all experts before it, in the order of rows.
  for (int i = int(thread_id); i < num_counts; i += threads) {
    int expert = i % params.num_experts;
    int segment = i / params.num_experts;
    int index = firsts[expert] & 0xffff;
    for (int other = 0; other < segment; other++) {
      index += counts[other * params.num_experts + expert];
    }
    int first = segment * segment_fours;
    for (int f = first; counts[i] > 0 && f < min(first + segment_fours, num_fours); f++) {
      int4 four = ((threadgroup const int4*)experts)[f];
      int others[4] = {four.x, four.y, four.z, four.w};
      PAGED_UNROLL
      for (int e = 0; e < 4; e++) {
        if (others[e] == expert) {
          sorted_pairs[index] = 4 * f + e;
          index++;
        }
      }
    }
  }
}

// Computes out = x @ weight[expert].T + bias[expert] for an item's pairs, at most ROWS; a
// threadgroup reads its rows of the weight once for all of them. Rows of x are in sorted order, or
// by row of the step (`gathers`); rows of `out` are in sorted order, or by pair in row order
// (`scatters`). grid: (rows of an expert's weight / those of a threadgroup rounded up, items).
template <typename T, typename Weight, int ROWS>
PAGED_KERNEL(32 * paged::PRODUCT_SIMD_GROUPS)
expert_rows(
    device const T* x [[buffer(0)]], device const uchar* weight [[buffer(1)]],
    device const uchar* scales [[buffer(2)]], device const uchar* biases [[buffer(3)]],
    device const T* bias [[buffer(4)]], device const int* sorted_pairs [[buffer(5)]],
    device const int* items [[buffer(6)]], device T* out [[buffer(7)]],
    constant paged::ExpertParams& params [[buffer(8)]],
    uint3 group_id [[threadgroup_position_in_grid]], PAGED_SIMD_POSITION) {
  using namespace paged;
  constexpr int COLUMNS = product_columns(ROWS);
  int column = (int(group_id.x) * PRODUCT_SIMD_GROUPS + int(simd_id)) * COLUMNS;
  int expert = items[3 * group_id.y];
  int first = items[3 * group_id.y + 1];
  int count = items[3 * group_id.y + 2];
  if (column >= params.n || count == 0) {
    return;
  }
  ulong of_expert = ulong(expert) * params.n + column;
  int rows[ROWS];
  PAGED_UNROLL
  for (int i = 0; i < ROWS; i++) {
    int index = first + min(i, count - 1);
    rows[i] = params.gathers ? sorted_pairs[index] / params.top_k : index;
  }
  WeightRows weights = {
      weight, scales, biases, of_expert, params.k / Weight::unit_size(), params.group_shift};
  int num_columns = min(COLUMNS, params.n - column);
  float sums[ROWS][COLUMNS];
  multiply_rows<T, Weight, ROWS>(
      weights, num_columns, x, params.x_stride, rows, count, int(lane), sums);
  PAGED_UNROLL
  for (int i = 0; i < ROWS; i++) {
    PAGED_UNROLL
    for (int c = 0; c < COLUMNS; c++) {
      float sum = simd_sum(sums[i][c]);
      if (lane == 0 && i < count && c < num_columns) {
        if (params.has_bias) {
          sum = rounded<T>(sum) + float(bias[of_expert + c]);
        }
        int index = first + i;
        int row = params.scatters ? sorted_pairs[index] : index;
        out[ulong(row) * params.n + column + c] = T(sum);
      }
    }
  }
}

// Sums a row's pairs, each times its weight.
// grid: (rows, chunks of a row / DATA_THREADS rounded up).
template <typename T>
PAGED_KERNEL(paged::DATA_THREADS)
combine_experts(
    device const T* x [[buffer(0)]], device const T* weights [[buffer(1)]],
    device T* out [[buffer(2)]], constant paged::CombineParams& params [[buffer(3)]],
    PAGED_THREAD_POSITION) {
  using namespace paged;
  RowChunk at = row_chunk(group_id, group_size, thread_id);
  if (at.chunk >= params.row_chunks) {
    return;
  }
  constexpr int CHUNK = chunk_size<T>();
  float sums[CHUNK];
  PAGED_UNROLL
  for (int e = 0; e < CHUNK; e++) {
    sums[e] = 0.0f;
  }
  for (int i = 0; i < params.top_k; i++) {
    ulong pair = at.row * params.top_k + i;
    float weight = float(weights[pair]);
    float values[CHUNK];
    unpack(((device const uint4*)x)[pair * params.row_chunks + at.chunk], values, T(0.0f));
    PAGED_UNROLL
    for (int e = 0; e < CHUNK; e++) {
      sums[e] += rounded<T>(values[e] * weight);
    }
  }
  ((device uint4*)out)[at.row * params.row_chunks + at.chunk] = pack(sums, T(0.0f));
}
