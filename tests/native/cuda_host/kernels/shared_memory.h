// Copyright © 2026 the mlx_paged authors. Apache-2.0.
//
// Stands in for csrc/cuda/kernels/shared_memory.h where kernels run on the CPU.

#pragma once

#include "linear_math.h"

namespace mlx_paged::cuda {

template <int WARPS>
void barrier_of_warps() {
  fibers::meet(fibers::block->of_warps, 32 * WARPS, [] {});
}

inline Eight load_shared(unsigned int address) {
  return fibers::shared_at<Eight>(address);
}

inline void load_shared_pair(unsigned int address, unsigned int& a, unsigned int& b) {
  a = fibers::shared_at<unsigned int>(address);
  b = fibers::shared_at<unsigned int>(address + 4);
}

inline unsigned int load_shared_word(unsigned int address) {
  return fibers::shared_at<unsigned int>(address);
}

inline unsigned short load_shared_half(unsigned int address) {
  return fibers::shared_at<unsigned short>(address);
}

inline unsigned int load_shared_byte(unsigned int address) {
  return fibers::shared_at<unsigned char>(address);
}

inline void store_shared(unsigned int address, Eight v) {
  fibers::shared_at<Eight>(address) = v;
}

inline void store_shared_word(unsigned int address, unsigned int v) {
  fibers::shared_at<unsigned int>(address) = v;
}

inline void store_shared_half(unsigned int address, unsigned short v) {
  fibers::shared_at<unsigned short>(address) = v;
}

inline void store_shared_byte(unsigned int address, unsigned int v) {
  fibers::shared_at<unsigned char>(address) = static_cast<unsigned char>(v);
}

inline void copy_part_async(unsigned int to, const void* from, int bytes, paged::CachePolicy) {
  fibers::start_copy(to, from, 16, bytes);
}

template <int BYTES>
void copy_few_async(unsigned int to, const void* from, bool exists) {
  fibers::start_copy(to, from, BYTES, exists ? BYTES : 0);
}

inline Eight load_x(const void* p) {
  fibers::require(reinterpret_cast<size_t>(p) % 16 == 0, "x is read at a multiple of 16 bytes");
  return *static_cast<const Eight*>(p);
}

template <typename V>
const V* as_written(const void* p) {
  return static_cast<const V*>(p);
}

inline unsigned int masked_or(unsigned int v, unsigned int mask, unsigned int set) {
  return (v & mask) | set;
}

inline void cluster_barrier() {
  fibers::cluster_barrier();
}

inline void end_of_cluster() {
  fibers::cluster_barrier();
}

inline float4 load_of_rank(unsigned int address, int rank) {
  return fibers::shared_of_rank<float4>(address, rank);
}

inline float4 sum_of(float4 a, float4 b) {
  return make_float4(a.x + b.x, a.y + b.y, a.z + b.z, a.w + b.w);
}

inline float4 sum_of_parts(float4 (&sum)[kLinearParts]) {
  for (int apart = 1; apart < kLinearParts; apart *= 2) {
    for (int i = 0; i < kLinearParts; i += 2 * apart) {
      sum[i] = sum_of(sum[i], sum[i + apart]);
    }
  }
  return sum[0];
}

}  // namespace mlx_paged::cuda
