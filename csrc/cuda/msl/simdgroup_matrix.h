// Copyright © 2026 the mlx_paged authors. Apache-2.0.
//
// Metal's 8 x 8 matrices on the tensor cores of sm_80 and later: mma m16n8k8 with half of its 16
// rows empty. fp32 uses shuffles, because no such instruction keeps its precision.

#pragma once

#include "language.h"
#include "vector.h"

namespace metal {

template <typename T, int ROWS, int COLUMNS>
class simdgroup_matrix;

// Lane 4 * r + c (hardware numbering) holds (r, 2 c) and (r, 2 c + 1). As the right factor of a
// product a lane needs (2 c, r) and (2 c + 1, r) instead: a loaded matrix has both, and the
// compiler drops the unused one.
template <typename T>
class simdgroup_matrix<T, 8, 8> {
 public:
  METAL_FUNC simdgroup_matrix() : transposed_known_(false) {}
  METAL_FUNC explicit simdgroup_matrix(T value)
      : elements_{value, value}, transposed_{value, value}, transposed_known_(true) {}

  METAL_FUNC T (&thread_elements())[2] {
    transposed_known_ = false;
    return elements_;
  }

  METAL_FUNC static int row() { return (threadIdx.x & 31) / 4; }
  METAL_FUNC static int column() { return threadIdx.x % 4 * 2; }

  METAL_FUNC void load(const T* source, ulong pitch, bool transpose) {
    const T* along = source + row() * pitch + column();
    const T* across = source + column() * pitch + row();
    elements_[0] = transpose ? across[0] : along[0];
    elements_[1] = transpose ? across[pitch] : along[1];
    transposed_[0] = transpose ? along[0] : across[0];
    transposed_[1] = transpose ? along[1] : across[pitch];
    transposed_known_ = true;
  }

  METAL_FUNC void store(T* destination, ulong pitch) const {
    destination[row() * pitch + column()] = elements_[0];
    destination[row() * pitch + column() + 1] = elements_[1];
  }

  METAL_FUNC uint left() const { return pack(elements_); }

  METAL_FUNC uint right() const {
    if (transposed_known_) {
      return pack(transposed_);
    }
    uint to;
    asm("movmatrix.sync.aligned.m8n8.trans.b16 %0, %1;" : "=r"(to) : "r"(pack(elements_)));
    return to;
  }

 private:
  METAL_FUNC static uint pack(const T (&pair)[2]) {
    static_assert(sizeof(T) == 2);
    return as_type<uint>(Vector2<T>(pair[0], pair[1]));
  }

  T elements_[2];
  T transposed_[2];
  bool transposed_known_;
};

template <typename T, int ROWS, int COLUMNS>
METAL_FUNC simdgroup_matrix<T, ROWS, COLUMNS> make_filled_simdgroup_matrix(T value) {
  return simdgroup_matrix<T, ROWS, COLUMNS>(value);
}

template <typename T>
METAL_FUNC void simdgroup_load(
    simdgroup_matrix<T, 8, 8>& to, const T* source, ulong pitch, Vector2<ulong> = Vector2<ulong>(0),
    bool transpose = false) {
  to.load(source, pitch, transpose);
}

template <typename T>
METAL_FUNC void simdgroup_store(
    const simdgroup_matrix<T, 8, 8>& from, T* destination, ulong pitch) {
  from.store(destination, pitch);
}

METAL_FUNC void multiply(float (&sum)[4], uint left, uint right, half) {
  asm("mma.sync.aligned.m16n8k8.row.col.f32.f16.f16.f32 "
      "{%0, %1, %2, %3}, {%4, %5}, {%6}, {%0, %1, %2, %3};"
      : "+f"(sum[0]), "+f"(sum[1]), "+f"(sum[2]), "+f"(sum[3])
      : "r"(left), "r"(0), "r"(right));
}

METAL_FUNC void multiply(float (&sum)[4], uint left, uint right, bfloat) {
  asm("mma.sync.aligned.m16n8k8.row.col.f32.bf16.bf16.f32 "
      "{%0, %1, %2, %3}, {%4, %5}, {%6}, {%0, %1, %2, %3};"
      : "+f"(sum[0]), "+f"(sum[1]), "+f"(sum[2]), "+f"(sum[3])
      : "r"(left), "r"(0), "r"(right));
}

template <typename T>
METAL_FUNC void simdgroup_multiply_accumulate(
    simdgroup_matrix<float, 8, 8>& result, simdgroup_matrix<T, 8, 8>& a,
    simdgroup_matrix<T, 8, 8>& b, simdgroup_matrix<float, 8, 8>& c) {
  float sum[4] = {c.thread_elements()[0], c.thread_elements()[1], 0.0f, 0.0f};
  multiply(sum, a.left(), b.right(), T(0.0f));
  result.thread_elements()[0] = sum[0];
  result.thread_elements()[1] = sum[1];
}

METAL_FUNC void simdgroup_multiply_accumulate(
    simdgroup_matrix<float, 8, 8>& result, simdgroup_matrix<float, 8, 8>& a,
    simdgroup_matrix<float, 8, 8>& b, simdgroup_matrix<float, 8, 8>& c) {
  int lane = threadIdx.x & 31;
  float sum[2] = {c.thread_elements()[0], c.thread_elements()[1]};
  PAGED_UNROLL
  for (int k = 0; k < 8; k++) {
    float left = __shfl_sync(0xffffffffu, a.thread_elements()[k % 2], (lane & 28) + k / 2);
    PAGED_UNROLL
    for (int e = 0; e < 2; e++) {
      float right = __shfl_sync(0xffffffffu, b.thread_elements()[e], 4 * k + lane % 4);
      sum[e] = fmaf(left, right, sum[e]);
    }
  }
  result.thread_elements()[0] = sum[0];
  result.thread_elements()[1] = sum[1];
}

}  // namespace metal
