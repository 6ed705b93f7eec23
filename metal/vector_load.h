// Copyright © 2026 the mlx_paged authors. Apache-2.0.
//
// Device memory is read and written 16 bytes a lane: a `chunk` is uint4, whatever its contents.

#pragma once

#include <metal_stdlib>

using namespace metal;

namespace paged {

// Elements of T in a chunk.
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

}  // namespace paged
