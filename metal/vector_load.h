// Copyright © 2026 the mlx_paged authors. Apache-2.0.
//
// Loads and stores of 16 bytes per lane: a `chunk` is a uint4 with any contents.

#pragma once

#include <metal_stdlib>

using namespace metal;

namespace paged {

// Elements of T per chunk.
template <typename T>
METAL_FUNC constexpr int chunk_size() {
  return 16 / int(sizeof(T));
}

METAL_FUNC void unpack(uint4 chunk, thread float* out, float) {
  out[0] = as_type<float>(chunk.x);
  out[1] = as_type<float>(chunk.y);
  out[2] = as_type<float>(chunk.z);
  out[3] = as_type<float>(chunk.w);
}

METAL_FUNC void unpack_pair(uint pair, thread float* out, half) {
  half2 values = as_type<half2>(pair);
  out[0] = float(values.x);
  out[1] = float(values.y);
}

// A bfloat is the upper half of a float.
METAL_FUNC void unpack_pair(uint pair, thread float* out, bfloat) {
  out[0] = as_type<float>(pair << 16);
  out[1] = as_type<float>(pair & 0xffff0000u);
}

template <typename T>
METAL_FUNC void unpack(uint4 chunk, thread float* out, T type) {
  unpack_pair(chunk.x, out, type);
  unpack_pair(chunk.y, out + 2, type);
  unpack_pair(chunk.z, out + 4, type);
  unpack_pair(chunk.w, out + 6, type);
}

METAL_FUNC uint4 pack(thread const float* values, float) {
  uint4 chunk;
  chunk.x = as_type<uint>(values[0]);
  chunk.y = as_type<uint>(values[1]);
  chunk.z = as_type<uint>(values[2]);
  chunk.w = as_type<uint>(values[3]);
  return chunk;
}

template <typename T>
METAL_FUNC uint pack_pair(float low, float high, T) {
  return uint(as_type<ushort>(T(low))) | uint(as_type<ushort>(T(high))) << 16;
}

template <typename T>
METAL_FUNC uint4 pack(thread const float* values, T type) {
  uint4 chunk;
  chunk.x = pack_pair(values[0], values[1], type);
  chunk.y = pack_pair(values[2], values[3], type);
  chunk.z = pack_pair(values[4], values[5], type);
  chunk.w = pack_pair(values[6], values[7], type);
  return chunk;
}

// A thread's chunk of a row, in a grid of (rows, chunks of a row / threads).
struct RowChunk {
  ulong row;
  int chunk;
};

METAL_FUNC RowChunk row_chunk(uint3 group_id, uint3 group_size, uint thread_id) {
  RowChunk at;
  at.row = group_id.x;
  at.chunk = int(group_id.y * group_size.x + thread_id);
  return at;
}

// Reads and writes a row's chunks where they are. csrc/cuda/kernels/ordered_rows.h has an
// alternative.
struct InPlace {
  METAL_FUNC static uint4 read(device const uint4* row, int chunk) { return row[chunk]; }
  METAL_FUNC static void write(device uint4* row, int chunk, uint4 values) { row[chunk] = values; }
};

// Rounds a number to T.
template <typename T>
METAL_FUNC float rounded(float value) {
  return float(T(value));
}

}  // namespace paged
