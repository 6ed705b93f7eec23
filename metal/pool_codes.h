// Copyright © 2026 the mlx_paged authors. Apache-2.0.
//
// Codes and scales of quantized pools: their places and values.
//
// A `chunk` of codes has as many elements as 16 bytes of T. It takes fewer bytes, so a uint4 has
// room for the scales of int4 as well.

#pragma once

#include <metal_stdlib>

#include "block_table.h"
#include "kernel_table.h"
#include "language.h"
#include "pool_options.h"
#include "vector_load.h"

using namespace metal;

namespace paged {

// Byte offsets of one head of a token within the pool.
struct CodeOffsets {
  ulong codes;
  ulong scales;
};

METAL_FUNC CodeOffsets
code_offsets(ulong block, int in_block, int shift, int heads, int head, int format, int dim) {
  int size = code_bytes(format, dim);
  int tail = tail_bytes(format, dim);
  ulong rows = ulong(heads) << shift;
  ulong begin = block * (rows * ulong(size + tail));
  CodeOffsets offsets;
  offsets.codes = begin + ulong(in_block * heads + head) * ulong(size);
  offsets.scales = begin + rows * ulong(size) + ulong((head << shift) + in_block) * ulong(tail);
  return offsets;
}

METAL_FUNC CodeOffsets
code_offsets(BlockTable table, int token, int heads, int head, int format, int dim) {
  int in_block = token & ((1 << table.shift) - 1);
  return code_offsets(
      ulong(table.blocks[token >> table.shift]), in_block, table.shift, heads, head, format, dim);
}

// Loads the codes of a chunk of elements from `element` on.
template <typename T>
METAL_FUNC uint4
load_codes(device const uchar* pool, CodeOffsets offsets, int element, int format) {
  uint4 chunk = uint4(0);
  constexpr bool WIDE = chunk_size<T>() == 8;
  if (format == FORMAT_INT4) {
    device const uchar* from = pool + offsets.codes + element / 2;
    if (WIDE) {
      chunk.x = *(device const uint*)from;
    } else {
      chunk.x = uint(*(device const ushort*)from);
    }
  } else {
    device const uchar* from = pool + offsets.codes + element;
    if (WIDE) {
      uint2 both = *(device const uint2*)from;
      chunk.x = both.x;
      chunk.y = both.y;
    } else {
      chunk.x = *(device const uint*)from;
    }
  }
  return chunk;
}

// Loads the scale (lower half) and the minimum of an element's int4 group.
METAL_FUNC uint load_group(device const uchar* pool, CodeOffsets offsets, int element) {
  return *(device const uint*)(pool + offsets.scales + element / CODE_GROUP * 4);
}

// Loads the scale of an int8 head.
METAL_FUNC float load_scale(device const uchar* pool, CodeOffsets offsets) {
  return float(*(device const half*)(pool + offsets.scales));
}

METAL_FUNC float from_e4m3(uint code) {
  uint magnitude = code & 0x7f;
  float value = magnitude < 8 ? float(magnitude) * 0.001953125f  // 2^-9
                              : as_type<float>((magnitude << 20) + (120u << 23));
  value = magnitude == 0x7f ? as_type<float>(0x7fc00000u) : value;
  return code & 0x80 ? -value : value;
}

// Converts a chunk to fp32; int8 stays unscaled.
template <typename T>
METAL_FUNC void unpack_codes(uint4 chunk, thread float* out, int format) {
  constexpr int CHUNK = chunk_size<T>();
  if (format == FORMAT_INT4) {
    half2 group = as_type<half2>(chunk.z);
    float scale = float(group.x);
    float minimum = float(group.y);
    PAGED_UNROLL
    for (int d = 0; d < CHUNK; d++) {
      out[d] = fma(float((chunk.x >> (4 * d)) & 15), scale, minimum);
    }
  } else {
    PAGED_UNROLL
    for (int d = 0; d < CHUNK; d++) {
      uint word = d < 4 ? chunk.x : chunk.y;
      if (format == FORMAT_INT8) {
        out[d] = float(as_type<int>(word << (24 - 8 * (d % 4))) >> 24);
      } else {
        out[d] = from_e4m3((word >> (8 * (d % 4))) & 0xff);
      }
    }
  }
}

// Formats of a pipeline's pools, or FORMAT_PLAIN.
METAL_FUNC int key_format(constant AttentionParams& params) {
  (void)params;  // not needed by function constants
  return !PAGED_QUANTIZED(params)  ? FORMAT_PLAIN
         : PAGED_FP8(params)       ? FORMAT_FP8
         : PAGED_INT4_KEYS(params) ? FORMAT_INT4
                                   : FORMAT_INT8;
}

METAL_FUNC int value_format(constant AttentionParams& params) {
  (void)params;  // not needed by function constants
  return !PAGED_QUANTIZED(params)    ? FORMAT_PLAIN
         : PAGED_FP8(params)         ? FORMAT_FP8
         : PAGED_INT4_VALUES(params) ? FORMAT_INT4
                                     : FORMAT_INT8;
}

// True if scores and weights are multiplied by int8 scales of a token's key and value. The scales
// are in threadgroup memory, in the 16 bytes left free after the token's row of a tile.
METAL_FUNC bool has_scales(constant AttentionParams& params) {
  (void)params;  // not needed by function constants
  return PAGED_QUANTIZED(params) && !PAGED_FP8(params) &&
         !(PAGED_INT4_KEYS(params) && PAGED_INT4_VALUES(params));
}

METAL_FUNC void load_scales(
    threadgroup float* scales, device const uchar* key_pool, device const uchar* value_pool,
    int key_dim, int value_dim, BlockTable table, int token, int end, int kv_head,
    constant AttentionParams& params) {
  int heads = params.num_kv_heads;
  if (key_format(params) == FORMAT_INT8) {
    scales[0] =
        token < end
            ? load_scale(key_pool, code_offsets(table, token, heads, kv_head, FORMAT_INT8, key_dim))
            : 0.0f;
  }
  if (value_format(params) == FORMAT_INT8) {
    scales[1] =
        token < end
            ? load_scale(
                  value_pool, code_offsets(table, token, heads, kv_head, FORMAT_INT8, value_dim))
            : 0.0f;
  }
}

METAL_FUNC float scaled_dot(
    float dot, threadgroup const float* scales, constant AttentionParams& params) {
  return key_format(params) == FORMAT_INT8 ? dot * scales[0] : dot;
}

METAL_FUNC float scaled_weight(
    float weight, threadgroup const float* scales, constant AttentionParams& params) {
  return value_format(params) == FORMAT_INT8 ? weight * scales[1] : weight;
}

}  // namespace paged
