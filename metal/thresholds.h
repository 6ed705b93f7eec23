// Copyright © 2026 the mlx_paged authors. Apache-2.0.
//
// min-p, top-k and top-p without sorting: each keeps the logits above a threshold.
//
// A threadgroup narrows an interval of sort keys until one key is left. Each round passes over the
// row and splits the interval into as many bins as the threadgroup has threads; the bin where the
// sum of weights reaches the limit is the next interval. The weight of a logit is 1 for top-k, and
// its probability for top-p. Sums are integers, so they do not depend on the order of the threads,
// and a row's threshold depends on nothing but the row.
//
// Accuracy of top-p: a probability is e^x in units of 2^-40, rounded down. The largest logit has
// probability 1, so the sum of n others is off by at most n * 2^-40 of it, besides the error of exp
// (2^-22): 2^-22 for a vocabulary of 2^18. An integer of 64 bits holds 2^24 probabilities.

#pragma once

#include <metal_stdlib>

#include "kernel_table.h"
#include "language.h"
#include "logit_row.h"

using namespace metal;

namespace paged {

// Sort key of a scaled logit, which is at most 0: ascending keys are descending logits. NaNs are
// the largest keys, above that of -inf.
METAL_FUNC uint key_of(float scaled) {
  return as_type<uint>(scaled) & 0x7fffffffu;
}

METAL_FUNC float logit_of(uint key) {
  return -as_type<float>(key);
}

// The keys [first, last] in THRESHOLD_THREADS bins.
struct KeyBins {
  uint first;
  uint last;
  int shift;  // log2 of the keys per bin; -1: bins of equal numbers, 1/32 wide

  // The first split. Logits of a row spread over a few hundred bins of equal width, but over a
  // dozen of equal numbers of keys, where threads would wait for each other's additions.
  METAL_FUNC static KeyBins to(uint last) {
    KeyBins bins;
    bins.first = 0;
    bins.last = last;
    bins.shift = -1;
    return bins;
  }

  METAL_FUNC bool has(uint key) const thread { return key >= first && key <= last; }

  METAL_FUNC uint bin_of(uint key) const thread {
    if (shift < 0) {
      return uint(min(as_type<float>(key) * 32.0f, float(THRESHOLD_THREADS - 1)));
    }
    return (key - first) >> shift;
  }

  // The bins of one bin.
  METAL_FUNC KeyBins within(uint bin) const thread {
    KeyBins bins;
    if (shift < 0) {
      bins.first = key_of(float(bin) / 32.0f);
      bins.last = bin + 1 < THRESHOLD_THREADS ? key_of(float(bin + 1) / 32.0f) - 1 : last;
    } else {
      bins.first = first + (bin << shift);
      bins.last = bins.first + ((1u << shift) - 1);
    }
    bins.shift = 0;
    while ((bins.last - bins.first) >> bins.shift >= THRESHOLD_THREADS) {
      bins.shift++;
    }
    return bins;
  }
};

// total * share / 2^64, rounded up.
METAL_FUNC ulong share_of(ulong total, ulong share) {
  ulong half_word = 0xffffffffu;
  ulong low = (total & half_word) * (share & half_word);
  ulong upper = (total >> 32) * (share & half_word) + (low >> 32);
  ulong lower = (total & half_word) * (share >> 32) + (upper & half_word);
  bool has_rest = ((low | lower) & half_word) != 0;
  return (total >> 32) * (share >> 32) + (upper >> 32) + (lower >> 32) + ulong(has_rest);
}

// Weights of top-k.
struct CountWeight {
  int top_k;

  METAL_FUNC ulong of(float) const thread { return 1; }
  METAL_FUNC ulong limit(ulong) const thread { return ulong(top_k); }
};

// Weights of top-p, which is below 1.
struct MassWeight {
  float top_p;

