// <metal_logging>: messages of kernels. They are compiled, and go nowhere.
#pragma once
#include "types.h"

namespace metal {

enum os_log_type : uchar {
  os_log_type_default = 0x00,
  os_log_type_info = 0x01,
  os_log_type_debug = 0x02,
  os_log_type_error = 0x10,
  os_log_type_fault = 0x11
};

// (`__constant` is where the dialect has its string literals.) A method of the generic address
// space serves loggers of the program and of a function.
struct os_log {
  constexpr os_log(const __constant char*, const __constant char*) {}
#define __MSL_LOG(name)    \
  template <class... Args> \
  __MSL_INLINE void name(const __constant char*, Args...) const {}
  __MSL_LOG(log)
  __MSL_LOG(log_debug)
  __MSL_LOG(log_info)
  __MSL_LOG(log_error)
  __MSL_LOG(log_fault)
#undef __MSL_LOG
};

}  // namespace metal
