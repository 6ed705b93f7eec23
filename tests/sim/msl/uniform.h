// <metal_uniform>: values that the kernel says are the same in all threads. That is not checked.
#pragma once
#include "types.h"

namespace metal {

template <class T>
struct uniform {
  T __value;

  __MSL_INLINE constexpr operator T() const { return __value; }
};
template <class T>
__MSL_INLINE constexpr uniform<T> make_uniform(T value) {
  return {value};
}

#define __MSL_UNIFORM_OP(op)                                          \
  template <class T>                                                  \
  __MSL_INLINE constexpr auto operator op(uniform<T> a, uniform<T> b) \
      ->uniform<decltype(a.__value op b.__value)> {                   \
    return {a.__value op b.__value};                                  \
  }
__MSL_UNIFORM_OP(+)
__MSL_UNIFORM_OP(-)
__MSL_UNIFORM_OP(*)
__MSL_UNIFORM_OP(/)
__MSL_UNIFORM_OP(%)
#undef __MSL_UNIFORM_OP

}  // namespace metal