  METAL_FUNC ulong of(float scaled) const thread {
    return ulong(precise::exp(scaled) * 1099511627776.0f);
  }
  METAL_FUNC ulong limit(ulong total) const thread {
    return share_of(total, max(ulong(top_p * 18446744073709551616.0f), ulong(1)));
  }
};

// Threadgroup memory: sums of bins and of SIMD-groups in two words each, and the bin of the round.
// 32-bit additions report the value before, so that their carries are not lost.
struct ThresholdScratch {
  threadgroup atomic_uint* low;
  threadgroup atomic_uint* high;
  threadgroup uint* group_low;
  threadgroup uint* group_high;
  threadgroup uint* found;  // its index, and the two words of the weight above it

  METAL_FUNC explicit ThresholdScratch(threadgroup atomic_uint* memory)
      : low(memory), high(memory + THRESHOLD_THREADS) {
    group_low = (threadgroup uint*)(memory + 2 * THRESHOLD_THREADS);
    group_high = group_low + THRESHOLD_THREADS / 32;
    found = group_high + THRESHOLD_THREADS / 32;
  }

  METAL_FUNC void clear(uint bin) thread {
    atomic_store_explicit(low + bin, 0u, memory_order_relaxed);
    atomic_store_explicit(high + bin, 0u, memory_order_relaxed);
  }

  METAL_FUNC void add(uint bin, ulong weight) thread {
    uint low_word = uint(weight);
    uint before = atomic_fetch_add_explicit(low + bin, low_word, memory_order_relaxed);
    uint carry = before + low_word < before ? 1 : 0;
    uint high_word = uint(weight >> 32) + carry;
    if (high_word > 0) {
      atomic_fetch_add_explicit(high + bin, high_word, memory_order_relaxed);
    }
  }

  METAL_FUNC ulong sum(uint bin) thread {
    return ulong(atomic_load_explicit(high + bin, memory_order_relaxed)) << 32 |
           atomic_load_explicit(low + bin, memory_order_relaxed);
  }
};

template <typename Weight>
struct BinAdder {
  KeyBins bins;
  Weight weight;
  float largest;
  float temperature;
  ThresholdScratch scratch;
  // A product takes fewer instructions than a quotient, and tells most logits outside the bins.
  float inverse;
  float low;
  float high;

  METAL_FUNC BinAdder(
      KeyBins bins, Weight weight, float largest, float temperature, ThresholdScratch scratch)
      : bins(bins), weight(weight), largest(largest), temperature(temperature), scratch(scratch) {
    inverse = 1.0f / temperature;
    low = logit_of(bins.last) * 1.000001f - 1e-30f;
    high = logit_of(bins.first) * 0.999999f + 1e-30f;
  }

  METAL_FUNC void see(float logit, int) thread {
    float rough = (logit - largest) * inverse;
    if (rough < low || rough > high) {
      return;
    }
    float scaled = (logit - largest) / temperature;
    uint key = key_of(scaled);
    if (bins.has(key)) {
      scratch.add(bins.bin_of(key), weight.of(scaled));
    }
  }
};

METAL_FUNC ulong shuffle_words(ulong value, uint from) {
  return ulong(simd_shuffle(uint(value >> 32), ushort(from))) << 32 |
         simd_shuffle(uint(value), ushort(from));
}

// Sum of the values of this lane and those below it.
METAL_FUNC ulong sum_to_lane(ulong value, uint lane) {
  PAGED_UNROLL
  for (uint offset = 1; offset < 32; offset *= 2) {
    ulong below = shuffle_words(value, lane >= offset ? lane - offset : lane);
    value += lane >= offset ? below : ulong(0);
  }
  return value;
}

// A threadgroup of THRESHOLD_THREADS threads and its row.
template <typename T>
struct ThresholdRow {
  device const T* logits;
  int vocab_size;
  float largest;
  float temperature;
  ThresholdScratch scratch;
  uint thread_id;
  uint simd_id;
  uint lane;

