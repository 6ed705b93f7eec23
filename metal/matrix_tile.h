// Copyright © 2026 the mlx_paged authors. Apache-2.0.
//
// Loads rows of a pool from device memory into the 8 x 8 matrices of a SIMD-group.

#pragma once

#include <metal_simdgroup_matrix>
#include <metal_stdlib>

#include "attention_shape.h"
#include "block_table.h"
#include "language.h"
#include "pool_codes.h"
#include "vector_load.h"

using namespace metal;

namespace paged {

// Elements of an 8 x 8 matrix that a lane holds: (row, column) and (row, column + 1). All Apple
// GPUs share this layout, and MLX's kernels rely on it too.
METAL_FUNC int matrix_row(uint lane) {
  return int(((lane / 4) & 4) + (lane / 2) % 4);
}

METAL_FUNC int matrix_column(uint lane) {
  return int(((lane / 4) & 2) * 2 + (lane % 2) * 2);
}

// Columns [begin, end) of a head that one SIMD-group works on, in elements.
struct Slice {
  int begin;
  int end;
};

METAL_FUNC Slice slice_of(int dim, int columns, uint simd_id) {
  Slice slice;
  slice.begin = min(dim, int(simd_id) * columns);
  slice.end = min(dim, slice.begin + columns);
  return slice;
}

// Loads TOKENS rows of WIDTH elements with THREADS threads (a SIMD-group or a threadgroup), 16
// bytes each. All loads are issued first, so that they are in flight together; the stores follow.
template <typename T, int TOKENS, int WIDTH, int THREADS>
struct TileLoader {
  static constexpr constant int CHUNK = chunk_size<T>();
  static constexpr constant int ROW_CHUNKS = WIDTH / CHUNK;
  static constexpr constant int LOADS = ceil_div(TOKENS * ROW_CHUNKS, THREADS);

  uint4 chunks[LOADS];

  // Source of a thread's load number i.
  struct Source {
    int chunk;  // within the tile
    int token;
    int element;
    bool exists;
  };

  METAL_FUNC static Source source_of(int i, int first, int end, Slice slice, uint thread_id) {
    Source at;
    at.chunk = i * THREADS + int(thread_id);
    at.token = first + at.chunk / ROW_CHUNKS;
    at.element = slice.begin + at.chunk % ROW_CHUNKS * CHUNK;
    at.exists = at.chunk < TOKENS * ROW_CHUNKS && at.token < end && at.element < slice.end;
    return at;
  }

  // Loads tokens [first, first + TOKENS) of a sequence; tokens from `end` on become zeros.
  METAL_FUNC void load(
      device const T* pool, int dim, int num_heads, int head, BlockTable table, int first, int end,
      Slice slice, uint thread_id) thread {
    PAGED_UNROLL
    for (int i = 0; i < LOADS; i++) {
      Source at = source_of(i, first, end, slice, thread_id);
      chunks[i] = uint4(0);
      if (at.exists) {
        ulong row = table.slot(at.token) * num_heads + head;
        chunks[i] = *(device const uint4*)(pool + row * dim + at.element);
      }
    }
  }

  // Adjacent chunks of a row that share an int4 group; the first of their lanes loads its scale.
  static constexpr constant int GROUP_CHUNKS = ROW_CHUNKS % (CODE_GROUP / CHUNK) == 0
                                                   ? CODE_GROUP / CHUNK
                                               : ROW_CHUNKS % 2 == 0 ? 2
                                                                     : 1;

  // The same for a quantized pool.
  METAL_FUNC void load_quantized(
      device const uchar* pool, int format, int dim, int num_heads, int head, BlockTable table,
      int first, int end, Slice slice, uint thread_id) thread {
    PAGED_UNROLL
    for (int i = 0; i < LOADS; i++) {
      Source at = source_of(i, first, end, slice, thread_id);
      chunks[i] = uint4(0);
      if (at.exists) {
        CodeOffsets offsets = code_offsets(table, at.token, num_heads, head, format, dim);
        chunks[i] = load_codes<T>(pool, offsets, at.element, format);
        if (format == FORMAT_INT4 && at.chunk % GROUP_CHUNKS == 0) {
          chunks[i].z = load_group(pool, offsets, at.element);
        }
      }
      if (format == FORMAT_INT4) {
        int lane = int(thread_id) % 32;
        chunks[i].z = simd_shuffle(chunks[i].z, ushort(lane - lane % GROUP_CHUNKS));
      }
    }
  }

  // Stores numbers decoded from a quantized pool; int8 stays unscaled.
  METAL_FUNC void store(threadgroup T* tile, int pitch, int format, uint thread_id) const thread {
    PAGED_UNROLL
    for (int i = 0; i < LOADS; i++) {
      int chunk = i * THREADS + int(thread_id);
      if (chunk < TOKENS * ROW_CHUNKS) {
        threadgroup T* to = tile + chunk / ROW_CHUNKS * pitch + chunk % ROW_CHUNKS * CHUNK;
        if (format == FORMAT_PLAIN) {
          *(threadgroup uint4*)to = chunks[i];
        } else {
          float values[CHUNK];
          unpack_codes<T>(chunks[i], values, format);
          *(threadgroup uint4*)to = pack(values, T(0));
        }
      }
    }
  }
};

}  // namespace paged
