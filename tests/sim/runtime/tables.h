// Tables that are generated with the compiled kernels.
#pragma once
#include <stdint.h>

extern "C" {
struct SimSite {
  const char* file;
  uint32_t line, column, align;
  const char *function, *operation;  // operation: the library function called there, if any
};
struct SimKernel {
  const char* name;
  void (*entry)();
};
struct SimConstant {
  uint32_t index;
  void* address;
  uint32_t bytes;
};
struct SimGlobal {
  void* address;
  uint64_t bytes;
};
extern const SimSite sim_sites[];
extern const SimKernel sim_kernels[];
extern const uint32_t sim_num_kernels;
extern const SimConstant sim_constants[];
extern const uint32_t sim_num_constants;
extern const SimGlobal sim_globals[];
extern const uint32_t sim_num_globals;
extern void (*const sim_initialisers[])();
extern const uint32_t sim_num_initialisers;
}
