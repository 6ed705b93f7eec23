// vec<T, N>, packed vectors, swizzles.
#pragma once
#include "bfloat.h"

// The swizzles that the kernels use, as M2(get, xy, x, y) and so on; the translator writes them.
#ifndef MSL_SWIZZLES_2
#define MSL_SWIZZLES_2(M2, M3, M4)
#define MSL_SWIZZLES_3(M2, M3, M4)
#define MSL_SWIZZLES_4(M2, M3, M4)
#endif

namespace metal {

template <class T, int N>
struct vec;
template <class T, int N>
struct packed_vec;

template <class T>
constexpr const bool __is_vec = false;
template <class T, int N>
constexpr const bool __is_vec<vec<T, N>> = true;
template <class T>
struct __element {
  using type = T;
};
template <class T, int N>
struct __element<vec<T, N>> {
  using type = T;
};

// A swizzle is a property: no storage, read and written through functions, whose types count.
#define __MSL_SWIZZLE(n, name, value, assign)                          \
  __declspec(property(get = __get_##name, put = __put_##name)) T name; \
  __MSL_INLINE constexpr vec<T, n> __get_##name() const {              \
    return value;                                                      \
  }                                                                    \
  __MSL_INLINE void __put_##name(vec<T, n> v) {                        \
    assign;                                                            \
  }
#define __MSL_VEC(n) vec<T, n>
#define __MSL_SWIZZLE2(name, a, b) __MSL_SWIZZLE(2, name, __MSL_VEC(2)(a, b), a = v.x; b = v.y)
#define __MSL_SWIZZLE3(name, a, b, c) \
  __MSL_SWIZZLE(3, name, __MSL_VEC(3)(a, b, c), a = v.x; b = v.y; c = v.z)
#define __MSL_SWIZZLE4(name, a, b, c, d) \
  __MSL_SWIZZLE(4, name, __MSL_VEC(4)(a, b, c, d), a = v.x; b = v.y; c = v.z; d = v.w)

#define __MSL_ELEMENTS                                \
  __MSL_INLINE constexpr T operator[](long i) const { \
    return (&x)[i];                                   \
  }                                                   \
  __MSL_INLINE T& operator[](long i) {                \
    return (&x)[i];                                   \
  }

template <class T>
struct alignas(2 * sizeof(T)) vec<T, 2> {
  union {
    T x, r;
  };
  union {
    T y, g;
  };
  vec() = default;
  __MSL_INLINE constexpr vec(T s) : x(s), y(s) {}
  __MSL_INLINE constexpr vec(T a, T b) : x(a), y(b) {}
  template <class U>
  __MSL_INLINE constexpr explicit vec(vec<U, 2> v) : x(T(v.x)), y(T(v.y)) {}
  __MSL_INLINE constexpr vec(packed_vec<T, 2> v);
  __MSL_ELEMENTS
  MSL_SWIZZLES_2(__MSL_SWIZZLE2, __MSL_SWIZZLE3, __MSL_SWIZZLE4)
};

template <class T>
struct alignas(4 * sizeof(T)) vec<T, 3> {
  union {
    T x, r;
  };
  union {
    T y, g;
  };
  union {
    T z, b;
  };
  vec() = default;
  __MSL_INLINE constexpr vec(T s) : x(s), y(s), z(s) {}
  __MSL_INLINE constexpr vec(T a, T b, T c) : x(a), y(b), z(c) {}
  __MSL_INLINE constexpr vec(vec<T, 2> v, T c) : x(v.x), y(v.y), z(c) {}
  __MSL_INLINE constexpr vec(T a, vec<T, 2> v) : x(a), y(v.x), z(v.y) {}
  template <class U>
  __MSL_INLINE constexpr explicit vec(vec<U, 3> v) : x(T(v.x)), y(T(v.y)), z(T(v.z)) {}
  __MSL_INLINE constexpr vec(packed_vec<T, 3> v);
  __MSL_ELEMENTS
  MSL_SWIZZLES_3(__MSL_SWIZZLE2, __MSL_SWIZZLE3, __MSL_SWIZZLE4)
};

template <class T>
struct alignas(4 * sizeof(T)) vec<T, 4> {
  union {
    T x, r;
  };
  union {
    T y, g;
  };
  union {
    T z, b;
  };
  union {
    T w, a;
  };
  vec() = default;
  __MSL_INLINE constexpr vec(T s) : x(s), y(s), z(s), w(s) {}
  __MSL_INLINE constexpr vec(T a, T b, T c, T d) : x(a), y(b), z(c), w(d) {}
  __MSL_INLINE constexpr vec(T a, T b, T c) : x(a), y(b), z(c), w(0) {}  // as a list: {a, b, c}
  __MSL_INLINE constexpr vec(vec<T, 2> u, vec<T, 2> v) : x(u.x), y(u.y), z(v.x), w(v.y) {}
  __MSL_INLINE constexpr vec(vec<T, 2> v, T c, T d) : x(v.x), y(v.y), z(c), w(d) {}
  __MSL_INLINE constexpr vec(T a, vec<T, 2> v, T d) : x(a), y(v.x), z(v.y), w(d) {}
  __MSL_INLINE constexpr vec(T a, T b, vec<T, 2> v) : x(a), y(b), z(v.x), w(v.y) {}
  __MSL_INLINE constexpr vec(vec<T, 3> v, T d) : x(v.x), y(v.y), z(v.z), w(d) {}
  __MSL_INLINE constexpr vec(T a, vec<T, 3> v) : x(a), y(v.x), z(v.y), w(v.z) {}
  template <class U>
  __MSL_INLINE constexpr explicit vec(vec<U, 4> v) : x(T(v.x)), y(T(v.y)), z(T(v.z)), w(T(v.w)) {}
  __MSL_INLINE constexpr vec(packed_vec<T, 4> v);
  __MSL_ELEMENTS
  MSL_SWIZZLES_4(__MSL_SWIZZLE2, __MSL_SWIZZLE3, __MSL_SWIZZLE4)
};

// Elements one after another, aligned like one element.
#define __MSL_PACKED(n, fields, init, back)                  \
  template <class T>                                         \
  struct packed_vec<T, n> {                                  \
    T fields;                                                \
    packed_vec() = default;                                  \
    __MSL_INLINE constexpr packed_vec(vec<T, n> v) : init {} \
    __MSL_ELEMENTS                                           \
  };                                                         \
  template <class T>                                         \
  __MSL_INLINE constexpr vec<T, n>::vec(packed_vec<T, n> v) : back {}
#define __MSL_LIST(...) __VA_ARGS__
__MSL_PACKED(2, __MSL_LIST(x, y), __MSL_LIST(x(v.x), y(v.y)), __MSL_LIST(x(v.x), y(v.y)))
__MSL_PACKED(
    3, __MSL_LIST(x, y, z), __MSL_LIST(x(v.x), y(v.y), z(v.z)), __MSL_LIST(x(v.x), y(v.y), z(v.z)))
__MSL_PACKED(
    4, __MSL_LIST(x, y, z, w), __MSL_LIST(x(v.x), y(v.y), z(v.z), w(v.w)),
    __MSL_LIST(x(v.x), y(v.y), z(v.z), w(v.w)))

#define __MSL_VEC_OP(op)                                                               \
  template <class T, int N>                                                            \
  __MSL_INLINE constexpr vec<T, N> operator op(vec<T, N> a, vec<T, N> b) {             \
    vec<T, N> r = a;                                                                   \
    for (int i = 0; i < N; i++) (&r.x)[i] = T((&a.x)[i] op(&b.x)[i]);                  \
    return r;                                                                          \
  }                                                                                    \
  template <class T, int N>                                                            \
  __MSL_INLINE constexpr vec<T, N> operator op(vec<T, N> a, __identity_t<T> b) {       \
    return a op vec<T, N>(b);                                                          \
  }                                                                                    \
  template <class T, int N>                                                            \
  __MSL_INLINE constexpr vec<T, N> operator op(__identity_t<T> a, vec<T, N> b) {       \
    return vec<T, N>(a) op b;                                                          \
  }                                                                                    \
  template <class T, int N>                                                            \
  __MSL_INLINE vec<T, N>& operator op## = (vec<T, N> & a, __identity_t<vec<T, N>> b) { \
    a = vec<T, N>(a) op b;                                                             \
    return a;                                                                          \
  }
