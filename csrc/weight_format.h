// Copyright © 2026 the mlx_paged authors. Apache-2.0.
//
// Formats of weights and activations that nodes name and back ends implement.

#pragma once

#include <cstdint>

namespace mlx_paged {

enum class WeightFormat : uint8_t {
  dense,
  affine,  // q * scale + bias, q unsigned of `bits` bits; scales and biases of the layer's dtype
  mxfp4,   // E2M1 * 2^(scale - 127)
  mxfp8,   // E4M3 * 2^(scale - 127)
  nvfp4,   // E2M1 * scale, which is E4M3
};

// How a weight is stored: as mx.quantize packed it, or dense.
struct WeightCodes {
  WeightFormat format;
  int bits;
  int group_size;

  bool operator==(const WeightCodes&) const = default;
};
constexpr WeightCodes kDenseWeight{WeightFormat::dense, 0, 0};

// How the CPU rounds activations before a product.
enum class Activations : uint8_t {
  float32,   // not at all
  bfloat16,  // for many rows of a bfloat16 weight (cpu/bfloat.h)
  int8,      // in groups, for affine weights of 4 or 8 bits (cpu/integers.h)
};

// x * P(X <= x) of a normal X: exactly, by a hyperbolic tangent of a cubic, or by a sigmoid.
enum class GeluKind : uint8_t { none, tanh, fast };

}  // namespace mlx_paged
