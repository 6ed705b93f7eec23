// <metal_array>: arrays that are values.
#pragma once
#include "types.h"

namespace metal {

template <class T, size_t N>
struct array {
  T __elements[N];

  __MSL_INLINE constexpr size_t size() const { return N; }
  __MSL_INLINE constexpr T operator[](size_t i) const { return __elements[i]; }
  __MSL_INLINE constexpr T& operator[](size_t i) { return __elements[i]; }
};

}  // namespace metal
