// Copyright © 2026 the mlx_paged authors. Apache-2.0.
//
// Warpgroup products (wgmma), available on sm_90a only:
//   D[64 x N] += A[64 x 16] B[16 x N]
// The tensor cores read B, or its transpose, from a tile in shared memory. A is a tile too, or in
// registers like D; each warp holds sixteen rows, laid out as for mma.m16n8k16 (tensor_core.h).
// Products run asynchronously: until they are waited for, no thread may touch their registers or
// tiles.

#pragma once

#include "tensor_core.h"

namespace mlx_paged::cuda {

#if !defined(__CUDA_ARCH__) || defined(__CUDA_ARCH_FEAT_SM90_ALL)
#define PAGED_HAS_WGMMA

// Descriptor of the first sixteen columns of a tile with 64-column rows, in the copy engine's
// 128-byte swizzle, aligned to 1024 bytes. The next sixteen columns are kNextColumns further.
__device__ __forceinline__ unsigned int first_columns(unsigned int tile) {
  return (tile & 0x3ffff) >> 4 | 1u << 16;
}
constexpr unsigned int kNextColumns = 16 * 2 / 16;
// Descriptor of the first sixteen rows of such a tile, whose next 64 columns are `bytes` away. The
// next sixteen rows are kNextRows further.
__device__ __forceinline__ unsigned int first_rows(unsigned int tile, unsigned int bytes) {
  return (tile & 0x3ffff) >> 4 | bytes / 16 << 16;
}
constexpr unsigned int kNextRows = 16 * 128 / 16;
// The descriptor's other half: 1024 bytes between groups of eight rows, 128-byte swizzle.
constexpr unsigned int kTileLayout = 1024 / 16 | 1u << 30;

// Raises or lowers the register limit per thread to REGISTERS, a multiple of 8, using registers
// that other warpgroups of the block released. Called by all warps of a group.
template <int REGISTERS>
__device__ __forceinline__ void take_registers() {
  asm volatile("setmaxnreg.inc.sync.aligned.u32 %0;" ::"n"(REGISTERS));
}

template <int REGISTERS>
__device__ __forceinline__ void leave_registers() {
  asm volatile("setmaxnreg.dec.sync.aligned.u32 %0;" ::"n"(REGISTERS));
}

// Tells the compiler that a value is uniform across the warp, so that it computes tile addresses
// once.
__device__ __forceinline__ int same_in_warp(int v) {
  return __shfl_sync(0xffffffffu, v, 0);
}

// Makes this thread's writes to shared memory visible to products. Called before the barrier.
__device__ __forceinline__ void show_to_products() {
  asm volatile("fence.proxy.async.shared::cta;" ::: "memory");
}

// Orders earlier register accesses before the products that follow.
__device__ __forceinline__ void begin_products() {
  asm volatile("wgmma.fence.sync.aligned;" ::: "memory");
}

// Makes the products started since the last call one batch.
__device__ __forceinline__ void commit_products() {
  asm volatile("wgmma.commit_group.sync.aligned;" ::: "memory");
}

// Tells the compiler that d changes at this point, where products have been waited for.
template <int TILES>
__device__ __forceinline__ void take_product(float (&d)[TILES][4]) {
#pragma unroll
  for (int t = 0; t < TILES; t++) {
    asm volatile("" : "+f"(d[t][0]), "+f"(d[t][1]), "+f"(d[t][2]), "+f"(d[t][3])::"memory");
  }
}

// Waits until at most PENDING batches are in flight.
template <int PENDING, int TILES>
__device__ __forceinline__ void wait_for_products(float (&d)[TILES][4]) {
  asm volatile("wgmma.wait_group.sync.aligned %0;" ::"n"(PENDING) : "memory");
  if constexpr (PENDING == 0) {
    take_product(d);
  }
}

// The instruction names its registers one by one.
#define PAGED_D(t) "+f"(d[t][0]), "+f"(d[t][1]), "+f"(d[t][2]), "+f"(d[t][3])
#define PAGED_START(shape, type, registers, of_a, of_b, of_layout, ...)          \
  asm volatile(                                                                  \
      "{\n"                                                                      \
      ".reg .b64 a;\n"                                                           \
      ".reg .b64 b;\n"                                                           \
      "mov.b64 a, {" of_a ", " of_layout                                         \
      "};\n"                                                                     \
      "mov.b64 b, {" of_b ", " of_layout                                         \
      "};\n"                                                                     \
      "wgmma.mma_async.sync.aligned." shape ".f32." type "." type " {" registers \
      "}, "                                                                      \
      "a, b, 1, 1, 1, 0, 0;\n"                                                   \
      "}"                                                                        \
      : __VA_ARGS__                                                              \
      : "r"(a), "r"(b), "n"(kTileLayout)                                         \
      : "memory")
#define PAGED_8 "%0, %1, %2, %3"
#define PAGED_16 PAGED_8 ", %4, %5, %6, %7"
#define PAGED_32 PAGED_16 ", %8, %9, %10, %11, %12, %13, %14, %15"
#define PAGED_64                                              \
  PAGED_32                                                    \
  ", %16, %17, %18, %19, %20, %21, %22, %23, %24, %25, %26, " \
  "%27, %28, %29, %30, %31"
#define PAGED_START_ANY(type)                                                                 \
  static_assert(TILES == 1 || TILES == 2 || TILES == 4 || TILES == 8);                        \
  if constexpr (TILES == 1) {                                                                 \
    PAGED_START("m64n8k16", type, PAGED_8, "%4", "%5", "%6", PAGED_D(0));                     \
  } else if constexpr (TILES == 2) {                                                          \
    PAGED_START("m64n16k16", type, PAGED_16, "%8", "%9", "%10", PAGED_D(0), PAGED_D(1));      \
  } else if constexpr (TILES == 4) {                                                          \
    PAGED_START(                                                                              \
        "m64n32k16", type, PAGED_32, "%16", "%17", "%18", PAGED_D(0), PAGED_D(1), PAGED_D(2), \
        PAGED_D(3));                                                                          \
  } else {                                                                                    \
    PAGED_START(                                                                              \
        "m64n64k16", type, PAGED_64, "%32", "%33", "%34", PAGED_D(0), PAGED_D(1), PAGED_D(2), \
        PAGED_D(3), PAGED_D(4), PAGED_D(5), PAGED_D(6), PAGED_D(7));                          \
  }

// Starts d += a b. `a`, `b`: descriptors of columns of their tiles. TILES: tiles of eight columns
// of D.
template <int TILES>
__device__ __forceinline__ void start_product(
    float (&d)[TILES][4], unsigned int a, unsigned int b, __nv_bfloat16) {
  PAGED_START_ANY("bf16");
}

template <int TILES>
__device__ __forceinline__ void start_product(
    float (&d)[TILES][4], unsigned int a, unsigned int b, __half) {
  PAGED_START_ANY("f16");
}

// The same with A in registers. `b`: columns of B's transpose, or rows of B if IS_TRANSPOSED.
// IS_FIRST: starts d = a b instead.
#define PAGED_128                                                                                \
  PAGED_64                                                                                       \
  ", %32, %33, %34, %35, %36, %37, %38, %39, %40, %41, %42, %43, %44, %45, %46, %47, %48, %49, " \
  "%50, %51, %52, %53, %54, %55, %56, %57, %58, %59, %60, %61, %62, %63"
#define PAGED_START_LEFT(shape, type, registers, of_a, of_b, of_layout, adds, transposed, ...) \
  asm volatile(                                                                                \
      "{\n"                                                                                    \
      ".reg .b64 b;\n"                                                                         \
      "mov.b64 b, {" of_b ", " of_layout                                                       \
      "};\n"                                                                                   \
      "wgmma.mma_async.sync.aligned." shape ".f32." type "." type " {" registers "}, {" of_a   \
      "}, b, " adds ", 1, 1, " transposed                                                      \
      ";\n"                                                                                    \
      "}"                                                                                      \
      : __VA_ARGS__                                                                            \
      : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b), "n"(kTileLayout), "n"(!IS_FIRST),  \
        "n"(IS_TRANSPOSED)                                                                     \
      : "memory")
