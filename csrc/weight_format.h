// Copyright © 2026 the mlx_paged authors. Apache-2.0.
//
// Formats of weights and activations that nodes name and backends implement.

#pragma once

#include <cstdint>

namespace mlx_paged {

enum class WeightFormat : uint8_t {
  dense,
  affine,  // q * scale + bias, q unsigned of `bits` bits; scales and biases of the layer's dtype
  mxfp4,   // E2M1 * 2^(scale - 127)
  mxfp8,   // E4M3 * 2^(scale - 127)
  nvfp4,   // E2M1 * scale, with an E4M3 scale
};

// As mx.quantize calls its modes; "dense" without one.
constexpr const char* name_of(WeightFormat format) {
  switch (format) {
    case WeightFormat::affine:
      return "affine";
    case WeightFormat::mxfp4:
      return "mxfp4";
    case WeightFormat::mxfp8:
      return "mxfp8";
    case WeightFormat::nvfp4:
      return "nvfp4";
    case WeightFormat::dense:
      break;
  }
  return "dense";
}

// Storage of a weight: packed by mx.quantize, or dense.
struct WeightCodes {
  WeightFormat format;
  int bits;
  int group_size;

  bool operator==(const WeightCodes&) const = default;
};
constexpr WeightCodes kDenseWeight{WeightFormat::dense, 0, 0};

// Rounding of activations before a product on the CPU.
enum class Activations : uint8_t {
  float32,   // none
  bfloat16,  // for many rows of a bfloat16 weight (cpu/bfloat.h)
  int8,      // in groups, for affine weights of 4 or 8 bits (cpu/integers.h)
};

// Variants of x * P(X <= x) for a normal X: exact, a tanh of a cubic, a sigmoid.
enum class GeluKind : uint8_t { none, tanh, fast };

}  // namespace mlx_paged
