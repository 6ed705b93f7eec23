// Functions of the simulator that compiled kernels call. `site` stands for the calling line of the
// kernel: instrumentation replaces __MSL_SITE by a different number for every call.
#pragma once
#include "vec.h"

#define __MSL_SITE 1366515437u

extern "C" {
// Waits for the SIMD-group's lanes (width 32) or the quad's (4). Every lane gives `bytes` of value
// and gets all values, 64 bytes apart, first lane first.
const __private void* __sim_gather(
    const __private void* value, uint bytes, uint width, uint matrix, uint site);
uint __sim_lane();              // in its SIMD-group
uint __sim_active(uint width);  // lanes of its SIMD-group or quad that exist, from lane 0 on
void __sim_bad_lane(int lane, uint site);
void __sim_barrier(uint flags, uint site);
void __sim_simdgroup_barrier(uint flags, uint site);
void __sim_atomic(ulong address, uint bytes, uint writes, uint site);
uint __sim_constant_defined(ulong address);
// Bound arguments.
ulong __sim_buffer(uint index);
ulong __sim_threadgroup_argument(uint index);
ulong __sim_threadgroup_variable(ulong bytes, uint align, uint site);
uint __sim_attribute(uint kind, uint axis);
}

namespace metal {

// [[threadgroup]] variables of a kernel: one object for the threadgroup.
template <class T, uint alignment = alignof(T)>
__MSL_INLINE __local T& __threadgroup_variable() {
  return *(__local T*)__sim_threadgroup_variable(sizeof(T), alignment, __MSL_SITE);
}

// Parameter i of a kernel's function type.
template <class F, uint i>
struct __parameter;
template <class R, class First, class... Rest, uint i>
struct __parameter<R(First, Rest...), i> : __parameter<R(Rest...), i - 1> {};
template <class R, class First, class... Rest>
struct __parameter<R(First, Rest...), 0> {
  using type = First;
};
template <class F, uint i>
using __parameter_t = typename __parameter<F, i>::type;

// A parameter's value from an address or from a grid attribute.
template <class P>
struct __bind_address;
template <class T>
struct __bind_address<T*> {
  __MSL_INLINE static T* from(ulong address) { return (T*)address; }
};
template <class T>
struct __bind_address<T&> {
  __MSL_INLINE static T& from(ulong address) { return *(T*)address; }
};
template <class P>
struct __bind_attribute {
  __MSL_INLINE static P from(uint kind) { return P(__sim_attribute(kind, 0)); }
};
template <class T>
struct __bind_attribute<vec<T, 2>> {
  __MSL_INLINE static vec<T, 2> from(uint kind) {
    return vec<T, 2>(T(__sim_attribute(kind, 0)), T(__sim_attribute(kind, 1)));
  }
};
template <class T>
struct __bind_attribute<vec<T, 3>> {
  __MSL_INLINE static vec<T, 3> from(uint kind) {
    return vec<T, 3>(
        T(__sim_attribute(kind, 0)), T(__sim_attribute(kind, 1)), T(__sim_attribute(kind, 2)));
  }
};

}  // namespace metal

template <class T>
__MSL_INLINE bool is_function_constant_defined(const __global T& value) {
  return __sim_constant_defined((ulong)&value);
}
