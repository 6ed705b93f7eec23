// <metal_math>, <metal_common>, <metal_integer>, <metal_relational>, <metal_geometric>.
#pragma once
#include "vec.h"

namespace metal {

// --- Floating point
// ---------------------------------------------------------------------------------

#define __MSL_UNARY(name, expression)                 \
  __MSL_INLINE float name(float x) {                  \
    return expression;                                \
  }                                                   \
  __MSL_INLINE half name(half value) {                \
    return half(name(float(value)));                  \
  }                                                   \
  template <class T, int N>                           \
  __MSL_INLINE vec<T, N> name(vec<T, N> v) {          \
    vec<T, N> r(T(0));                                \
    for (int i = 0; i < N; i++) r[i] = T(name(v[i])); \
    return r;                                         \
  }
#define __MSL_FLOAT_FUNCTIONS(F)                       \
  F(acos, __builtin_acosf(x))                          \
  F(acosh, __builtin_acoshf(x))                        \
  F(asin, __builtin_asinf(x))                          \
  F(asinh, __builtin_asinhf(x))                        \
  F(atan, __builtin_atanf(x))                          \
  F(atanh, __builtin_atanhf(x))                        \
  F(ceil, __builtin_ceilf(x))                          \
  F(cos, __builtin_cosf(x))                            \
  F(cosh, __builtin_coshf(x))                          \
  F(cospi, __builtin_cosf(x * 3.14159265358979f))      \
  F(exp, __builtin_expf(x))                            \
  F(exp2, __builtin_exp2f(x))                          \
  F(exp10, __builtin_exp2f(x * 3.32192809488736f))     \
  F(fabs, __builtin_fabsf(x))                          \
  F(floor, __builtin_floorf(x))                        \
  F(fract, (x - __builtin_floorf(x)))                  \
  F(log, __builtin_logf(x))                            \
  F(log2, __builtin_log2f(x))                          \
  F(log10, __builtin_log10f(x))                        \
  F(rint, __builtin_rintf(x))                          \
  F(round, __builtin_roundf(x))                        \
  F(rsqrt, (1.0f / __builtin_sqrtf(x)))                \
  F(sin, __builtin_sinf(x))                            \
  F(sinh, __builtin_sinhf(x))                          \
  F(sinpi, __builtin_sinf(x * 3.14159265358979f))      \
  F(sqrt, __builtin_sqrtf(x))                          \
  F(tan, __builtin_tanf(x))                            \
  F(tanh, __builtin_tanhf(x))                          \
  F(tanpi, __builtin_tanf(x * 3.14159265358979f))      \
  F(trunc, __builtin_truncf(x))                        \
  F(saturate, (x > 0.0f ? x < 1.0f ? x : 1.0f : 0.0f)) \
  F(sign, (x > 0.0f ? 1.0f : x < 0.0f ? -1.0f : 0.0f))
__MSL_FLOAT_FUNCTIONS(__MSL_UNARY)

#define __MSL_BINARY(name, expression)                                  \
  __MSL_INLINE float name(float x, float y) {                           \
    return expression;                                                  \
  }                                                                     \
  __MSL_INLINE half name(half x, half y) {                              \
    return half(name(float(x), float(y)));                              \
  }                                                                     \
  template <class T, int N>                                             \
  __MSL_INLINE vec<T, N> name(vec<T, N> x, __identity_t<vec<T, N>> y) { \
    vec<T, N> r(T(0));                                                  \
    for (int i = 0; i < N; i++) r[i] = T(name(x[i], y[i]));             \
    return r;                                                           \
  }
#define __MSL_FLOAT_FUNCTIONS2(F)          \
  F(atan2, __builtin_atan2f(x, y))         \
  F(copysign, __builtin_copysignf(x, y))   \
  F(divide, (x / y))                       \
  F(fdim, __builtin_fdimf(x, y))           \
  F(fmax, __builtin_fmaxf(x, y))           \
  F(fmin, __builtin_fminf(x, y))           \
  F(fmod, __builtin_fmodf(x, y))           \
  F(nextafter, __builtin_nextafterf(x, y)) \
  F(pow, __builtin_powf(x, y))             \
  F(powr, __builtin_powf(x, y))            \
  F(step, (y < x ? 0.0f : 1.0f))
__MSL_FLOAT_FUNCTIONS2(__MSL_BINARY)

__MSL_INLINE float fma(float a, float b, float c) {
  return __builtin_fmaf(a, b, c);
}
__MSL_INLINE half fma(half a, half b, half c) {
  return half(fma(float(a), float(b), float(c)));
}
template <class T, int N>
__MSL_INLINE vec<T, N> fma(vec<T, N> a, __identity_t<vec<T, N>> b, __identity_t<vec<T, N>> c) {
  for (int i = 0; i < N; i++) a[i] = T(fma(a[i], b[i], c[i]));
  return a;
}
template <class T>
__MSL_INLINE T mix(T a, __identity_t<T> b, __identity_t<T> t) {
  return a + (b - a) * t;
}
__MSL_INLINE float ldexp(float x, int e) {
  return __builtin_ldexpf(x, e);
}
__MSL_INLINE half ldexp(half x, int e) {
  return half(__builtin_ldexpf(float(x), e));
}
__MSL_INLINE float frexp(float x, __private int& e) {
  return __builtin_frexpf(x, &e);
}
__MSL_INLINE float modf(float x, __private float& whole) {
  whole = trunc(x);
  return copysign(x - whole, x);
}
__MSL_INLINE float sincos(float x, __private float& c) {
  c = cos(x);
  return sin(x);
}

// --- Every arithmetic type
// --------------------------------------------------------------------------

#define __MSL_SIGNED_TYPES(F) F(char) F(short) F(int) F(long)
#define __MSL_UNSIGNED_TYPES(F) F(uchar) F(ushort) F(uint) F(ulong)
#define __MSL_ALL_TYPES(F) __MSL_SIGNED_TYPES(F) __MSL_UNSIGNED_TYPES(F) F(half) F(float)
// min and max return the number where one is NaN, as fmin and fmax do.
#define __MSL_MINMAX(T)                                \
  __MSL_INLINE constexpr T max(T a, T b) {             \
    return a != a ? b : a < b ? b : a;                 \
  }                                                    \
  __MSL_INLINE constexpr T min(T a, T b) {             \
    return a != a ? b : b < a ? b : a;                 \
  }                                                    \
  __MSL_INLINE constexpr T clamp(T x, T low, T high) { \
    return min(max(x, low), high);                     \
  }
__MSL_ALL_TYPES(__MSL_MINMAX)
#define __MSL_ABS(T)                  \
  __MSL_INLINE constexpr T abs(T x) { \
    return x < 0 ? T(-x) : x;         \
  }
#define __MSL_ABS_UNSIGNED(T)         \
  __MSL_INLINE constexpr T abs(T x) { \
    return x;                         \
  }
__MSL_SIGNED_TYPES(__MSL_ABS)
__MSL_UNSIGNED_TYPES(__MSL_ABS_UNSIGNED)
__MSL_INLINE float abs(float x) {
  return fabs(x);
}
__MSL_INLINE half abs(half x) {
  return fabs(x);
}

#define __MSL_OF_THREE(low, middle, high, least, most)               \
  template <class T>                                                 \
  __MSL_INLINE T low(T a, __identity_t<T> b, __identity_t<T> c) {    \
    return least(a, least(b, c));                                    \
  }                                                                  \
  template <class T>                                                 \
  __MSL_INLINE T high(T a, __identity_t<T> b, __identity_t<T> c) {   \
    return most(a, most(b, c));                                      \
  }                                                                  \
  template <class T>                                                 \
  __MSL_INLINE T middle(T a, __identity_t<T> b, __identity_t<T> c) { \
    return most(least(a, b), least(most(a, b), c));                  \
  }
__MSL_OF_THREE(min3, median3, max3, min, max)
__MSL_OF_THREE(fmin3, fmedian3, fmax3, fmin, fmax)

#define __MSL_VEC_PAIR(name)                                            \
  template <class T, int N>                                             \
  __MSL_INLINE vec<T, N> name(vec<T, N> a, __identity_t<vec<T, N>> b) { \
    for (int i = 0; i < N; i++) a[i] = T(name(a[i], b[i]));             \
    return a;                                                           \
  }
__MSL_VEC_PAIR(max)
__MSL_VEC_PAIR(min)
template <class T, int N>
__MSL_INLINE vec<T, N> clamp(
    vec<T, N> v, __identity_t<vec<T, N>> low, __identity_t<vec<T, N>> high) {
  return min(max(v, low), high);
}
template <class T, int N>
__MSL_INLINE vec<T, N> abs(vec<T, N> v) {
  for (int i = 0; i < N; i++) v[i] = T(abs(v[i]));
  return v;
}
template <class T>
__MSL_INLINE constexpr enable_if_t<!__is_vec<T>, T> select(T a, __identity_t<T> b, bool pick_b) {
  return pick_b ? b : a;
}
template <class T, int N>
__MSL_INLINE vec<T, N> select(vec<T, N> a, __identity_t<vec<T, N>> b, vec<bool, N> pick_b) {
  for (int i = 0; i < N; i++) a[i] = pick_b[i] ? b[i] : a[i];
  return a;
}

// --- Integers
// ---------------------------------------------------------------------------------------

__MSL_INLINE uint popcount(uint x) {
  return __builtin_popcount(x);
}
__MSL_INLINE int popcount(int x) {
  return __builtin_popcount(x);
}
__MSL_INLINE ulong popcount(ulong x) {
  return __builtin_popcountl(x);
}
__MSL_INLINE uint clz(uint x) {
  return x ? __builtin_clz(x) : 32;
}
__MSL_INLINE int clz(int x) {
  return x ? __builtin_clz(x) : 32;
}
__MSL_INLINE uint ctz(uint x) {
  return x ? __builtin_ctz(x) : 32;
}
__MSL_INLINE int ctz(int x) {
  return x ? __builtin_ctz(x) : 32;
}
__MSL_INLINE uint reverse_bits(uint x) {
  return __builtin_bitreverse32(x);
}
__MSL_INLINE uint rotate(uint x, uint n) {
  return (x << (n & 31)) | (x >> (-n & 31));
}
__MSL_INLINE uint mulhi(uint a, uint b) {
  return uint((ulong(a) * b) >> 32);
}
__MSL_INLINE int mulhi(int a, int b) {
  return int((long(a) * b) >> 32);
}
__MSL_INLINE int mad24(int a, int b, int c) {
  return a * b + c;
}
__MSL_INLINE uint mad24(uint a, uint b, uint c) {
  return a * b + c;
}
__MSL_INLINE uint absdiff(uint a, uint b) {
  return a < b ? b - a : a - b;
}
__MSL_INLINE uint absdiff(int a, int b) {
  return a < b ? uint(b) - a : uint(a) - b;
}
__MSL_INLINE uint extract_bits(uint x, uint offset, uint bits) {
  return bits == 32 ? x >> offset : (x >> offset) & ((1u << bits) - 1);
}
__MSL_INLINE uint insert_bits(uint base, uint insert, uint offset, uint bits) {
  uint mask = (bits == 32 ? ~0u : (1u << bits) - 1) << offset;
  return (base & ~mask) | ((insert << offset) & mask);
}

// --- Relational and geometric
// -----------------------------------------------------------------------

#define __MSL_CLASSIFY(name, expression)           \
  __MSL_INLINE bool name(float x) {                \
    return expression;                             \
  }                                                \
  __MSL_INLINE bool name(half x) {                 \
    return name(float(x));                         \
  }                                                \
  __MSL_INLINE bool name(bfloat x) {               \
    return name(float(x));                         \
  }                                                \
  template <class T, int N>                        \
  __MSL_INLINE vec<bool, N> name(vec<T, N> v) {    \
    vec<bool, N> r(false);                         \
    for (int i = 0; i < N; i++) r[i] = name(v[i]); \
    return r;                                      \
  }
__MSL_CLASSIFY(isnan, x != x)
__MSL_CLASSIFY(isinf, __builtin_fabsf(x) == __builtin_inff())
__MSL_CLASSIFY(isfinite, __builtin_fabsf(x) < __builtin_inff())
__MSL_CLASSIFY(
    isnormal, __builtin_fabsf(x) >= 1.175494351e-38f && __builtin_fabsf(x) < __builtin_inff())
__MSL_CLASSIFY(signbit, (__builtin_bit_cast(uint, x) >> 31) != 0)

__MSL_INLINE bool any(bool x) {
  return x;
}
__MSL_INLINE bool all(bool x) {
  return x;
}
template <int N>
__MSL_INLINE bool any(vec<bool, N> v) {
  bool r = false;
  for (int i = 0; i < N; i++) r |= v[i];
  return r;
}
template <int N>
__MSL_INLINE bool all(vec<bool, N> v) {
  bool r = true;
  for (int i = 0; i < N; i++) r &= v[i];
  return r;
}

template <class T, int N>
__MSL_INLINE T dot(vec<T, N> a, __identity_t<vec<T, N>> b) {
  T sum = a[0] * b[0];
  for (int i = 1; i < N; i++) sum += a[i] * b[i];
  return sum;
}
template <class T, int N>
__MSL_INLINE T length_squared(vec<T, N> v) {
  return dot(v, v);
}
template <class T, int N>
__MSL_INLINE T length(vec<T, N> v) {
  return sqrt(dot(v, v));
}
template <class T, int N>
__MSL_INLINE vec<T, N> normalize(vec<T, N> v) {
  return v * rsqrt(dot(v, v));
}
template <class T, int N>
__MSL_INLINE T distance(vec<T, N> a, vec<T, N> b) {
  return length(a - b);
}

#define __MSL_USING(name, expression) using metal::name;
namespace fast {
__MSL_FLOAT_FUNCTIONS(__MSL_USING)
__MSL_FLOAT_FUNCTIONS2(__MSL_USING)
using metal::clamp;
using metal::fma;
using metal::max;
using metal::min;
using metal::sincos;
}  // namespace fast
namespace precise {
__MSL_FLOAT_FUNCTIONS(__MSL_USING)
__MSL_FLOAT_FUNCTIONS2(__MSL_USING)
using metal::clamp;
using metal::fma;
using metal::max;
using metal::min;
using metal::sincos;
}  // namespace precise
#undef __MSL_USING

// --- Limits
// -----------------------------------------------------------------------------------------

template <class T>
struct numeric_limits;
#define __MSL_LIMITS(T, low, smallest, high, eps, inf, nan, integer)         \
  template <>                                                                \
  struct numeric_limits<T> {                                                 \
    static constexpr const bool is_specialized = true, is_integer = integer; \
    __MSL_INLINE static constexpr T lowest() { return T(low); }              \
    __MSL_INLINE static constexpr T min() { return T(smallest); }            \
    __MSL_INLINE static constexpr T max() { return T(high); }                \
    __MSL_INLINE static constexpr T epsilon() { return T(eps); }             \
    __MSL_INLINE static constexpr T infinity() { return T(inf); }            \
    __MSL_INLINE static constexpr T quiet_NaN() { return T(nan); }           \
  };
__MSL_LIMITS(
    float, -3.402823466e+38f, 1.175494351e-38f, 3.402823466e+38f, 1.192092896e-07f,
    __builtin_inff(), __builtin_nanf(""), false)
__MSL_LIMITS(
    half, -65504.0f, 6.103515625e-05f, 65504.0f, 9.765625e-04f, __builtin_inff(),
    __builtin_nanf(""), false)
__MSL_LIMITS(
    bfloat, -3.38953139e+38f, 1.175494351e-38f, 3.38953139e+38f, 7.8125e-03f, __builtin_inff(),
    __builtin_nanf(""), false)
#define __MSL_INT_LIMITS(T, low, high) __MSL_LIMITS(T, low, low, high, 0, 0, 0, true)
__MSL_INT_LIMITS(bool, false, true)
__MSL_INT_LIMITS(char, -128, 127)
__MSL_INT_LIMITS(uchar, 0, 255)
__MSL_INT_LIMITS(short, -32768, 32767)
__MSL_INT_LIMITS(ushort, 0, 65535)
__MSL_INT_LIMITS(int, -2147483647 - 1, 2147483647)
__MSL_INT_LIMITS(uint, 0u, 4294967295u)
__MSL_INT_LIMITS(long, -9223372036854775807l - 1, 9223372036854775807l)
__MSL_INT_LIMITS(ulong, 0ul, 18446744073709551615ul)

}  // namespace metal