#define PAGED_START_LEFT_ANY(type)                                                                 \
  static_assert(TILES == 4 || TILES == 8 || TILES == 16);                                          \
  if constexpr (TILES == 4) {                                                                      \
    PAGED_START_LEFT(                                                                              \
        "m64n32k16", type, PAGED_32, "%16, %17, %18, %19", "%20", "%21", "%22", "%23", PAGED_D(0), \
        PAGED_D(1), PAGED_D(2), PAGED_D(3));                                                       \
  } else if constexpr (TILES == 8) {                                                               \
    PAGED_START_LEFT(                                                                              \
        "m64n64k16", type, PAGED_64, "%32, %33, %34, %35", "%36", "%37", "%38", "%39", PAGED_D(0), \
        PAGED_D(1), PAGED_D(2), PAGED_D(3), PAGED_D(4), PAGED_D(5), PAGED_D(6), PAGED_D(7));       \
  } else {                                                                                         \
    PAGED_START_LEFT(                                                                              \
        "m64n128k16", type, PAGED_128, "%64, %65, %66, %67", "%68", "%69", "%70", "%71",           \
        PAGED_D(0), PAGED_D(1), PAGED_D(2), PAGED_D(3), PAGED_D(4), PAGED_D(5), PAGED_D(6),        \
        PAGED_D(7), PAGED_D(8), PAGED_D(9), PAGED_D(10), PAGED_D(11), PAGED_D(12), PAGED_D(13),    \
        PAGED_D(14), PAGED_D(15));                                                                 \
  }

template <bool IS_FIRST, bool IS_TRANSPOSED, int TILES>
__device__ __forceinline__ void start_product(
    float (&d)[TILES][4], const paged::FragmentA& a, unsigned int b, __nv_bfloat16) {
  PAGED_START_LEFT_ANY("bf16");
}

template <bool IS_FIRST, bool IS_TRANSPOSED, int TILES>
__device__ __forceinline__ void start_product(
    float (&d)[TILES][4], const paged::FragmentA& a, unsigned int b, __half) {
  PAGED_START_LEFT_ANY("f16");
}

#undef PAGED_D
#undef PAGED_START
#undef PAGED_8
#undef PAGED_16
#undef PAGED_32
#undef PAGED_64
#undef PAGED_128
#undef PAGED_START_ANY
#undef PAGED_START_LEFT
#undef PAGED_START_LEFT_ANY

#endif

}  // namespace mlx_paged::cuda
