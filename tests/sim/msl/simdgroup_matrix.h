// <metal_simdgroup_matrix>: an 8 x 8 matrix held by a SIMD-group, two elements of a row a lane, in
// the layout of Apple's hardware.
#pragma once
#include "simd.h"

namespace metal {

template <class T, int Columns, int Rows>
struct simdgroup_matrix {
  static_assert(Columns == 8 && Rows == 8, "simdgroup_matrix is 8 x 8");
  static_assert(is_floating_point_v<T>, "simdgroup_matrix of half, bfloat or float");
  vec<T, 2> __elements;
  simdgroup_matrix() = default;
  // The diagonal matrix.
  __MSL_INLINE explicit simdgroup_matrix(T diagonal);
  __MSL_INLINE __private vec<T, 2>& thread_elements() __private { return __elements; }
};

// The first element of a lane; the second is one column to the right.
__MSL_INLINE uint __matrix_row() {
  uint lane = __sim_lane();
  return ((lane >> 4) & 1) * 4 + ((lane >> 1) & 3);
}
__MSL_INLINE uint __matrix_column() {
  uint lane = __sim_lane();
  return ((lane >> 3) & 1) * 4 + (lane & 1) * 2;
}
__MSL_INLINE constexpr uint __matrix_lane(uint row, uint column) {
  return (row & 4) << 2 | (column & 4) << 1 | (row & 3) << 1 | (column & 2) >> 1;
}

template <class T, int C, int R>
__MSL_INLINE simdgroup_matrix<T, C, R>::simdgroup_matrix(T diagonal)
    : __elements(
          T(__matrix_row() == __matrix_column() ? float(diagonal) : 0.0f),
          T(__matrix_row() == __matrix_column() + 1 ? float(diagonal) : 0.0f)) {}

template <class T, int C, int R>
__MSL_INLINE simdgroup_matrix<T, C, R> make_filled_simdgroup_matrix(T value) {
  simdgroup_matrix<T, C, R> m;
  m.__elements = vec<T, 2>(value, value);
  return m;
}
template <class T, int C, int R = C>
__MSL_INLINE simdgroup_matrix<T, C, R> make_diagonal_simdgroup_matrix(T value) {
  return simdgroup_matrix<T, C, R>(value);
}

// Returns the offset in memory of a lane's element i.
__MSL_INLINE ulong __matrix_offset(uint i, ulong stride, vec<ulong, 2> origin, bool transpose) {
  ulong row = __matrix_row(), column = __matrix_column() + i;
  return transpose ? (origin.y + column) * stride + origin.x + row
                   : (origin.y + row) * stride + origin.x + column;
}
__MSL_INLINE void __matrix_wait() {
  char nothing = 0;
  __sim_gather((const __private void*)&nothing, 1, 32, 1, __MSL_SITE);
}
#define __MSL_MATRIX_LOAD(space)                                                                 \
  template <class T, int C, int R>                                                               \
  __MSL_INLINE void simdgroup_load(                                                              \
      __private simdgroup_matrix<T, C, R>& d, const space T* source, ulong elements_per_row = C, \
      vec<ulong, 2> matrix_origin = vec<ulong, 2>(0), bool transpose_matrix = false) {           \
    __matrix_wait();                                                                             \
    d.__elements.x =                                                                             \
        source[__matrix_offset(0, elements_per_row, matrix_origin, transpose_matrix)];           \
    d.__elements.y =                                                                             \
        source[__matrix_offset(1, elements_per_row, matrix_origin, transpose_matrix)];           \
  }
#define __MSL_MATRIX_STORE(space)                                                        \
  template <class T, int C, int R>                                                       \
  __MSL_INLINE void simdgroup_store(                                                     \
      simdgroup_matrix<T, C, R> a, space T* destination, ulong elements_per_row = C,     \
      vec<ulong, 2> matrix_origin = vec<ulong, 2>(0), bool transpose_matrix = false) {   \
    __matrix_wait();                                                                     \
    destination[__matrix_offset(0, elements_per_row, matrix_origin, transpose_matrix)] = \
        a.__elements.x;                                                                  \
    destination[__matrix_offset(1, elements_per_row, matrix_origin, transpose_matrix)] = \
        a.__elements.y;                                                                  \
  }
__MSL_MATRIX_LOAD(__MSL_DEVICE)
__MSL_MATRIX_LOAD(__attribute__((opencl_global_host)))
__MSL_MATRIX_LOAD(__local)
__MSL_MATRIX_STORE(__MSL_DEVICE)
__MSL_MATRIX_STORE(__local)

// d = a b + c, accumulated in float and rounded once to d's type.
template <class D, class A, class B, class E>
__MSL_INLINE void simdgroup_multiply_accumulate(
    __private simdgroup_matrix<D, 8, 8>& d, simdgroup_matrix<A, 8, 8> a,
    simdgroup_matrix<B, 8, 8> b, simdgroup_matrix<E, 8, 8> c) {
  float mine[4] = {
      float(a.__elements.x), float(a.__elements.y), float(b.__elements.x), float(b.__elements.y)};
  const __private float* slots = (const __private float*)__sim_gather(
      (const __private void*)mine, sizeof(mine), 32, 1, __MSL_SITE);
  uint row = __matrix_row(), column = __matrix_column();
  float x = float(c.__elements.x), y = float(c.__elements.y);
  for (uint k = 0; k < 8; k++) {
    float left = slots[16 * __matrix_lane(row, k) + (k & 1)];
    const __private float* right = slots + 16 * __matrix_lane(k, column) + 2;
    x = __builtin_fmaf(left, right[0], x);
    y = __builtin_fmaf(left, right[1], y);
  }
  d.__elements = vec<D, 2>(D(x), D(y));
}
template <class D, class A, class B>
__MSL_INLINE void simdgroup_multiply(
    __private simdgroup_matrix<D, 8, 8>& d, simdgroup_matrix<A, 8, 8> a,
    simdgroup_matrix<B, 8, 8> b) {
  simdgroup_multiply_accumulate(d, a, b, make_filled_simdgroup_matrix<D, 8, 8>(D(0.0f)));
}

}  // namespace metal

using simdgroup_float8x8 = metal::simdgroup_matrix<float, 8, 8>;
using simdgroup_half8x8 = metal::simdgroup_matrix<half, 8, 8>;
using simdgroup_bfloat8x8 = metal::simdgroup_matrix<bfloat, 8, 8>;
