// SIMD-group and quad-group functions and barriers.
#pragma once
#include "math.h"
#include "runtime.h"

namespace metal {

enum class mem_flags : uint {
  mem_none = 0,
  mem_device = 1,
  mem_threadgroup = 2,
  mem_texture = 4,
  mem_threadgroup_imageblock = 8,
  mem_object_data = 16
};
__MSL_INLINE constexpr mem_flags operator|(mem_flags a, mem_flags b) {
  return mem_flags(uint(a) | uint(b));
}
__MSL_INLINE constexpr mem_flags operator&(mem_flags a, mem_flags b) {
  return mem_flags(uint(a) & uint(b));
}
__MSL_INLINE void threadgroup_barrier(mem_flags flags) {
  __sim_barrier(uint(flags), __MSL_SITE);
}
__MSL_INLINE void simdgroup_barrier(mem_flags flags) {
  __sim_simdgroup_barrier(uint(flags), __MSL_SITE);
}

// The values of all lanes. Lanes beyond the last thread do not take part.
template <class T, uint width>
struct __lanes {
  const __private char* slots;
  uint active, lane;
  __MSL_INLINE __lanes(const __private void* gathered)
      : slots((const __private char*)gathered),
        active(__sim_active(width)),
        lane(__sim_lane() % width) {}
  __MSL_INLINE T operator[](uint i) const { return *(const __private T*)(slots + 64 * i); }
};
// The library has no functions of bfloat: it arrives, and comes back, as float.
template <class A>
using __simd_value = conditional_t<__is_same(A, bfloat), float, A>;
#define __MSL_SIMD_FUNCTION                     \
  template <class A, class T = __simd_value<A>> \
  __MSL_INLINE T
#define __MSL_GATHER(T, width, value)                                       \
  static_assert(sizeof(T) <= 64, "a SIMD-group value of at most 64 bytes"); \
  T __mine = T(value);                                                      \
  __lanes<T, width> lanes(                                                  \
      __sim_gather((const __private void*)&__mine, sizeof(T), width, 0, __MSL_SITE));

template <class T, uint width, class Op>
__MSL_INLINE T __reduce(__lanes<T, width> lanes, Op op) {
  T all[width];
  for (uint i = 0; i < lanes.active; i++) all[i] = lanes[i];
  for (uint step = 1; step < width; step *= 2)
    for (uint i = 0; i + step < lanes.active; i += 2 * step) all[i] = op(all[i], all[i + step]);
  return all[0];
}
#define __MSL_REDUCTION(name, Op, expression)   \
  struct __##Op {                               \
    template <class T>                          \
    __MSL_INLINE T operator()(T a, T b) const { \
      return T(expression);                     \
    }                                           \
  };                                            \
  __MSL_SIMD_FUNCTION simd_##name(A value) {    \
    __MSL_GATHER(T, 32, value)                  \
    return __reduce(lanes, __##Op());           \
  }                                             \
  __MSL_SIMD_FUNCTION quad_##name(A value) {    \
    __MSL_GATHER(T, 4, value)                   \
    return __reduce(lanes, __##Op());           \
  }
__MSL_REDUCTION(sum, add, a + b)
__MSL_REDUCTION(product, multiply, a* b)
__MSL_REDUCTION(max, maximum, max(a, b))
__MSL_REDUCTION(min, minimum, min(a, b))
__MSL_REDUCTION(and, bit_and, a& b)
__MSL_REDUCTION(or, bit_or, a | b)
__MSL_REDUCTION(xor, bit_xor, a ^ b)

#define __MSL_PREFIX(name, Op, identity)                              \
  __MSL_SIMD_FUNCTION simd_prefix_inclusive_##name(A value) {         \
    __MSL_GATHER(T, 32, value)                                        \
    T r = lanes[0];                                                   \
    for (uint i = 1; i <= lanes.lane; i++) r = __##Op()(r, lanes[i]); \
    return r;                                                         \
  }                                                                   \
  __MSL_SIMD_FUNCTION simd_prefix_exclusive_##name(A value) {         \
    __MSL_GATHER(T, 32, value)                                        \
    T r = T(identity);                                                \
    for (uint i = 0; i < lanes.lane; i++) r = __##Op()(r, lanes[i]);  \
    return r;                                                         \
  }
__MSL_PREFIX(sum, add, 0)
__MSL_PREFIX(product, multiply, 1)

// Reading a lane that does not exist is a fault.
#define __MSL_LANE(index)                                                            \
  int __from = int(index);                                                           \
  if (__from < 0 || __from >= int(lanes.active)) __sim_bad_lane(__from, __MSL_SITE); \
  return lanes[__from];
