// Copyright © 2026 the mlx_paged authors. Apache-2.0.
//
// The online softmax in base 2 and fp32 (Milakov & Gimelshein 2018): a running maximum of logits,
// and sums relative to it.

#pragma once

#include <metal_stdlib>

#include "attention_options.h"

using namespace metal;

namespace paged {

#define PAGED_LOG2E 1.44269504088896340736f

// The factor that makes values relative to `from` relative to `to`, which is at least as large.
// With no key seen yet both are -inf, and (-inf) - (-inf) would be a NaN.
METAL_FUNC float rescale(float from, float to) {
  return to == -INFINITY ? 0.0f : fast::exp2(from - to);
}

// exp2(logit - maximum); a masked logit is -inf and its weight 0, even if nothing else is seen.
METAL_FUNC float weight(float logit, float maximum) {
  return fast::exp2(logit - (maximum == -INFINITY ? 0.0f : maximum));
}

// A dot product as a logit in base 2. fast::tanh overflows to a NaN where tanh is 1.
METAL_FUNC float logit(float dot, constant AttentionParams& params) {
  float scaled = dot * params.scale;
  if (PAGED_HAS_SOFTCAP(params)) {
    return params.softcap * PAGED_LOG2E * precise::tanh(scaled / params.softcap);
  }
  return scaled;
}

struct SoftmaxState {
  float maximum;
  float sum;

  METAL_FUNC void clear() thread {
    maximum = -INFINITY;
    sum = 0.0f;
  }

  // The factor applied at the very end to a sum of values relative to `maximum`. The sink is a
  // logit that joins the softmax and carries no value. A row that sees no key at all is zero.
  METAL_FUNC float normaliser(bool has_sink, float sink) const thread {
    float factor = 1.0f;
    float total = sum;
    if (has_sink) {
      float joined = max(maximum, sink * PAGED_LOG2E);
      factor = rescale(maximum, joined);
      total = sum * factor + weight(sink * PAGED_LOG2E, joined);
    }
    return total == 0.0f ? 0.0f : factor / total;
  }
};

}  // namespace paged
