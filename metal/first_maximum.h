// Copyright © 2026 the mlx_paged authors. Apache-2.0.
//
// The first maximum of numbers that many threads see.

#pragma once

#include <metal_stdlib>

#include "language.h"

using namespace metal;

namespace paged {

// Largest number so far and its first place.
struct FirstMaximum {
  float value;
  int place;

  METAL_FUNC void see(float number, int at) thread {
    if (number > value) {
      value = number;
      place = at;
    }
  }

  METAL_FUNC void join(float other, int other_place) thread {
    if (other > value || (other == value && other_place < place)) {
      value = other;
      place = other_place;
    }
  }

  // Joins those of all lanes.
  METAL_FUNC void join_lanes() thread {
    PAGED_UNROLL
    for (ushort offset = 16; offset > 0; offset /= 2) {
      join(simd_shuffle_xor(value, offset), simd_shuffle_xor(place, offset));
    }
  }
};

}  // namespace paged