// Shuffles by a distance leave lanes that have no partner as they are.
#define __MSL_LANE_OR_MINE(index)                               \
  int __from = int(index);                                      \
  if (__from < 0 || __from >= int(lanes.active)) return __mine; \
  return lanes[__from];
#define __MSL_SHUFFLES(group, width)                                                           \
  __MSL_SIMD_FUNCTION group##_shuffle(A value, ushort lane){                                   \
      __MSL_GATHER(T, width, value)                                                            \
          __MSL_LANE(lane)} __MSL_SIMD_FUNCTION group##_broadcast(A value, ushort lane){       \
      __MSL_GATHER(T, width, value)                                                            \
          __MSL_LANE(lane)} __MSL_SIMD_FUNCTION group##_broadcast_first(A value) {             \
    __MSL_GATHER(T, width, value)                                                              \
    return lanes[0];                                                                           \
  }                                                                                            \
  __MSL_SIMD_FUNCTION group##_shuffle_xor(                                                     \
      A value, ushort mask){__MSL_GATHER(T, width, value) __MSL_LANE(                          \
      lanes.lane ^ mask)} __MSL_SIMD_FUNCTION group##_shuffle_down(A value, ushort delta){     \
      __MSL_GATHER(T, width, value) __MSL_LANE_OR_MINE(                                        \
          lanes.lane + delta)} __MSL_SIMD_FUNCTION group##_shuffle_up(A value, ushort delta){  \
      __MSL_GATHER(T, width, value) __MSL_LANE_OR_MINE(                                        \
          int(lanes.lane) -                                                                    \
          int(delta))} __MSL_SIMD_FUNCTION group##_shuffle_rotate_down(A value, ushort delta){ \
      __MSL_GATHER(T, width, value) __MSL_LANE(                                                \
          (lanes.lane + delta) %                                                               \
          width)} __MSL_SIMD_FUNCTION group##_shuffle_rotate_up(A value, ushort delta) {       \
    __MSL_GATHER(T, width, value)                                                              \
    __MSL_LANE((lanes.lane + width - delta % width) % width)                                   \
  }
__MSL_SHUFFLES(simd, 32)
__MSL_SHUFFLES(quad, 4)
// Vectors of `modulo` lanes side by side; a lane without a partner in its vector takes the filling.
template <class T>
__MSL_INLINE T __shuffle_and_fill(T value, T fill, int delta, ushort modulo) {
  int first = __sim_lane() / modulo * modulo, from = int(__sim_lane()) - first + delta;
  ushort lane = ushort(first + (from + modulo) % modulo);
  T shuffled = simd_shuffle(value, lane), filled = simd_shuffle(fill, lane);
  return from < 0 || from >= modulo ? filled : shuffled;
}
__MSL_SIMD_FUNCTION simd_shuffle_and_fill_down(A value, A fill, ushort delta, ushort modulo = 32) {
  return __shuffle_and_fill(T(value), T(fill), delta, modulo);
}
__MSL_SIMD_FUNCTION simd_shuffle_and_fill_up(A value, A fill, ushort delta, ushort modulo = 32) {
  return __shuffle_and_fill(T(value), T(fill), -int(delta), modulo);
}

class simd_vote {
 public:
  using vote_t = ulong;
  __MSL_INLINE explicit constexpr simd_vote(vote_t bits) : bits_(bits) {}
  __MSL_INLINE explicit constexpr operator vote_t() const { return bits_; }
  __MSL_INLINE constexpr bool any() const { return bits_ != 0; }
  __MSL_INLINE bool all() const { return bits_ == (1ul << __sim_active(32)) - 1; }

 private:
  vote_t bits_;
};
__MSL_INLINE simd_vote simd_ballot(bool value) {
  using T = bool;
  __MSL_GATHER(bool, 32, value)
  ulong bits = 0;
  for (uint i = 0; i < lanes.active; i++) bits |= ulong(lanes[i]) << i;
  return simd_vote(bits);
}
__MSL_INLINE bool simd_any(bool value) {
  using T = bool;
  __MSL_GATHER(bool, 32, value)
  return __reduce(lanes, __bit_or());
}
__MSL_INLINE bool simd_all(bool value) {
  using T = bool;
  __MSL_GATHER(bool, 32, value)
  return __reduce(lanes, __bit_and());
}
__MSL_INLINE bool simd_is_first() {
  return __sim_lane() == 0;
}
__MSL_INLINE simd_vote simd_active_threads_mask() {
  return simd_ballot(true);
}

}  // namespace metal
