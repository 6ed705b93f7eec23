// <metal_tensor>, <metal_cooperative_tensor> and Metal Performance Primitives, as far as products
// of matrices need them: matrices in memory, matrices that the lanes of SIMD-groups hold, and
// matmul2d. Coordinates are (x, y): column and row.
//
// The implementation chooses which lane holds which element. MSL_TENSOR_LAYOUT selects it: 0 is the
// layout that MLX's kernels assume; 1 is another, with one invalid element per lane.
// Elements are in blocks of 16 x 16, eight per lane.
#pragma once
#include "array.h"
#include "simd.h"

#ifndef MSL_TENSOR_LAYOUT
#define MSL_TENSOR_LAYOUT 0
#endif
#define __MSL_SIMDGROUP_INDEX 8  // in GRID_ATTRIBUTES of kernels.py

// Apple's internals that MLX's kernels use.
template <class T>
__MSL_INLINE T __metal_get_thread_index_in_simdgroup(T) {
  return T(__sim_lane());
}

namespace metal {

// --- Vectors of any length, which are internals too

template <class T, int N>
struct alignas(N * sizeof(T)) vec {
  T __elements[N];
  vec() = default;
  __MSL_INLINE constexpr vec(T s) : __elements() {
    for (int i = 0; i < N; i++) __elements[i] = s;
  }
  __MSL_INLINE constexpr T operator[](long i) const { return __elements[i]; }
  __MSL_INLINE T& operator[](long i) { return __elements[i]; }
};

// --- Tensors in memory

constexpr const ulong dynamic_extent = ~0ul;

template <class Index, ulong Columns, ulong Rows>
struct extents {
  Index __columns, __rows;
  __MSL_INLINE constexpr extents() : __columns(Index(Columns)), __rows(Index(Rows)) {}
  __MSL_INLINE constexpr extents(Index columns, Index rows)
      : __columns(Columns == dynamic_extent ? columns : Index(Columns)),
        __rows(Rows == dynamic_extent ? rows : Index(Rows)) {}
  __MSL_INLINE constexpr Index extent(ulong rank) const { return rank == 0 ? __columns : __rows; }
};
template <class Index, ulong Rank>
struct __dynamic_extents {
  static_assert(Rank == 2, "the simulator knows tensors of rank 2");
  using type = extents<Index, dynamic_extent, dynamic_extent>;
};
template <class Index, ulong Rank>
using dextents = typename __dynamic_extents<Index, Rank>::type;

struct tensor_handle {};
struct tensor_offset {};
struct tensor_inline {};

template <class T, class Extents, class Descriptor = tensor_handle, class... Tags>
struct tensor {
  static_assert(__is_same(Descriptor, tensor_inline), "the simulator knows tensor_inline only");
  using element_type = T;
  using value_type = remove_cv_t<T>;

  T* __data;
  Extents __extents;
  long __stride;  // elements between rows
  // The first column and row that exist, relative to __data: a slice checks bounds against the
  // whole tensor.
  int __first_column, __first_row;

  __MSL_INLINE tensor(T* data, Extents e) : tensor(data, e, array<int, 2>{{1, int(e.__columns)}}) {}
  __MSL_INLINE tensor(T* data, Extents e, array<int, 2> strides)
      : __data(data), __extents(e), __stride(strides[1]), __first_column(0), __first_row(0) {
    // Unit stride along columns is what products of the simulator can read.
    if (strides[0] != 1) __sim_bad_lane(-1, __MSL_SITE);
  }
  __MSL_INLINE Extents extents() const { return __extents; }

  // A view whose (0, 0) is (column, row) of this one.
  __MSL_INLINE auto slice(int column, int row) const {
    using Other = dextents<int, 2>;
    tensor<T, Other, tensor_inline> view(
        __data + row * __stride + column,
        Other(int(__extents.__columns) - column, int(__extents.__rows) - row),
        array<int, 2>{{1, int(__stride)}});
    view.__first_column = __first_column - column;
    view.__first_row = __first_row - row;
    return view;
  }
  template <ulong Columns, ulong Rows>
  __MSL_INLINE auto slice(int column, int row) const {
    using Other = metal::extents<int, Columns, Rows>;
    tensor<T, Other, tensor_inline> view(
        __data + row * __stride + column,
        Other(int(__extents.__columns) - column, int(__extents.__rows) - row),
        array<int, 2>{{1, int(__stride)}});
    view.__first_column = __first_column - column;
    view.__first_row = __first_row - row;
    return view;
  }
  template <ulong Columns, ulong Rows>
  __MSL_INLINE auto static_slice(int column, int row) const {
    return slice<Columns, Rows>(column, row);
  }

