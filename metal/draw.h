// Copyright © 2026 the mlx_paged authors. Apache-2.0.
//
// Draws the next tokens from softmax(logits / temperature): the largest sum of a scaled logit and
// Gumbel noise, the noise of mx.random.categorical.

#pragma once

#include <metal_stdlib>

#include "first_maximum.h"
#include "kernel_table.h"
#include "language.h"
#include "threefry.h"
#include "vector_load.h"

using namespace metal;

namespace paged {

// Above the noise of the largest u, 1 - 2^-24.
constexpr float max_noise() {
  return 16.64f;
}

// Gumbel noise -log(-log(u)), where u is `bits` / 2^32, rounded.
METAL_FUNC float gumbel_noise(uint bits) {
  if (bits == 0) {
    return -INFINITY;
  }
  float u = min(float(bits) * 2.3283064365386963e-10f, 0.99999994f);
  return -precise::log(-precise::log(u));
}

// A row's settings and what a thread found in it. Token `pair` has the first word of the random
// numbers of (pair, pair_stride + pair), token `pair_stride + pair` the second, where pair_stride
// is half of the row; the token in the middle of an odd row has the first word of (pair, 0).
struct RowDraw {
  float largest;
  float temperature;
  float threshold;
  uint key_0;
  uint key_1;
  int pair_stride;
  int num_pairs;  // with two tokens
  float bar;      // no token with a lower score wins
  FirstMaximum best;

  METAL_FUNC float scaled(float logit) const thread { return (logit - largest) / temperature; }

  METAL_FUNC RandomPair<uint> bits(int pair) const thread {
    RandomPair<uint> counter;
    counter.first = uint(pair);
    counter.second = pair < num_pairs ? uint(pair_stride + pair) : 0u;
    return threefry(key_0, key_1, counter);
  }

  // Sets the bar to the score of the greedy token, which most others cannot reach.
  METAL_FUNC void set_bar(int greedy) thread {
    int pair = greedy < pair_stride ? greedy : greedy - pair_stride;
    RandomPair<uint> random = bits(pair);
    bar = gumbel_noise(greedy < pair_stride ? random.first : random.second);
  }

  METAL_FUNC void see(float logit, int token, uint random) thread {
    float x = scaled(logit);
    if (x >= threshold) {
      best.see(x + gumbel_noise(random), token);
    }
  }

  // Sees tokens [pair, pair + N) and [pair_stride + pair, pair_stride + pair + N). The second of a
  // pair that has one token must be -inf.
  template <int N>
  METAL_FUNC void see_pairs(
      int pair, thread const float* first, thread const float* second) thread {
    float highest = max(first[0], second[0]);
    PAGED_UNROLL
    for (int i = 1; i < N; i++) {
      highest = max(highest, max(first[i], second[i]));
    }
    highest = scaled(highest);
    if (highest < threshold || highest + max_noise() < bar) {
      return;
    }
    PAGED_UNROLL
    for (int i = 0; i < N; i++) {
      RandomPair<uint> random = bits(pair + i);
      see(first[i], pair + i, random.first);
      see(second[i], pair_stride + pair + i, random.second);
    }
  }
};

}  // namespace paged

// Finds the best token of each part of a row, one part per SIMD-group. Rows of temperature 0 are
// not drawn.
// grid: (rows, parts / SIMD-groups rounded up).
template <typename T>
PAGED_KERNEL(paged::DRAW_THREADS)
draw_tokens(
    device const T* logits [[buffer(0)]], device const int* greedy [[buffer(1)]],
    device const float* largest [[buffer(2)]], device const float* temperature [[buffer(3)]],
    device const uint* keys [[buffer(4)]], device const float* thresholds [[buffer(5)]],
    device paged::DrawnToken* parts [[buffer(6)]], constant paged::DrawParams& params [[buffer(7)]],
    uint3 group_id [[threadgroup_position_in_grid]], uint3 group_size [[threads_per_threadgroup]],
    PAGED_SIMD_POSITION) {
  using namespace paged;
  constexpr int CHUNK = chunk_size<T>();
  ulong row = group_id.x;
  int part = int(group_id.y * (group_size.x / 32) + simd_id);
  if (part >= params.num_parts || !(temperature[row] > 0.0f)) {
    return;
  }
  RowDraw draw;
  draw.largest = largest[row];
  draw.temperature = temperature[row];
  draw.threshold = thresholds[row];
  draw.key_0 = keys[2 * row];
  draw.key_1 = keys[2 * row + 1];
  draw.num_pairs = params.vocab_size / 2;
  draw.pair_stride = params.vocab_size - draw.num_pairs;
  draw.best.value = -INFINITY;
  draw.best.index = params.vocab_size;
  draw.set_bar(greedy[row]);
  device const T* first = logits + row * params.vocab_size;
  device const T* second = first + draw.pair_stride;
  int begin = part * params.part_pairs;
  int end = min(begin + params.part_pairs, draw.pair_stride);
  if (params.vocab_size % (2 * CHUNK) == 0) {
    for (int at = begin; at < end; at += 32 * CHUNK) {
      int pair = at + int(lane) * CHUNK;
      if (pair < end) {
        float firsts[CHUNK];
        float seconds[CHUNK];
        unpack(((device const uint4*)first)[pair / CHUNK], firsts, T(0.0f));
        unpack(((device const uint4*)second)[pair / CHUNK], seconds, T(0.0f));
        draw.see_pairs<CHUNK>(pair, firsts, seconds);
      }
      draw.bar = simd_max(max(draw.bar, draw.best.value));
    }
  } else {
    for (int pair = begin + int(lane); pair < end; pair += 32) {
      float logit = float(first[pair]);
      float other = pair < draw.num_pairs ? float(second[pair]) : -INFINITY;
      draw.see_pairs<1>(pair, &logit, &other);
    }
  }
  draw.best.join_lanes();
  if (lane == 0) {
    device DrawnToken* drawn = parts + row * params.num_parts + part;
    drawn->score = draw.best.value;
    drawn->token = draw.best.index;
  }
}

// Chooses the best of each row's parts. A row keeps its greedy token if it is not drawn, or if the
// noise of every token is -inf.
// grid: rows, of one SIMD-group.
PAGED_KERNEL(32)
merge_draws(
    device const int* greedy [[buffer(0)]], device const float* temperature [[buffer(1)]],
    device const paged::DrawnToken* parts [[buffer(2)]], device int* tokens [[buffer(3)]],
    constant paged::DrawParams& params [[buffer(4)]],
    uint3 group_id [[threadgroup_position_in_grid]], uint lane [[thread_index_in_simdgroup]]) {
  using namespace paged;
  ulong row = group_id.x;
  FirstMaximum best{-INFINITY, params.vocab_size};
  if (temperature[row] > 0.0f) {
    for (int part = int(lane); part < params.num_parts; part += 32) {
      DrawnToken drawn = parts[row * params.num_parts + part];
      best.join(drawn.score, drawn.token);
    }
  }
  best.join_lanes();
  if (lane == 0) {
    tokens[row] = best.value > -INFINITY ? best.index : greedy[row];
  }
}
