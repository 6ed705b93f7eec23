// Copyright © 2026 the mlx_paged authors. Apache-2.0.

#pragma once

#include <cmath>
#include <cstdint>

namespace mlx_paged::cpu {

// Writes the cosines and sines of position * scale * inv_freqs to rotations [2, half_dims].
inline void rotate(
    int32_t position, float scale, const float* inv_freqs, int half_dims, float* rotations) {
  float scaled = float(position) * scale;
  for (int i = 0; i < half_dims; i++) {
    float angle = scaled * inv_freqs[i];
    rotations[i] = float(std::cos(double(angle)));
    rotations[half_dims + i] = float(std::sin(double(angle)));
  }
}

}  // namespace mlx_paged::cpu
