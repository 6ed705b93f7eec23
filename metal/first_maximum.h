// Copyright © 2026 the mlx_paged authors. Apache-2.0.
//
// The first maximum of numbers that many threads see.

#pragma once

#include <metal_stdlib>

#include "language.h"

using namespace metal;

namespace paged {

// Largest number so far and its first index.
struct FirstMaximum {
  float value;
  int index;

  METAL_FUNC void see(float number, int at) thread {
    if (number > value) {
      value = number;
      index = at;
    }
  }

  METAL_FUNC void join(float other, int other_index) thread {
    if (other > value || (other == value && other_index < index)) {
      value = other;
      index = other_index;
    }
  }

  // Joins those of all lanes.
  METAL_FUNC void join_lanes() thread {
    PAGED_UNROLL
    for (ushort offset = 16; offset > 0; offset /= 2) {
      join(simd_shuffle_xor(value, offset), simd_shuffle_xor(index, offset));
    }
  }
};

}  // namespace paged
