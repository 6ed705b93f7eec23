// Copyright © 2026 the mlx_paged authors. Apache-2.0.
//
// Maps a SIMD-group to a warp with all lanes active.

#pragma once

#include "language.h"

namespace metal {

enum class mem_flags { mem_none, mem_device, mem_threadgroup };

METAL_FUNC void threadgroup_barrier(mem_flags) {
  __syncthreads();
}

METAL_FUNC void simdgroup_barrier(mem_flags) {
  __syncwarp();
}

template <typename T>
METAL_FUNC T simd_shuffle_xor(T value, ushort mask) {
  return __shfl_xor_sync(0xffffffffu, value, hardware_lane(mask));
}

template <typename T>
METAL_FUNC T simd_shuffle(T value, ushort lane) {
  return __shfl_sync(0xffffffffu, value, hardware_lane(lane));
}

METAL_FUNC float simd_max(float value) {
  PAGED_UNROLL
  for (int mask = 16; mask > 0; mask /= 2) {
    value = fmaxf(value, __shfl_xor_sync(0xffffffffu, value, mask));
  }
  return value;
}

METAL_FUNC uint simd_max(uint value) {
  return __reduce_max_sync(0xffffffffu, value);
}

METAL_FUNC float simd_min(float value) {
  return -simd_max(-value);
}

METAL_FUNC bool simd_all(bool value) {
  return __all_sync(0xffffffffu, value);
}

METAL_FUNC float simd_sum(float value) {
  PAGED_UNROLL
  for (int mask = 16; mask > 0; mask /= 2) {
    value += __shfl_xor_sync(0xffffffffu, value, mask);
  }
  return value;
}

namespace fast {
METAL_FUNC float exp2(float x) {
  float y;
  asm("ex2.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(x));
  return y;
}
}  // namespace fast

METAL_FUNC uint popcount(uint x) {
  return uint(__popc(x));
}

METAL_FUNC float clamp(float x, float least, float most) {
  return fminf(fmaxf(x, least), most);
}

namespace precise {
METAL_FUNC float tanh(float x) {
  return ::tanhf(x);
}

METAL_FUNC float sqrt(float x) {
  return ::sqrtf(x);
}
METAL_FUNC float cos(float x) {
  return ::cosf(x);
}
METAL_FUNC float sin(float x) {
  return ::sinf(x);
}
METAL_FUNC float exp(float x) {
  return ::expf(x);
}
METAL_FUNC float log(float x) {
  return ::logf(x);
}
}  // namespace precise

}  // namespace metal