  // Returns the first key up to `last` where the sum of weights in order reaches `weight`'s limit,
  // or `none` if it never does.
  template <typename Weight>
  METAL_FUNC uint key_at_limit(uint last, Weight weight, uint none) thread {
    KeyBins bins = KeyBins::to(last);
    ulong above = 0;
    ulong limit = 0;
    do {
      scratch.clear(thread_id);
      threadgroup_barrier(mem_flags::mem_threadgroup);
      BinAdder<Weight> adder(bins, weight, largest, temperature, scratch);
      visit_row(logits, vocab_size, thread_id, THRESHOLD_THREADS, adder);
      threadgroup_barrier(mem_flags::mem_threadgroup);

      ulong own = scratch.sum(thread_id);
      ulong end = sum_to_lane(own, lane);
      if (lane == 31) {
        scratch.group_low[simd_id] = uint(end);
        scratch.group_high[simd_id] = uint(end >> 32);
      }
      if (thread_id == 0) {
        scratch.found[0] = THRESHOLD_THREADS;
      }
      threadgroup_barrier(mem_flags::mem_threadgroup);
      ulong group = ulong(scratch.group_high[lane]) << 32 | scratch.group_low[lane];
      ulong groups_end = sum_to_lane(group, lane);
      end += above + shuffle_words(groups_end - group, simd_id);
      if (bins.shift < 0) {
        limit = weight.limit(shuffle_words(groups_end, 31));
      }
      if (end >= limit && end - own < limit) {
        scratch.found[0] = thread_id;
        scratch.found[1] = uint(end - own);
        scratch.found[2] = uint((end - own) >> 32);
      }
      threadgroup_barrier(mem_flags::mem_threadgroup);
      uint bin = scratch.found[0];
      if (bin == THRESHOLD_THREADS) {
        return none;
      }
      above = ulong(scratch.found[2]) << 32 | scratch.found[1];
      bins = bins.within(bin);
    } while (bins.first < bins.last);
    return bins.first;
  }
};

}  // namespace paged

// The smallest logit of each row to keep, as (logit - largest) / temperature. min-p comes first, as
// a floor, then top-k, then top-p of what they left. The floor itself if they left nothing, as in a
// row with a NaN.
// grid: rows.
template <typename T>
PAGED_KERNEL(paged::THRESHOLD_THREADS)
sampling_thresholds(
    device const T* logits [[buffer(0)]], device const float* largest [[buffer(1)]],
    device const float* temperature [[buffer(2)]], device const float* floors [[buffer(3)]],
    device const int* top_k [[buffer(4)]], device const float* top_p [[buffer(5)]],
    device float* thresholds [[buffer(6)]], constant paged::ThresholdParams& params [[buffer(7)]],
    threadgroup atomic_uint* memory PAGED_SCRATCH, uint3 group_id [[threadgroup_position_in_grid]],
    uint thread_id [[thread_index_in_threadgroup]], PAGED_SIMD_POSITION) {
  using namespace paged;
  uint row = group_id.x;
  ThresholdRow<T> selection{
      logits + ulong(row) * params.vocab_size,
      params.vocab_size,
      largest[row],
      temperature[row],
      ThresholdScratch(memory),
      thread_id,
      simd_id,
      lane};
  constexpr uint NONE = 0xffffffffu;
  float threshold = floors[row];
  uint last = key_of(threshold);
  if (top_k[row] > 0 && top_k[row] < params.vocab_size) {
    uint key = selection.key_at_limit(last, CountWeight{top_k[row]}, NONE);
    if (key != NONE) {
      last = key;
      threshold = logit_of(key);
    }
  }
  if (top_p[row] < 1.0f) {
    uint key = selection.key_at_limit(last, MassWeight{top_p[row]}, NONE);
    threshold = key == NONE ? threshold : logit_of(key);
  }
  if (thread_id == 0) {
    thresholds[row] = threshold;
  }
}
