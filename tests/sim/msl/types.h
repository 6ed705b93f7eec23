// Scalar types, address spaces and type traits, in the dialect that the translated kernels are
// compiled in: C++ for OpenCL, whose address spaces are types of their own and whose generic
// address space (unnameable in a kernel) lets one library function serve them all.
#pragma once
#pragma OPENCL EXTENSION cl_khr_fp16 : enable

#define __MSL_DEVICE __attribute__((opencl_global_device))
#define __MSL_CONSTANT const __attribute__((opencl_global_host))
#define __MSL_THREADGROUP __local
#define __MSL_THREAD __private
#define __MSL_INLINE __attribute__((always_inline)) inline

typedef unsigned char uchar;
typedef unsigned short ushort;
typedef unsigned int uint;
typedef unsigned long ulong;
typedef char int8_t;
typedef short int16_t;
typedef int int32_t;
typedef long int64_t;
typedef uchar uint8_t;
typedef ushort uint16_t;
typedef uint uint32_t;
typedef ulong uint64_t;
typedef ulong size_t;
typedef long ptrdiff_t;
typedef ulong uintptr_t;
typedef long intptr_t;

namespace metal {

template <class T, T v>
struct integral_constant {
  static constexpr const T value = v;
  using value_type = T;
  using type = integral_constant;
  constexpr operator T() const { return v; }
};
template <bool b>
using bool_constant = integral_constant<bool, b>;
using true_type = bool_constant<true>;
using false_type = bool_constant<false>;

template <class T, class U>
struct is_same : false_type {};
template <class T>
struct is_same<T, T> : true_type {};
template <class T, class U>
constexpr const bool is_same_v = __is_same(T, U);

template <bool b, class T = void>
struct enable_if {};
template <class T>
struct enable_if<true, T> {
  using type = T;
};
template <bool b, class T = void>
using enable_if_t = typename enable_if<b, T>::type;

template <bool b, class T, class F>
struct conditional {
  using type = T;
};
template <class T, class F>
struct conditional<false, T, F> {
  using type = F;
};
template <bool b, class T, class F>
using conditional_t = typename conditional<b, T, F>::type;

template <class T>
struct remove_reference {
  using type = T;
};
template <class T>
struct remove_reference<T&> {
  using type = T;
};
template <class T>
struct remove_reference<T&&> {
  using type = T;
};
template <class T>
using remove_reference_t = typename remove_reference<T>::type;

template <class T>
struct remove_addrspace {
  using type = T;
};
template <class T>
struct remove_addrspace<__global T> {
  using type = T;
};
template <class T>
struct remove_addrspace<__attribute__((opencl_global_device)) T> {
  using type = T;
};
template <class T>
struct remove_addrspace<__attribute__((opencl_global_host)) T> {
  using type = T;
};
template <class T>
struct remove_addrspace<__local T> {
  using type = T;
};
template <class T>
struct remove_addrspace<__private T> {
  using type = T;
};
template <class T>
struct remove_addrspace<__generic T> {
  using type = T;
};
template <class T>
using remove_addrspace_t = typename remove_addrspace<T>::type;

// Also takes the address space off, as Metal's does off a loaded value.
template <class T>
struct remove_cv {
  using type = T;
};
template <class T>
struct remove_cv<const T> : remove_cv<T> {};
template <class T>
struct remove_cv<volatile T> : remove_cv<T> {};
template <class T>
struct remove_cv<__global T> : remove_cv<T> {};
template <class T>
struct remove_cv<__attribute__((opencl_global_device)) T> : remove_cv<T> {};
template <class T>
struct remove_cv<__attribute__((opencl_global_host)) T> : remove_cv<T> {};
template <class T>
struct remove_cv<__local T> : remove_cv<T> {};
template <class T>
struct remove_cv<__private T> : remove_cv<T> {};
template <class T>
struct remove_cv<__generic T> : remove_cv<T> {};
template <class T>
using remove_cv_t = typename remove_cv<T>::type;
template <class T>
using decay_t = remove_cv_t<remove_reference_t<T>>;

template <class T>
struct remove_pointer {
  using type = T;
};
template <class T>
struct remove_pointer<T*> {
  using type = T;
};
template <class T>
using remove_pointer_t = typename remove_pointer<T>::type;

struct __bfloat;
template <class T>
constexpr const bool is_floating_point_v = __is_floating_point(T) || __is_same(T, __bfloat);
template <class T>
constexpr const bool is_integral_v = __is_integral(T);
template <class T>
constexpr const bool is_arithmetic_v = is_integral_v<T> || is_floating_point_v<T>;
template <class T>
constexpr const bool is_signed_v = __is_signed(T);
template <class T>
constexpr const bool is_unsigned_v = __is_unsigned(T);
template <class T>
struct is_floating_point : bool_constant<is_floating_point_v<T>> {};
template <class T>
struct is_integral : bool_constant<is_integral_v<T>> {};
template <class T>
struct is_arithmetic : bool_constant<is_arithmetic_v<T>> {};
template <class T>
struct is_signed : bool_constant<is_signed_v<T>> {};
template <class T>
struct is_unsigned : bool_constant<is_unsigned_v<T>> {};
template <class T>
struct __is_object : bool_constant<__is_class(T)>{};
template <class T, class U>
struct is_convertible : bool_constant<__is_convertible_to(T, U)> {};
template <class T, class U>
constexpr const bool is_convertible_v = __is_convertible_to(T, U);
template <class T, class U>
struct is_base_of : bool_constant<__is_base_of(T, U)> {};
template <class T>
struct is_void : is_same<remove_cv_t<T>, void> {};
template <class T>
struct is_pointer : false_type {};
template <class T>
struct is_pointer<T*> : true_type {};
template <class T>
struct is_reference : bool_constant<!__is_same(T, remove_reference_t<T>)> {};
template <class T>
struct is_array : bool_constant<__is_array(T)> {};
template <class T>
struct is_class : bool_constant<__is_class(T)> {};
template <class T>
struct is_union : bool_constant<__is_union(T)> {};
template <class T>
struct is_enum : bool_constant<__is_enum(T)> {};
template <class T>
struct is_const : bool_constant<__is_const(T)> {};
template <class T>
struct is_scalar : bool_constant<is_arithmetic_v<T> || __is_enum(T) || is_pointer<T>::value> {};
template <class T>
struct is_trivially_copyable : bool_constant<__is_trivially_copyable(T)> {};
#define __MSL_TRAIT_VALUE(name) \
  template <class T>            \
  constexpr const bool name##_v = name<T>::value;
__MSL_TRAIT_VALUE(is_void)
__MSL_TRAIT_VALUE(is_pointer)
__MSL_TRAIT_VALUE(is_reference)
__MSL_TRAIT_VALUE(is_array)
__MSL_TRAIT_VALUE(is_class)
__MSL_TRAIT_VALUE(is_union)
__MSL_TRAIT_VALUE(is_enum)
__MSL_TRAIT_VALUE(is_const)
__MSL_TRAIT_VALUE(is_scalar)
__MSL_TRAIT_VALUE(is_trivially_copyable)

template <class...>
struct conjunction : true_type {};
template <class B, class... Others>
struct conjunction<B, Others...> : conditional_t<bool(B::value), conjunction<Others...>, B> {};
template <class...>
struct disjunction : false_type {};
template <class B, class... Others>
struct disjunction<B, Others...> : conditional_t<bool(B::value), B, disjunction<Others...>> {};
template <class B>
struct negation : bool_constant<!bool(B::value)> {};
template <class... B>
constexpr const bool conjunction_v = conjunction<B...>::value;
template <class... B>
constexpr const bool disjunction_v = disjunction<B...>::value;
template <class B>
constexpr const bool negation_v = negation<B>::value;

// Apple's own names of these, which kernels reach by `#pragma METAL internals`.
template <class... B>
using _conjunction = conjunction<B...>;
template <class... B>
using _disjunction = disjunction<B...>;

template <class T>
struct remove_const {
  using type = T;
};
template <class T>
struct remove_const<const T> {
  using type = T;
};
template <class T>
using remove_const_t = typename remove_const<T>::type;
template <class T>
struct make_unsigned {
  using type = __make_unsigned(T);
};
template <class T>
struct make_signed {
  using type = __make_signed(T);
};
template <class T>
using make_unsigned_t = typename make_unsigned<T>::type;
template <class T>
using make_signed_t = typename make_signed<T>::type;
template <class T>
struct __identity {
  using type = T;
};
template <class T>
using __identity_t = typename __identity<T>::type;

}  // namespace metal

namespace metal {
// The translator wraps the operands of ?: in this.
template <class T>
__MSL_INLINE constexpr remove_cv_t<T> __value(const T& operand) {
  return operand;
}
}  // namespace metal

template <class To, class From>
__MSL_INLINE constexpr To as_type(From from) {
  static_assert(sizeof(To) == sizeof(From), "as_type needs types of one size");
  return __builtin_bit_cast(To, from);
}

// clang finds no built-in `pointer += object` for an object that converts to a whole number when
// the pointer lies in an address space; Metal does.
template <class T, class Count>
__MSL_INLINE metal::enable_if_t<metal::__is_object<Count>::value, T * __private&> operator+=(
    T * __private & pointer, Count count) {
  pointer = pointer + long(count);
  return pointer;
}
