// Copyright © 2026 the mlx_paged authors. Apache-2.0.
//
// Metal's vector types with constructors and arithmetic, which CUDA's types of the same names lack.
// The kernels see these names redefined.

#pragma once

#include "language.h"

namespace metal {

template <typename T>
struct alignas(2 * sizeof(T)) Vector2 {
  T x, y;
  Vector2() = default;
  METAL_FUNC explicit Vector2(T all) : x(all), y(all) {}
  METAL_FUNC Vector2(T x, T y) : x(x), y(y) {}
  METAL_FUNC Vector2& operator+=(Vector2 b) {
    x += b.x;
    y += b.y;
    return *this;
  }
};

template <typename T>
METAL_FUNC Vector2<T> operator*(T a, Vector2<T> b) {
  return {a * b.x, a * b.y};
}

template <typename T>
struct alignas(16) Vector4 {
  T x, y, z, w;
  Vector4() = default;
  METAL_FUNC explicit Vector4(T all) : x(all), y(all), z(all), w(all) {}
};

template <typename To, typename From>
METAL_FUNC To as_type(From from) {
  static_assert(sizeof(To) == sizeof(From));
  To to;
  memcpy(&to, &from, sizeof(To));
  return to;
}

}  // namespace metal

#define int2 ::metal::Vector2<int>
#define float2 ::metal::Vector2<float>
#define uint4 ::metal::Vector4<unsigned int>
#define ulong2 ::metal::Vector2<unsigned long>