  // Elements outside are zero and are not written.
  __MSL_INLINE bool __exists(int column, int row) const {
    return column >= __first_column && row >= __first_row && column < int(__extents.__columns) &&
           row < int(__extents.__rows);
  }
  __MSL_INLINE value_type __load(int column, int row) const {
    return __exists(column, row) ? value_type(__data[row * __stride + column]) : value_type(0);
  }
  __MSL_INLINE void __store(int column, int row, value_type value) const {
    if (__exists(column, row)) __data[row * __stride + column] = value;
  }
};

template <class T, class Extents>
tensor(T*, Extents) -> tensor<T, Extents, tensor_inline>;
template <class T, class Extents>
tensor(T*, Extents, array<int, 2>) -> tensor<T, Extents, tensor_inline>;

// --- Execution scopes

template <ulong Size>
struct execution_simdgroups {
  static constexpr const ulong static_size = Size;
};
using execution_simdgroup = execution_simdgroups<1>;

// --- Tensors that lanes hold

// Element e of a lane's eight in a block.
struct __place {
  int row, column;
};
__MSL_INLINE constexpr __place __place_in_block(uint lane, uint e) {
#if MSL_TENSOR_LAYOUT == 0
  return {
      int(((lane >> 2) & 4) | ((lane >> 1) & 3)) + int(e >> 2) * 8,
      int(((lane >> 2) & 2) | (lane & 1)) * 4 + int(e & 3)};
#else
  return {int(2 * ((e * 3) & 7) + (lane >> 4)), int(lane & 15)};
#endif
}
// The inverse: 8 * lane + e.
__MSL_INLINE constexpr uint __slot_in_block(uint row, uint column) {
#if MSL_TENSOR_LAYOUT == 0
  uint lane = (row & 4) << 2 | (row & 3) << 1 | (column & 8) | ((column >> 2) & 1);
  return 8 * lane + (row >> 3) * 4 + (column & 3);
#else
  return 8 * (column + 16 * (row & 1)) + (((row >> 1) * 3) & 7);
#endif
}

__MSL_INLINE void __tensor_wait() {
  char nothing = 0;
  __sim_gather((const __private void*)&nothing, 1, 32, 0, __MSL_SITE);
}

// Size: the SIMD-groups that share it, block after block.
template <int Size>
struct __blocks {};

template <class T, class Extents, class Layout>
struct cooperative_tensor;
template <class T, class Index, ulong Columns, ulong Rows, int Size>
struct cooperative_tensor<T, extents<Index, Columns, Rows>, __blocks<Size>> {
  static_assert(Columns % 16 == 0 && Rows % 16 == 0, "the simulator knows multiples of 16");
  static constexpr const int __across = int(Columns / 16);
  static constexpr const int __num_blocks = int(Columns / 16 * (Rows / 16)) / Size;
  static_assert(
      int(Columns / 16 * (Rows / 16)) % Size == 0, "SIMD-groups have the same number of blocks");
  static constexpr const int __capacity = 8 * __num_blocks + (MSL_TENSOR_LAYOUT != 0);
  using element_type = T;
  using value_type = T;

  T __elements[__capacity];

  __MSL_INLINE constexpr uint16_t get_capacity() const { return uint16_t(__capacity); }
  __MSL_INLINE constexpr bool is_valid_element(uint16_t i) const { return i < 8 * __num_blocks; }
  __MSL_INLINE constexpr bool get_mask(uint16_t i) const { return is_valid_element(i); }
  __MSL_INLINE T& operator[](uint16_t i) { return __elements[i]; }
  __MSL_INLINE const T& operator[](uint16_t i) const { return __elements[i]; }

  // Row and column of the first element of block b of this SIMD-group.
  __MSL_INLINE static __place __block(int b) {
    if (Size > 1) b = b * Size + int(__sim_attribute(__MSL_SIMDGROUP_INDEX, 0));
    return {b / __across * 16, b % __across * 16};
  }
  __MSL_INLINE array<Index, 2> get_multidimensional_index(uint16_t i) const {
    __place block = __block(i / 8), in = __place_in_block(__sim_lane(), i % 8);
    return array<Index, 2>{{Index(block.column + in.column), Index(block.row + in.row)}};
  }

