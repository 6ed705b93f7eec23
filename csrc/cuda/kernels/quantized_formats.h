// Copyright © 2026 the mlx_paged authors. Apache-2.0.
//
// The kinds of quantized weights that kernels multiply, for files that are compiled once for each
// number of bits.

#pragma once

#define PAGED_CODE_DTYPES(X, format, bits, group) \
  X(float16, __half, format, bits, group)         \
  X(bfloat16, __nv_bfloat16, format, bits, group)
#define PAGED_CODE_GROUPS(X, bits)       \
  PAGED_CODE_DTYPES(X, affine, bits, 32) \
  PAGED_CODE_DTYPES(X, affine, bits, 64) \
  PAGED_CODE_DTYPES(X, affine, bits, 128)

// X(dtype, type, format, bits, group) for weights of PAGED_CODE_BITS bits.
#if PAGED_CODE_BITS == 4
#define PAGED_FOR_EACH_CODE_FORMAT(X) PAGED_CODE_GROUPS(X, 4) PAGED_CODE_DTYPES(X, mxfp4, 4, 32)
#elif PAGED_CODE_BITS == 8
#define PAGED_FOR_EACH_CODE_FORMAT(X) PAGED_CODE_GROUPS(X, 8) PAGED_CODE_DTYPES(X, mxfp8, 8, 32)
#elif PAGED_CODE_BITS == 2 || PAGED_CODE_BITS == 3 || PAGED_CODE_BITS == 5 || PAGED_CODE_BITS == 6
#define PAGED_FOR_EACH_CODE_FORMAT(X) PAGED_CODE_GROUPS(X, PAGED_CODE_BITS)
#else
#error "PAGED_CODE_BITS must be 2, 3, 4, 5, 6 or 8"
#endif
