// Copyright © 2026 the mlx_paged authors. Apache-2.0.
//
// Every instantiation there is, once: the .metal files expand these lists, and the host's dispatch
// chooses from them. X(...) receives the arguments given after it and then an entry.

#pragma once

// Name and type of the dtypes of a pool.
#define PAGED_FOR_EACH_DTYPE(X) \
  X(float32, float)             \
  X(float16, half)              \
  X(bfloat16, bfloat)

// Bits and type of what copy_strided moves.
#define PAGED_FOR_EACH_WORD(X) \
  X(16, ushort)                \
  X(32, uint)

// Head dims of keys and values. 576 and 512: latent attention.
#define PAGED_FOR_EACH_NARROW_DIM(X, ...) \
  X(__VA_ARGS__, 32, 32)                  \
  X(__VA_ARGS__, 64, 64)                  \
  X(__VA_ARGS__, 80, 80)                  \
  X(__VA_ARGS__, 96, 96)                  \
  X(__VA_ARGS__, 112, 112)                \
  X(__VA_ARGS__, 128, 128)                \
  X(__VA_ARGS__, 192, 128)                \
  X(__VA_ARGS__, 192, 192)                \
  X(__VA_ARGS__, 256, 256)

#define PAGED_FOR_EACH_WIDE_DIM(X, ...) \
  X(__VA_ARGS__, 512, 512)              \
  X(__VA_ARGS__, 576, 512)

#define PAGED_FOR_EACH_HEAD_DIM(X, ...)     \
  PAGED_FOR_EACH_NARROW_DIM(X, __VA_ARGS__) \
  PAGED_FOR_EACH_WIDE_DIM(X, __VA_ARGS__)

#define PAGED_FOR_EACH_V_DIM(X, ...) \
  X(__VA_ARGS__, 32)                 \
  X(__VA_ARGS__, 64)                 \
  X(__VA_ARGS__, 80)                 \
  X(__VA_ARGS__, 96)                 \
  X(__VA_ARGS__, 112)                \
  X(__VA_ARGS__, 128)                \
  X(__VA_ARGS__, 192)                \
  X(__VA_ARGS__, 256)                \
  X(__VA_ARGS__, 512)

// Queries (rows x heads of a group) of paged_decode: what vector units keep up with.
#define PAGED_FOR_EACH_DECODE_QUERIES(X, ...) \
  X(__VA_ARGS__, 1)                           \
  X(__VA_ARGS__, 2)                           \
  X(__VA_ARGS__, 3)

// Rows of the matrix of paged_decode_matrix. More of them hold more results in registers, so wide
// heads stop earlier.
#define PAGED_FOR_EACH_NARROW_MATRIX(X, ...) \
  X(__VA_ARGS__, 8)                          \
  X(__VA_ARGS__, 16)                         \
  X(__VA_ARGS__, 32)                         \
  X(__VA_ARGS__, 64)

#define PAGED_FOR_EACH_WIDE_MATRIX(X, ...) \
  X(__VA_ARGS__, 8)                        \
  X(__VA_ARGS__, 16)                       \
  X(__VA_ARGS__, 32)

// Rows of the matrix of paged_prefill, likewise; the widest heads have none.
#define PAGED_FOR_EACH_PREFILL(X, ...) \
  X(__VA_ARGS__, 32, 32, 32)           \
  X(__VA_ARGS__, 32, 32, 64)           \
  X(__VA_ARGS__, 64, 64, 32)           \
  X(__VA_ARGS__, 64, 64, 64)           \
  X(__VA_ARGS__, 80, 80, 32)           \
  X(__VA_ARGS__, 80, 80, 64)           \
  X(__VA_ARGS__, 96, 96, 32)           \
  X(__VA_ARGS__, 96, 96, 64)           \
  X(__VA_ARGS__, 112, 112, 32)         \
  X(__VA_ARGS__, 112, 112, 64)         \
  X(__VA_ARGS__, 128, 128, 32)         \
  X(__VA_ARGS__, 128, 128, 64)         \
  X(__VA_ARGS__, 192, 128, 32)         \
  X(__VA_ARGS__, 192, 192, 32)         \
  X(__VA_ARGS__, 256, 256, 32)