  template <class Tensor>
  __MSL_INLINE void load(const Tensor& from) {
    __tensor_wait();
    for (uint16_t i = 0; i < 8 * __num_blocks; i++) {
      auto at = get_multidimensional_index(i);
      __elements[i] = T(from.__load(int(at[0]), int(at[1])));
    }
  }
  template <class Tensor>
  __MSL_INLINE void store(const Tensor& to) const {
    __tensor_wait();
    for (uint16_t i = 0; i < 8 * __num_blocks; i++) {
      auto at = get_multidimensional_index(i);
      to.__store(int(at[0]), int(at[1]), typename Tensor::value_type(__elements[i]));
    }
  }
};

}  // namespace metal

// --- Products

namespace mpp {
namespace tensor_ops {

struct matmul2d_descriptor {
  enum class mode { multiply, multiply_accumulate };

  int m, n, k;
  bool transpose_left, transpose_right, relaxed_precision;
  mode matmul_mode;

  __MSL_INLINE constexpr matmul2d_descriptor(
      int m_, int n_, int k_ = -1, bool transpose_left_ = false, bool transpose_right_ = false,
      bool relaxed_precision_ = false, mode mode_ = mode::multiply)
      : m(m_),
        n(n_),
        k(k_),
        transpose_left(transpose_left_),
        transpose_right(transpose_right_),
        relaxed_precision(relaxed_precision_),
        matmul_mode(mode_) {}

  // As a template argument: of a class it would need C++20, which the dialect is not.
  __MSL_INLINE constexpr operator ulong() const {
    return ulong(ushort(m)) | ulong(ushort(n)) << 16 | ulong(ushort(k)) << 32 |
           ulong(transpose_left) << 48 | ulong(transpose_right) << 49 |
           ulong(relaxed_precision) << 50 | ulong(matmul_mode == mode::multiply_accumulate) << 51;
  }
};

template <class T>
constexpr const bool __is_cooperative = false;
template <class T, class E, class L>
constexpr const bool __is_cooperative<metal::cooperative_tensor<T, E, L>> = true;

template <class T>
using __plain = metal::remove_addrspace_t<metal::remove_reference_t<T>>;

// Returns a lane's elements of a 16 x 16 block of an operand.
template <class Acc, class T, class E, class L>
__MSL_INLINE Acc
__element_of(const metal::cooperative_tensor<T, E, L>& a, metal::__place block, int e) {
  using Operand = metal::cooperative_tensor<T, E, L>;
  return Acc(a.__elements[8 * (block.row / 16 * Operand::__across + block.column / 16) + e]);
}
template <class Acc, class T, class E, class D>
__MSL_INLINE Acc __element_of(const metal::tensor<T, E, D>& a, metal::__place block, int e) {
  metal::__place in = metal::__place_in_block(__sim_lane(), e);
  return Acc(a.__load(block.column + in.column, block.row + in.row));
}

template <ulong Descriptor, class Scope, class... Args>
class matmul2d {
  static constexpr const int __m = int(Descriptor & 0xffff), __n = int(Descriptor >> 16 & 0xffff);
  static constexpr const int __k = short(Descriptor >> 32 & 0xffff);
  static constexpr const bool __transpose_left = Descriptor >> 48 & 1;
  static constexpr const bool __transpose_right = Descriptor >> 49 & 1;
  static constexpr const bool __accumulates = Descriptor >> 51 & 1;
  static constexpr const int __size = int(Scope::static_size);
  static_assert(__m % 16 == 0 && __n % 16 == 0, "the simulator knows multiples of 16");

  template <class T, int Rows, int Columns, int Size>
  using __tensor = metal::cooperative_tensor<
      T, metal::extents<int, ulong(Columns), ulong(Rows)>, metal::__blocks<Size>>;

 public:
  using scope = Scope;

  template <class Left, class Right, class Element, class Coordinate = int>
  using cooperative_tensor_left_input_t =
      __tensor<Left, __transpose_left ? __k : __m, __transpose_left ? __m : __k, 1>;
  template <class Left, class Right, class Element, class Coordinate = int>
  using cooperative_tensor_right_input_t =
      __tensor<Right, __transpose_right ? __n : __k, __transpose_right ? __k : __n, 1>;
  template <class Left, class Right, class Element, class Coordinate = int>
  using cooperative_tensor_destination_t = __tensor<Element, __m, __n, __size>;