__MSL_VEC_OP(+)
__MSL_VEC_OP(-)
__MSL_VEC_OP(*)
__MSL_VEC_OP(/)
__MSL_VEC_OP(%)
__MSL_VEC_OP(&)
__MSL_VEC_OP(|)
__MSL_VEC_OP(^)
__MSL_VEC_OP(<<)
__MSL_VEC_OP(>>)
#undef __MSL_VEC_OP

#define __MSL_VEC_COMPARE(op)                                                       \
  template <class T, int N>                                                         \
  __MSL_INLINE constexpr vec<bool, N> operator op(vec<T, N> a, vec<T, N> b) {       \
    vec<bool, N> r(false);                                                          \
    for (int i = 0; i < N; i++) (&r.x)[i] = (&a.x)[i] op(&b.x)[i];                  \
    return r;                                                                       \
  }                                                                                 \
  template <class T, int N>                                                         \
  __MSL_INLINE constexpr vec<bool, N> operator op(vec<T, N> a, __identity_t<T> b) { \
    return a op vec<T, N>(b);                                                       \
  }                                                                                 \
  template <class T, int N>                                                         \
  __MSL_INLINE constexpr vec<bool, N> operator op(__identity_t<T> a, vec<T, N> b) { \
    return vec<T, N>(a) op b;                                                       \
  }
