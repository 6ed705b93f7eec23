// <metal_atomic>: relaxed operations on device and threadgroup memory. An operation is one access
// that races with plain accesses but not with other atomic ones.
#pragma once
#include "runtime.h"

namespace metal {

enum memory_order { memory_order_relaxed };

template <class T>
struct atomic {
  static_assert(sizeof(T) == 4 || sizeof(T) == 8, "atomic of 4 or 8 bytes");
  T __value;
};

// Past the instrumentation: the access was reported by __sim_atomic.
#define __MSL_ATOMIC_PLACE(writes)                                        \
  __sim_atomic((ulong) & object->__value, sizeof(T), writes, __MSL_SITE); \
  __private T* place = (__private T*)(ulong) & object->__value;

#define __MSL_ATOMIC_UPDATE(space, name, expression)                             \
  template <class T>                                                             \
  __MSL_INLINE T atomic_##name##_explicit(                                       \
      volatile space atomic<T>* object, __identity_t<T> operand, memory_order) { \
    __MSL_ATOMIC_PLACE(1)                                                        \
    T old = *place;                                                              \
    *place = expression;                                                         \
    return old;                                                                  \
  }
#define __MSL_ATOMICS(space)                                                                  \
  template <class T>                                                                          \
  __MSL_INLINE T atomic_load_explicit(const volatile space atomic<T>* object, memory_order) { \
    __MSL_ATOMIC_PLACE(0)                                                                     \
    return *place;                                                                            \
  }                                                                                           \
  template <class T>                                                                          \
  __MSL_INLINE void atomic_store_explicit(                                                    \
      volatile space atomic<T>* object, __identity_t<T> value, memory_order) {                \
    __MSL_ATOMIC_PLACE(2)                                                                     \
    *place = value;                                                                           \
  }                                                                                           \
  template <class T>                                                                          \
  __MSL_INLINE bool atomic_compare_exchange_weak_explicit(                                    \
      volatile space atomic<T>* object, __private T* expected, __identity_t<T> desired,       \
      memory_order, memory_order) {                                                           \
    __MSL_ATOMIC_PLACE(1)                                                                     \
    if (*place == *expected) {                                                                \
      *place = desired;                                                                       \
      return true;                                                                            \
    }                                                                                         \
    *expected = *place;                                                                       \
    return false;                                                                             \
  }                                                                                           \
  __MSL_ATOMIC_UPDATE(space, exchange, operand)                                               \
  __MSL_ATOMIC_UPDATE(space, fetch_add, old + operand)                                        \
  __MSL_ATOMIC_UPDATE(space, fetch_sub, old - operand)                                        \
  __MSL_ATOMIC_UPDATE(space, fetch_max, old < operand ? operand : old)                        \
  __MSL_ATOMIC_UPDATE(space, fetch_min, operand < old ? operand : old)                        \
  __MSL_ATOMIC_UPDATE(space, fetch_and, old& operand)                                         \
  __MSL_ATOMIC_UPDATE(space, fetch_or, old | operand)                                         \
  __MSL_ATOMIC_UPDATE(space, fetch_xor, old ^ operand)
__MSL_ATOMICS(__MSL_DEVICE)
__MSL_ATOMICS(__local)

using __msl_atomic_int = atomic<int>;
using __msl_atomic_uint = atomic<uint>;
using __msl_atomic_bool = atomic<uint>;
using __msl_atomic_float = atomic<float>;
using __msl_atomic_ulong = atomic<ulong>;

}  // namespace metal