  template <class Left, class Right, class Element, class Coordinate = int>
  __MSL_INLINE auto get_left_input_cooperative_tensor() const {
    static_assert(__size == 1 && __k > 0, "inputs of lanes need one SIMD-group and a static k");
    static_assert(__m == 32 || __n == 32 || __k == 32, "one of m, n and k must be 32");
    cooperative_tensor_left_input_t<Left, Right, Element> made;  // uninitialised
    return made;
  }
  template <class Left, class Right, class Element, class Coordinate = int>
  __MSL_INLINE auto get_right_input_cooperative_tensor() const {
    static_assert(__size == 1 && __k > 0, "inputs of lanes need one SIMD-group and a static k");
    static_assert(__m == 32 || __n == 32 || __k == 32, "one of m, n and k must be 32");
    cooperative_tensor_right_input_t<Left, Right, Element> made;  // uninitialised
    return made;
  }
  template <class Left, class Right, class Element, class Coordinate = int>
  __MSL_INLINE auto get_destination_cooperative_tensor() const {
    cooperative_tensor_destination_t<Left, Right, Element> made;  // uninitialised
    return made;
  }

  // Sums are fp32, or int32 of whole numbers, in the order of k.
  template <class Left, class Right, class T, class E, class L>
  __MSL_INLINE void run(
      Left& left, Right& right, metal::cooperative_tensor<T, E, L>& destination) const {
    using Acc = metal::conditional_t<metal::is_integral_v<T>, int, float>;
    using Destination = metal::cooperative_tensor<T, E, L>;
    constexpr int BLOCKS = Destination::__num_blocks;
    if (__size > 1) __sim_barrier(0, __MSL_SITE);  // every SIMD-group of the scope enters
    Acc sums[8 * BLOCKS];
    for (int i = 0; i < 8 * BLOCKS; i++) {
      sums[i] = __accumulates ? Acc(destination.__elements[i]) : Acc(0);
    }
    int k = __k;
    if constexpr (!__is_cooperative<__plain<Left>>) {
      if (__k < 0) k = int(left.__extents.extent(__transpose_left ? 1 : 0));
    }
    Acc mine[16];
    for (int from = 0; from < k; from += 16) {
      int row = -1;
      for (int b = 0; b < BLOCKS; b++) {
        metal::__place to = Destination::__block(b);
        if (to.row != row) {  // its elements of the left block serve a row of blocks
          row = to.row;
          metal::__place at = {__transpose_left ? from : row, __transpose_left ? row : from};
          for (int e = 0; e < 8; e++) mine[e] = __element_of<Acc>(left, at, e);
        }
        metal::__place at = {
            __transpose_right ? to.column : from, __transpose_right ? from : to.column};
        for (int e = 0; e < 8; e++) mine[8 + e] = __element_of<Acc>(right, at, e);
        const __private Acc* all = (const __private Acc*)__sim_gather(
            (const __private void*)mine, sizeof(mine), 32, 1, __MSL_SITE);
        for (int e = 0; e < 8; e++) {
          metal::__place in = metal::__place_in_block(__sim_lane(), e);
          Acc sum = sums[8 * b + e];
          for (int i = 0; i < 16 && from + i < k; i++) {
            uint l = __transpose_left ? metal::__slot_in_block(i, in.row)
                                      : metal::__slot_in_block(in.row, i);
            uint r = __transpose_right ? metal::__slot_in_block(in.column, i)
                                       : metal::__slot_in_block(i, in.column);
            sum += all[16 * (l / 8) + l % 8] * all[16 * (r / 8) + 8 + r % 8];
          }
          sums[8 * b + e] = sum;
        }
      }
    }
    for (int i = 0; i < 8 * BLOCKS; i++) destination.__elements[i] = T(sums[i]);
  }

  template <class Left, class Right, class T, class E, class D>
  __MSL_INLINE void run(Left& left, Right& right, metal::tensor<T, E, D>& destination) const {
    using Value = metal::remove_cv_t<T>;
    auto held = get_destination_cooperative_tensor<Left, Right, Value>();
    if constexpr (__accumulates) held.load(destination);
    run(left, right, held);
    held.store(destination);
  }
};

}  // namespace tensor_ops
}  // namespace mpp
