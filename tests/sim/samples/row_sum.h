#pragma once
#include <metal_stdlib>

using namespace metal;

struct RowSumParams {
  int columns;
  float scale;
};

// Sum of what lies in threadgroup memory, one value a SIMD-group.
METAL_FUNC float sum_of_groups(threadgroup const float* partial, int count) {
  float total = 0.0f;
  for (int i = 0; i < count; i++) {
    total += partial[i];
  }
  return total;
}
