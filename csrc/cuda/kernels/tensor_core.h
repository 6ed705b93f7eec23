// Copyright © 2026 the mlx_paged authors. Apache-2.0.
//
// Tensor core and asynchronous copy instructions of sm_80 and later, for attention and linear
// layers. Fragments are named by their role in D[16 x 8] += A[16 x 16] B[16 x 8]. Lane 4 r + c
// holds
//   A  rows r, r + 8 x columns {2c, 2c+1}, {2c+8, 2c+9}: [r][2c], [r+8][2c], [r][2c+8], [r+8][2c+8]
//   B  rows 2c, 2c+1 and 2c+8, 2c+9 of column r
//   D  [r][2c], [r][2c+1], [r+8][2c], [r+8][2c+1].

#pragma once

#include "../msl/metal_stdlib"

namespace paged {

typedef unsigned int FragmentA[4];
typedef unsigned int FragmentB[2];
typedef float FragmentD[4];

__device__ __forceinline__ unsigned int shared_address(const void* at) {
  return static_cast<unsigned int>(__cvta_generic_to_shared(at));
}

// Loads four 8 x 8 matrices of 16-bit elements; lanes 8 i to 8 i + 7 give the row addresses of
// matrix i.
__device__ __forceinline__ void load_matrices(FragmentA& to, unsigned int row) {
  asm volatile("ldmatrix.sync.aligned.m8n8.x4.shared.b16 {%0, %1, %2, %3}, [%4];"
               : "=r"(to[0]), "=r"(to[1]), "=r"(to[2]), "=r"(to[3])
               : "r"(row));
}

__device__ __forceinline__ void load_matrices_transposed(FragmentA& to, unsigned int row) {
  asm volatile("ldmatrix.sync.aligned.m8n8.x4.trans.shared.b16 {%0, %1, %2, %3}, [%4];"
               : "=r"(to[0]), "=r"(to[1]), "=r"(to[2]), "=r"(to[3])
               : "r"(row));
}

__device__ __forceinline__ void multiply_accumulate(
    FragmentD& d, const FragmentA& a, const FragmentB& b, __half) {
  asm("mma.sync.aligned.m16n8k16.row.col.f32.f16.f16.f32 "
      "{%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9}, {%0, %1, %2, %3};"
      : "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3])
      : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b[0]), "r"(b[1]));
}

__device__ __forceinline__ void multiply_accumulate(
    FragmentD& d, const FragmentA& a, const FragmentB& b, __nv_bfloat16) {
  asm("mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32 "
      "{%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9}, {%0, %1, %2, %3};"
      : "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3])
      : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b[0]), "r"(b[1]));
}

__device__ __forceinline__ unsigned int pack(float low, float high, __half) {
  __half2 pair = __floats2half2_rn(low, high);
  return *reinterpret_cast<unsigned int*>(&pair);
}

__device__ __forceinline__ unsigned int pack(float low, float high, __nv_bfloat16) {
  __nv_bfloat162 pair = __floats2bfloat162_rn(low, high);
  return *reinterpret_cast<unsigned int*>(&pair);
}

// Rounds D to T and transposes it into the B operand of a product over D's rows.
template <typename T>
__device__ __forceinline__ void transpose(FragmentB& to, const FragmentD& from) {
#pragma unroll
  for (int i = 0; i < 2; i++) {
    asm("movmatrix.sync.aligned.m8n8.trans.b16 %0, %1;"
        : "=r"(to[i])
        : "r"(pack(from[2 * i], from[2 * i + 1], T(0.0f))));
  }
}

// L2 cache policy of a line. Keys and values are read once; partials are read soon after they are
// written. Without a policy the cache would evict partials to keep keys.
struct CachePolicy {
  unsigned long long bits;
};

__device__ __forceinline__ CachePolicy evict_first() {
  CachePolicy policy;
  asm volatile("createpolicy.fractional.L2::evict_first.b64 %0, 1.0;" : "=l"(policy.bits));
  return policy;
}

__device__ __forceinline__ CachePolicy evict_normal() {
  CachePolicy policy;
  asm volatile("createpolicy.fractional.L2::evict_normal.b64 %0, 1.0;" : "=l"(policy.bits));
  return policy;
}

__device__ __forceinline__ CachePolicy evict_last() {
  CachePolicy policy;
  asm volatile("createpolicy.fractional.L2::evict_last.b64 %0, 1.0;" : "=l"(policy.bits));
  return policy;
}

__device__ __forceinline__ float4 load(const float* from, CachePolicy policy) {
  float4 v;
  asm volatile("ld.global.L2::cache_hint.v4.f32 {%0, %1, %2, %3}, [%4], %5;"
               : "=f"(v.x), "=f"(v.y), "=f"(v.z), "=f"(v.w)
               : "l"(from), "l"(policy.bits));
  return v;
}

__device__ __forceinline__ void store(float* to, const float (&v)[4], CachePolicy policy) {
  asm volatile("st.global.L2::cache_hint.v4.f32 [%0], {%1, %2, %3, %4}, %5;" ::"l"(to), "f"(v[0]),
               "f"(v[1]), "f"(v[2]), "f"(v[3]), "l"(policy.bits)
               : "memory");
}

// Copies 16 bytes from device to shared memory asynchronously; zeros if `exists` is false.
__device__ __forceinline__ void copy_async(
    unsigned int to, const void* from, bool exists, CachePolicy policy) {
  asm volatile("cp.async.cg.shared.global.L2::cache_hint [%0], [%1], 16, %2, %3;" ::"r"(to),
               "l"(from), "r"(exists ? 16 : 0), "l"(policy.bits)
               : "memory");
}

// The same for data that other blocks read too, with the default cache policy.
__device__ __forceinline__ void copy_async(unsigned int to, const void* from, bool exists) {
  asm volatile("cp.async.cg.shared.global [%0], [%1], 16, %2;" ::"r"(to), "l"(from),
               "r"(exists ? 16 : 0)
               : "memory");
}

// Offset of a 16-byte chunk of a row in a tile. The XOR puts the eight rows of a matrix into
// different banks.
template <int ROW_CHUNKS>
__device__ __forceinline__ unsigned int tile_offset(int row, int chunk) {
  return (row * ROW_CHUNKS + (chunk ^ (row & 7))) * 16;
}

// Groups all copies since the last commit.
__device__ __forceinline__ void commit_copies() {
  asm volatile("cp.async.commit_group;" ::: "memory");
}

// Waits until at most PENDING groups of this lane are in flight.
template <int PENDING>
__device__ __forceinline__ void wait_for_copies() {
  asm volatile("cp.async.wait_group %0;" ::"n"(PENDING) : "memory");
}

}  // namespace paged
