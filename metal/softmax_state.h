// Copyright © 2026 the mlx_paged authors. Apache-2.0.
//
// Online softmax in base 2 and fp32 (Milakov & Gimelshein 2018): a running maximum of logits and
// sums relative to it.

#pragma once

#include <metal_stdlib>

#include "attention_variant.h"

using namespace metal;

namespace paged {

// Factor that rebases values from maximum `from` to maximum `to` >= `from`. Before the first key
// both are -inf, and (-inf) - (-inf) would be NaN.
METAL_FUNC float rescale(float from, float to) {
  return to == -INFINITY ? 0.0f : fast::exp2(from - to);
}

// exp2(logit - maximum). A masked logit is -inf and gets weight 0, even if all are masked.
METAL_FUNC float weight(float logit, float maximum) {
  return fast::exp2(logit - (maximum == -INFINITY ? 0.0f : maximum));
}

struct DeviceMath {
  // fast::tanh overflows to NaN where tanh is 1.
  METAL_FUNC static float tanh(float x) { return precise::tanh(x); }
  METAL_FUNC static float distance(int token, int position) { return float(token - position); }
};

// Converts a dot product to a logit.
METAL_FUNC float logit(float dot, int token, AttentionRow row, constant AttentionOptions& options) {
  return logit<DeviceMath>(dot * options.scale, token, row, options);
}

struct SoftmaxState {
  float maximum;
  float sum;

  METAL_FUNC void clear() thread {
    maximum = -INFINITY;
    sum = 0.0f;
  }

  // Final factor for a sum of values of query head `head` relative to `maximum`. 0 for a row that
  // sees no key.
  METAL_FUNC float normalizer(
      device const float* per_head, int head, constant AttentionOptions& options) const thread {
    float factor = 1.0f;
    float total = sum;
    (void)options;  // unused with function constants
    if (PAGED_HAS_SINKS(options)) {
      float sink = per_head[head] * PAGED_LOG2E;
      float joined = max(maximum, sink);
      factor = rescale(maximum, joined);
      total = sum * factor + weight(sink, joined);
    }
    return total == 0.0f ? 0.0f : factor / total;
  }
};

}  // namespace paged