__MSL_VEC_COMPARE(==)
__MSL_VEC_COMPARE(!=)
__MSL_VEC_COMPARE(<)
__MSL_VEC_COMPARE(>)
__MSL_VEC_COMPARE(<=)
__MSL_VEC_COMPARE(>=)
__MSL_VEC_COMPARE(&&)
__MSL_VEC_COMPARE(||)
#undef __MSL_VEC_COMPARE

#define __MSL_VEC_UNARY(op, R)                                \
  template <class T, int N>                                   \
  __MSL_INLINE constexpr vec<R, N> operator op(vec<T, N> a) { \
    vec<R, N> r(R(0));                                        \
    for (int i = 0; i < N; i++) (&r.x)[i] = R(op(&a.x)[i]);   \
    return r;                                                 \
  }
__MSL_VEC_UNARY(-, T)
__MSL_VEC_UNARY(~, T)
__MSL_VEC_UNARY(!, bool)
#undef __MSL_VEC_UNARY

}  // namespace metal

#define __MSL_NAMED(T, name)                        \
  using name##2 = metal::vec<T, 2>;                 \
  using name##3 = metal::vec<T, 3>;                 \
  using name##4 = metal::vec<T, 4>;                 \
  using packed_##name##2 = metal::packed_vec<T, 2>; \
  using packed_##name##3 = metal::packed_vec<T, 3>; \
  using packed_##name##4 = metal::packed_vec<T, 4>;
__MSL_NAMED(bool, bool)
__MSL_NAMED(char, char)
__MSL_NAMED(uchar, uchar)
__MSL_NAMED(short, short)
__MSL_NAMED(ushort, ushort)
__MSL_NAMED(int, int)
__MSL_NAMED(uint, uint)
__MSL_NAMED(long, long)
__MSL_NAMED(ulong, ulong)
__MSL_NAMED(half, half)
__MSL_NAMED(bfloat, bfloat)
__MSL_NAMED(float, float)
#undef __MSL_NAMED
