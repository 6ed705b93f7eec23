// bfloat: 16 bits of a float, rounded to nearest even after every operation. It becomes a float by
// itself, but nothing of floating point becomes a bfloat without being asked to. The library has no
// functions of bfloat: they take it as a float and return a float.
#pragma once
#include "types.h"

namespace metal {

template <class A>
struct __is_builtin : bool_constant<__is_integral(A) || __is_floating_point(A)> {};
template <class A>
struct __is_float : bool_constant<__is_floating_point(A)> {};

struct __bfloat {
  ushort __bits;

  __bfloat() = default;
  template <class A, enable_if_t<is_integral<A>::value, int> = 0>
  __MSL_INLINE constexpr __bfloat(A value) : __bits(__round(float(value))) {}
  template <class A, enable_if_t<__is_float<A>::value, int> = 0>
  __MSL_INLINE constexpr explicit __bfloat(A value) : __bits(__round(float(value))) {}
  __MSL_INLINE constexpr operator float() const { return __widen(__bits); }

  __MSL_INLINE static constexpr float __widen(ushort bits) {
    return __builtin_bit_cast(float, uint(bits) << 16);
  }
  __MSL_INLINE static constexpr ushort __round(float value) {
    uint bits = __builtin_bit_cast(uint, value);
    if (value != value) return ushort(bits >> 16) | 0x40;
    return ushort((bits + 0x7fff + ((bits >> 16) & 1)) >> 16);
  }
};

// With a whole number the result is bfloat, with another floating-point type it is float.
template <class A>
using __with_bfloat =
    enable_if_t<__is_builtin<A>::value, conditional_t<is_integral<A>::value, __bfloat, float>>;

#define __MSL_BFLOAT_OP(op)                                              \
  __MSL_INLINE constexpr __bfloat operator op(__bfloat a, __bfloat b) {  \
    return __bfloat(float(a) op float(b));                               \
  }                                                                      \
  template <class A>                                                     \
  __MSL_INLINE constexpr __with_bfloat<A> operator op(__bfloat a, A b) { \
    return __with_bfloat<A>(float(a) op float(b));                       \
  }                                                                      \
  template <class A>                                                     \
  __MSL_INLINE constexpr __with_bfloat<A> operator op(A a, __bfloat b) { \
    return __with_bfloat<A>(float(a) op float(b));                       \
  }                                                                      \
  __MSL_INLINE __bfloat& operator op## = (__bfloat & a, __bfloat b) {    \
    a = a op b;                                                          \
    return a;                                                            \
  }
__MSL_BFLOAT_OP(+)
__MSL_BFLOAT_OP(-)
__MSL_BFLOAT_OP(*)
__MSL_BFLOAT_OP(/)
#undef __MSL_BFLOAT_OP

#define __MSL_BFLOAT_COMPARE(op)                                                                  \
  __MSL_INLINE constexpr bool operator op(__bfloat a, __bfloat b) {                               \
    return float(a) op float(b);                                                                  \
  }                                                                                               \
  template <class A>                                                                              \
  __MSL_INLINE constexpr enable_if_t<__is_builtin<A>::value, bool> operator op(__bfloat a, A b) { \
    return float(a) op float(b);                                                                  \
  }                                                                                               \
  template <class A>                                                                              \
  __MSL_INLINE constexpr enable_if_t<__is_builtin<A>::value, bool> operator op(A a, __bfloat b) { \
    return float(a) op float(b);                                                                  \
  }
__MSL_BFLOAT_COMPARE(==)
__MSL_BFLOAT_COMPARE(!=)
__MSL_BFLOAT_COMPARE(<)
__MSL_BFLOAT_COMPARE(>)
__MSL_BFLOAT_COMPARE(<=)
__MSL_BFLOAT_COMPARE(>=)
#undef __MSL_BFLOAT_COMPARE

__MSL_INLINE constexpr __bfloat operator-(__bfloat a) {
  return __bfloat(-float(a));
}

}  // namespace metal

using bfloat = metal::__bfloat;
