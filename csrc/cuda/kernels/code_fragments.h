// Copyright © 2026 the mlx_paged authors. Apache-2.0.
//
// Converts codes of quantized pools to fp16 operands. Every format's codes are exact in fp16; int8
// and int4 become the low bits of 1024 + n, whose last bit is worth 1.
//
// ldmatrix moves 16 bits, so each lane gets two adjacent 8-bit codes or four 4-bit ones. The
// mapping of dims to rows and columns of a product is free as long as both operands agree:
//   keys    lane 4 r + c holds four bytes of each 16-byte chunk of token r
//   values  it holds bytes 2 r and 2 r + 1 of a chunk, for tokens 2 c and 2 c + 1.

#pragma once

#include "kernel_table.h"
#include "tensor_core.h"

namespace paged {

__device__ __forceinline__ __half2 as_halves(unsigned int bits) {
  return *reinterpret_cast<__half2*>(&bits);
}

__device__ __forceinline__ unsigned int bits_of(__half2 halves) {
  return *reinterpret_cast<unsigned int*>(&halves);
}

// Converts the two biased bytes of a word that `selector` places below 0x64; the caller flipped
// their sign bits.
__device__ __forceinline__ __half2 from_bytes(unsigned int word, unsigned int selector) {
  unsigned int both = __byte_perm(word, 0x64646464u, selector);
  return __hsub2(as_halves(both), as_halves(0x64806480u));
}

// Converts nibbles i and i + 4 of a word.
__device__ __forceinline__ void from_nibbles(__half2 (&to)[4], unsigned int word) {
  __half2 sixteenth = as_halves(0x2c002c00u);
  __half2 less = as_halves(0xd400d400u);  // -64
#pragma unroll
  for (int i = 0; i < 4; i += 2) {
    unsigned int pairs = word >> (4 * i);
    to[i] = __hsub2(as_halves((pairs & 0x000f000fu) | 0x64006400u), as_halves(0x64006400u));
    to[i + 1] = __hfma2(as_halves((pairs & 0x00f000f0u) | 0x64006400u), sixteenth, less);
  }
}

// Converts two e4m3 codes from the lower or upper half of a word.
__device__ __forceinline__ __half2 from_e4m3_pair(unsigned int word, bool upper) {
#if __CUDA_ARCH__ >= 890
  unsigned short pair = static_cast<unsigned short>(upper ? word >> 16 : word);
  unsigned int both;
  asm("cvt.rn.f16x2.e4m3x2 %0, %1;" : "=r"(both) : "h"(pair));
  return as_halves(both);
#else
  unsigned int both = __byte_perm(word, 0, upper ? 0x3424 : 0x1404);  // each code above a zero byte
  unsigned int magnitude = both & 0x7f007f00u;
  __half2 x =
      __hmul2(as_halves((both & 0x80008000u) | magnitude >> 1), as_halves(0x5c005c00u));  // by 2^8
  unsigned int nan = ((magnitude + 0x01000100u) & 0x80008000u) >> 15;
  return as_halves(bits_of(x) | nan * 0x7e00u);
#endif
}

// Maps a lane's codes to its fragment elements in slices 2 i and 2 i + 1 (int4) or slice i. A
// query's B fragment, [0] and [1], holds the same dims as the keys' A fragment.
template <int FORMAT>
struct KeyCodes {
  static constexpr int SLICES = FORMAT == FORMAT_INT4 ? 2 : 1;  // per chunk of 16 bytes
  static constexpr int NUMBERS = 4 * SLICES;  // adjacent numbers of a chunk that a lane holds

  // Index, among a lane's numbers, of its element j (of four) in slice s of a chunk.
  __device__ __forceinline__ static constexpr int number(int s, int j) {
    return FORMAT == FORMAT_INT4 ? 2 * s + j / 2 + j % 2 * 4 : j;
  }

  // Converts the words of tokens r and r + 8.
  __device__ __forceinline__ static void decode(
      FragmentA (&to)[SLICES], unsigned int upper, unsigned int lower) {
    unsigned int words[2] = {upper, lower};
#pragma unroll
    for (int i = 0; i < 2; i++) {
      if constexpr (FORMAT == FORMAT_INT8) {
        unsigned int turned = words[i] ^ 0x80808080u;
        to[0][i] = bits_of(from_bytes(turned, 0x4140));
        to[0][2 + i] = bits_of(from_bytes(turned, 0x4342));
      } else if constexpr (FORMAT == FORMAT_FP8) {
        to[0][i] = bits_of(from_e4m3_pair(words[i], false));
        to[0][2 + i] = bits_of(from_e4m3_pair(words[i], true));
      } else {
        __half2 pairs[4];
        from_nibbles(pairs, words[i]);
#pragma unroll
        for (int s = 0; s < SLICES; s++) {
          to[s][i] = bits_of(pairs[2 * s]);
          to[s][2 + i] = bits_of(pairs[2 * s + 1]);
        }
      }
    }
  }
};

template <int FORMAT>
struct ValueCodes {
  static constexpr int SLICES = FORMAT == FORMAT_INT4 ? 2 : 1;  // per chunk

  // Dim of row r of a product in slice s of a chunk; row r + 8 is the next dim.
  __device__ __forceinline__ static int dim(int s, int r) {
    return FORMAT == FORMAT_INT4 ? 4 * r + 2 * s : 2 * r;
  }

  // Converts the words of tokens 2c and 2c + 1 and of 2c + 8 and 2c + 9, with both scales (and
  // minima).
  __device__ __forceinline__ static void decode(
      FragmentA (&to)[SLICES], unsigned int upper, unsigned int lower,
      const unsigned int (&scales)[2], const unsigned int (&minima)[2]) {
    unsigned int words[2] = {upper, lower};
#pragma unroll
    for (int i = 0; i < 2; i++) {
      __half2 scale = as_halves(scales[i]);
      if constexpr (FORMAT == FORMAT_INT8) {
        unsigned int turned = words[i] ^ 0x80808080u;
        to[0][2 * i] = bits_of(__hmul2(from_bytes(turned, 0x4240), scale));
        to[0][2 * i + 1] = bits_of(__hmul2(from_bytes(turned, 0x4341), scale));
      } else if constexpr (FORMAT == FORMAT_FP8) {
        unsigned int sorted = __byte_perm(words[i], 0, 0x3120);  // by dim
        to[0][2 * i] = bits_of(from_e4m3_pair(sorted, false));
        to[0][2 * i + 1] = bits_of(from_e4m3_pair(sorted, true));
      } else {
        __half2 pairs[4];
        from_nibbles(pairs, words[i]);
        __half2 minimum = as_halves(minima[i]);
#pragma unroll
        for (int s = 0; s < SLICES; s++) {
          to[s][2 * i] = bits_of(__hfma2(pairs[2 * s], scale, minimum));
          to[s][2 * i + 1] = bits_of(__hfma2(pairs[2 * s + 1], scale, minimum));
        }
      }
    }
  }
};

}  // namespace paged
