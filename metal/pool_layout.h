// Copyright © 2026 the mlx_paged authors. Apache-2.0.
//
// Layout and rotation of KV pools. The kernels for Metal, NVIDIA and the CPU, and the host, all
// take these numbers from here, because codes that one of them writes must have the same bits for
// the others. Includes nothing itself.

#pragma once

// Always inlined on the host: the CPU's kernels are compiled once per instruction set, and the
// linker would keep an arbitrary one of the copies.
#if defined(__METAL_VERSION__) || defined(METAL_FUNC) || defined(__CUDACC__)
#define PAGED_CONSTEXPR constexpr
#else
#define PAGED_CONSTEXPR [[gnu::always_inline]] constexpr
#endif

namespace paged {

// Formats of a pool. INT8: one code per number, one fp16 scale per head. INT4: one nibble per
// number; an fp16 scale and minimum per group. FP8: e4m3, no scales.
enum { FORMAT_PLAIN = 0, FORMAT_INT8 = 1, FORMAT_INT4 = 2, FORMAT_FP8 = 3 };

enum {
  MAX_HEAD_DIM = 576,
  CODE_GROUP = 32,  // dims that share a scale and a minimum in int4
};

// Bytes of the codes of one head of a token in a quantized pool.
PAGED_CONSTEXPR int code_bytes(int format, int dim) {
  return format == FORMAT_INT4 ? dim / 2 : dim;
}

// Bytes of the scales of one head of a token.
PAGED_CONSTEXPR int tail_bytes(int format, int dim) {
  return format == FORMAT_INT8   ? 2
         : format == FORMAT_INT4 ? 4 * ((dim + CODE_GROUP - 1) / CODE_GROUP)
                                 : 0;
}

// Integer keys are rotated, which spreads outliers of single dims over all dims. Scores do not
// change as long as queries are rotated too.
PAGED_CONSTEXPR bool rotates_keys(int format) {
  return format == FORMAT_INT8 || format == FORMAT_INT4;
}

// Dims per run of the rotation: the largest power of two that divides the head dim. The rotation
// flips the signs of some dims and then applies a Walsh-Hadamard transform to each run.
PAGED_CONSTEXPR int rotated_run(int dim) {
  return dim & -dim;
}

// True if the rotation flips the sign of this dim.
PAGED_CONSTEXPR bool changes_sign(int dim) {
  unsigned int x = (unsigned int)(dim + 1) * 0x9e3779b1u;
  x = (x ^ (x >> 15)) * 0x85ebca77u;
  return ((x ^ (x >> 13)) >> 31) != 0;
}

}  // namespace paged

#undef PAGED_CONSTEXPR
