/* The C interface of the Metal simulator: one launch of one kernel. Every array is the caller's and
 * is only read, except for the data of buffers that may be written. No dependencies. */
#pragma once
#include <stdint.h>

#ifdef __cplusplus
extern "C" {
#endif

#define METAL_SIM_ABI 2
#define METAL_SIM_MAX_BUFFERS 32

enum { METAL_SIM_READ = 1, METAL_SIM_WRITE = 2, METAL_SIM_READ_WRITE = 3 };
enum { METAL_SIM_OK = 0, METAL_SIM_FAULTS = 1, METAL_SIM_NOT_LAUNCHED = 2 };

/* setBuffer: `bytes` counts from `data` to the end of the allocation. Buffers with the same data
 * are one buffer to the kernel. A buffer that is only written is poisoned first. */
typedef struct {
  uint32_t index, access;
  void* data;
  uint64_t bytes;
  const char* label; /* for messages, may be NULL */
  uint64_t offset;   /* of `data` in its allocation: kernels see an address as far past a multiple
                        of 256 */
} MetalSimBuffer;

typedef struct { /* setBytes */
  uint32_t index, bytes;
  const void* data;
} MetalSimBytes;

typedef struct { /* a function constant */
  uint32_t index, bytes;
  const void* data;
} MetalSimConstant;

typedef struct { /* setThreadgroupMemoryLength */
  uint32_t index;
  uint64_t bytes;
} MetalSimThreadgroup;

typedef struct {
  uint32_t abi;       /* METAL_SIM_ABI */
  const char* kernel; /* host name */
  const MetalSimBuffer* buffers;
  uint32_t num_buffers;
  const MetalSimBytes* bytes;
  uint32_t num_bytes;
  const MetalSimConstant* constants;
  uint32_t num_constants;
  const MetalSimThreadgroup* threadgroup;
  uint32_t num_threadgroup;
  uint32_t grid[3];    /* threadgroups */
  uint32_t threads[3]; /* a threadgroup */
  uint64_t seed;       /* of the order in which threads and threadgroups run */
} MetalSimLaunch;

typedef struct {
  uint32_t index;
  uint64_t bytes_read, bytes_written;               /* every thread's accesses added up */
  uint64_t unique_bytes_read, unique_bytes_written; /* each byte of the buffer once */
} MetalSimTraffic;

typedef struct {
  uint64_t threadgroups, threads;
  uint64_t barriers, simdgroup_barriers; /* one for a threadgroup, one for a SIMD-group */
  uint64_t simd_ops, matrix_ops;         /* one for a SIMD-group */
  uint64_t threadgroup_bytes;            /* threadgroup memory, static and host-sized */
  uint32_t num_traffic;
  MetalSimTraffic traffic[METAL_SIM_MAX_BUFFERS];
  uint32_t num_faults;
  char faults[32768]; /* one fault a paragraph */
} MetalSimReport;

int metal_sim_launch(const MetalSimLaunch* launch, MetalSimReport* report);

#ifdef __cplusplus
}
#endif
