// Copyright © 2026 the mlx_paged authors. Apache-2.0.
//
// Greedy selection of the next tokens.

#pragma once

#include <metal_stdlib>

#include "first_maximum.h"
#include "kernel_table.h"
#include "language.h"
#include "logit_row.h"

using namespace metal;

namespace paged {

// Largest logit so far and its first index. Tracks NaNs separately.
struct LargestLogit {
  FirstMaximum first;
  int has_nan;

  METAL_FUNC void see(float logit, int at) thread {
    // Tests the bits, because compilers may assume that a number equals itself.
    has_nan |= (as_type<uint>(logit) & 0x7fffffffu) > 0x7f800000u;
    first.see(logit, at);
  }

  METAL_FUNC void join(float other, int other_index, int other_has_nan) thread {
    has_nan |= other_has_nan;
    first.join(other, other_index);
  }
};

}  // namespace paged

// Finds the first maximum of each row of logits, and its logit: NaN if the row holds one; the token
// is then arbitrary. `reported` is the token for the host, or -1 if the largest logit is not
// finite.
// grid: rows.
template <typename T>
PAGED_KERNEL(paged::GREEDY_THREADS)
greedy_tokens(
    device const T* logits [[buffer(0)]], device int* tokens [[buffer(1)]],
    device float* largest [[buffer(2)]], device int* reported [[buffer(3)]],
    constant paged::GreedyParams& params [[buffer(4)]], threadgroup float* parts PAGED_SCRATCH,
    PAGED_THREAD_POSITION, PAGED_SIMD_POSITION) {
  using namespace paged;
  int threads = int(group_size.x);
  LargestLogit best{{-INFINITY, params.vocab_size}, 0};
  visit_row(
      logits + ulong(group_id.x) * params.vocab_size, params.vocab_size, thread_id, threads, best);
  PAGED_UNROLL
  for (ushort offset = 16; offset > 0; offset /= 2) {
    best.join(
        simd_shuffle_xor(best.first.value, offset), simd_shuffle_xor(best.first.index, offset),
        simd_shuffle_xor(best.has_nan, offset));
  }
  int num_parts = threads / 32;
  if (lane == 0) {
    parts[simd_id] = best.first.value;
    parts[num_parts + int(simd_id)] = as_type<float>(best.first.index);
    parts[2 * num_parts + int(simd_id)] = as_type<float>(best.has_nan);
  }
  threadgroup_barrier(mem_flags::mem_threadgroup);
  if (thread_id > 0) {
    return;
  }
  for (int i = 1; i < num_parts; i++) {
    best.join(parts[i], as_type<int>(parts[num_parts + i]), as_type<int>(parts[2 * num_parts + i]));
  }
  FirstMaximum first = best.first;
  int token = first.index < params.vocab_size ? first.index : 0;  // all are -inf or NaN
  bool is_finite = !best.has_nan && first.value > -INFINITY && first.value < INFINITY;
  tokens[group_id.x] = token;
  largest[group_id.x] = best.has_nan ? NAN : first.value;
  reported[group_id.x] = is_finite ? token : -1;
}
