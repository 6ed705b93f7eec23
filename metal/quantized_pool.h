// Copyright © 2026 the mlx_paged authors. Apache-2.0.
//
// Kernels that write and gather quantized pools, and rotate the queries that meet rotated keys. A
// SIMD-group handles one head of a token; lane l holds its dims l, l + 32, ...

#pragma once

#include <metal_stdlib>

#include "block_table.h"
#include "kernel_table.h"
#include "language.h"
#include "pool_codes.h"

using namespace metal;

namespace paged {

// PARTS: groups of 32 dims, enough for the kernel's largest head dim.
template <int PARTS>
struct HeadRow {
  float x[PARTS];  // zeros past the head dim

  template <typename T>
  METAL_FUNC void load(device const T* row, int dim, uint lane) thread {
    PAGED_UNROLL
    for (int i = 0; i < PARTS; i++) {
      int d = 32 * i + int(lane);
      x[i] = d < dim ? float(row[d]) : 0.0f;
    }
  }

  template <typename T>
  METAL_FUNC void store(device T* row, int dim, uint lane) const thread {
    PAGED_UNROLL
    for (int i = 0; i < PARTS; i++) {
      int d = 32 * i + int(lane);
      if (d < dim) {
        row[d] = T(x[i]);
      }
    }
  }

  METAL_FUNC void change_signs(int dim, uint lane) thread {
    PAGED_UNROLL
    for (int i = 0; i < PARTS; i++) {
      if (32 * i < dim) {
        x[i] = changes_sign(32 * i + int(lane)) ? -x[i] : x[i];
      }
    }
  }

  // Orthonormal Walsh-Hadamard transform of each run of dims.
  METAL_FUNC void transform(int dim, uint lane) thread {
    int run = rotated_run(dim);
    for (int stride = 1; stride < min(run, 32); stride *= 2) {
      bool second = (lane & uint(stride)) != 0;
      PAGED_UNROLL
      for (int i = 0; i < PARTS; i++) {
        if (32 * i < dim) {
          float other = simd_shuffle_xor(x[i], ushort(stride));
          x[i] = second ? other - x[i] : x[i] + other;
        }
      }
    }
    PAGED_UNROLL
    for (int stride = 1; stride < 16; stride *= 2) {
      if (32 * stride < run) {
        PAGED_UNROLL
        for (int i = 0; i + stride < PARTS; i++) {
          if ((i & stride) == 0) {
            float a = x[i];
            float b = x[i + stride];
            x[i] = a + b;
            x[i + stride] = a - b;
          }
        }
      }
    }
    float norm = 1.0f / precise::sqrt(float(run));
    PAGED_UNROLL
    for (int i = 0; i < PARTS; i++) {
      x[i] *= norm;
    }
  }

  METAL_FUNC void rotate(int dim, uint lane) thread {
    change_signs(dim, lane);
    transform(dim, lane);
  }

  METAL_FUNC void rotate_back(int dim, uint lane) thread {
    transform(dim, lane);
    change_signs(dim, lane);
  }
};

enum { HALF_NAN = 0x7e00, LARGEST_HALF = 0x7bff };

// Smallest half not below x >= 0, or the largest half.
METAL_FUNC ushort half_above(float x) {
  ushort bits = as_type<ushort>(half(min(x, 65504.0f)));
  bool below = float(as_type<half>(bits)) < x;
  return below && bits < LARGEST_HALF ? ushort(bits + 1) : bits;
}

// Largest half not above x, or the smallest half.
METAL_FUNC ushort half_below(float x) {
  float clamped = clamp(x, -65504.0f, 65504.0f);
  ushort bits = as_type<ushort>(half(clamped));
  if (float(as_type<half>(bits)) <= clamped) {
    return bits;
  }
  return (bits & 0x8000) ? ushort(bits + 1) : bits == 0 ? ushort(0x8001) : ushort(bits - 1);
}

METAL_FUNC bool is_finite_number(float x) {
  return (as_type<uint>(x) & 0x7f800000u) != 0x7f800000u;
}

// Numbers beyond 448 become 448; infinities become NaN.
METAL_FUNC uint to_e4m3(float x) {
  uint u = as_type<uint>(x);
  uint sign = (u >> 24) & 0x80;
  uint magnitude = u & 0x7fffffff;
  if (magnitude >= 0x7f800000) {
    return sign | 0x7f;
  }
  if (magnitude >= 0x43e00000) {
    return sign | 0x7e;
  }
  if (magnitude < 0x3c800000) {  // below 2^-6: adding 2^14 rounds at a subnormal's last bit
    return sign | (as_type<uint>(as_type<float>(magnitude) + 16384.0f) - 0x46800000);
  }
  uint rounded = magnitude + 0x7ffff + ((magnitude >> 20) & 1);
  return sign | ((rounded >> 20) - (120u << 3));
}

template <int PARTS>
METAL_FUNC void encode(
    thread const HeadRow<PARTS>& row, device uchar* pool, CodeOffsets offsets, int format, int dim,
    uint lane) {
  device uchar* codes = pool + offsets.codes;
  device half* scales = (device half*)(pool + offsets.scales);
  if (format == FORMAT_INT8) {
    float largest = 0.0f;
    bool finite = true;
    PAGED_UNROLL
    for (int i = 0; i < PARTS; i++) {
      finite = finite && is_finite_number(row.x[i]);
      largest = max(largest, abs(row.x[i]));
    }
    finite = simd_all(finite);
    largest = simd_max(largest);
    ushort scale = finite ? half_above(largest / 127.0f) : ushort(HALF_NAN);
    float size = float(as_type<half>(scale));
    float inverse = size > 0.0f ? 1.0f / size : 0.0f;
    PAGED_UNROLL
    for (int i = 0; i < PARTS; i++) {
      int d = 32 * i + int(lane);
      if (d < dim) {
        float code = finite ? rint(clamp(row.x[i] * inverse, -127.0f, 127.0f)) : 0.0f;
        codes[d] = uchar(int(code) & 0xff);
      }
    }
    if (lane == 0) {
      scales[0] = as_type<half>(scale);
    }
  } else if (format == FORMAT_INT4) {
    PAGED_UNROLL
    for (int i = 0; i < PARTS; i++) {
      if (32 * i < dim) {
        int d = 32 * i + int(lane);
        bool exists = d < dim;
        bool finite = simd_all(is_finite_number(row.x[i]));
        float lowest = simd_min(exists ? row.x[i] : INFINITY);
        float largest = simd_max(exists ? row.x[i] : -INFINITY);
        ushort minimum = finite ? half_below(lowest) : ushort(HALF_NAN);
        float base = float(as_type<half>(minimum));
        ushort scale = finite ? half_above((largest - base) / 15.0f) : ushort(HALF_NAN);
        float size = float(as_type<half>(scale));
        float inverse = size > 0.0f ? 1.0f / size : 0.0f;
        float value = finite ? clamp((row.x[i] - base) * inverse, 0.0f, 15.0f) : 0.0f;
        uint code = uint(rint(value));
        uint next = simd_shuffle_xor(code, ushort(1));
        if (exists && lane % 2 == 0) {
          codes[d / 2] = uchar(code | (next << 4));
        }
        if (lane == 0) {
          scales[2 * i] = as_type<half>(scale);
          scales[2 * i + 1] = as_type<half>(minimum);
        }
      }
    }
  } else {
    PAGED_UNROLL
    for (int i = 0; i < PARTS; i++) {
      int d = 32 * i + int(lane);
      if (d < dim) {
        codes[d] = uchar(to_e4m3(row.x[i]));
      }
    }
  }
}

template <int PARTS>
METAL_FUNC void decode(
    thread HeadRow<PARTS>& row, device const uchar* pool, CodeOffsets offsets, int format, int dim,
    uint lane) {
  PAGED_UNROLL
  for (int i = 0; i < PARTS; i++) {
    int d = 32 * i + int(lane);
    row.x[i] = 0.0f;
    if (d < dim) {
      if (format == FORMAT_INT8) {
        int code = int(((device const char*)(pool + offsets.codes))[d]);
        row.x[i] = float(code) * load_scale(pool, offsets);
      } else if (format == FORMAT_INT4) {
        uint pair = pool[offsets.codes + d / 2];
        half2 group = as_type<half2>(load_group(pool, offsets, d));
        row.x[i] = fma(float((pair >> (4 * (d % 2))) & 15), float(group.x), float(group.y));
      } else {
        row.x[i] = from_e4m3(pool[offsets.codes + d]);
      }
    }
  }
}

}  // namespace paged

// Quantizes each token's key and value into its slot, in offsets.
// grid: (KV heads of keys, then of values, / 8 rounded up, tokens).
template <typename T, int PARTS>
PAGED_KERNEL(paged::DATA_THREADS)
quantize_kv(
    device const T* keys [[buffer(0)]], device const T* values [[buffer(1)]],
    device const int* slot_mapping [[buffer(2)]], device uchar* key_pool [[buffer(3)]],
    device uchar* value_pool [[buffer(4)]], constant paged::QuantizeParams& params [[buffer(5)]],
    uint3 group_id [[threadgroup_position_in_grid]], PAGED_SIMD_POSITION) {
  using namespace paged;
  int head = int(group_id.x) * (DATA_THREADS / 32) + int(simd_id);
  ulong token = group_id.y;
  int slot = slot_mapping[token];
  if (slot < 0 || head >= 2 * params.num_kv_heads) {
    return;
  }
  bool is_key = head < params.num_kv_heads;
  head = is_key ? head : head - params.num_kv_heads;
  int format = is_key ? params.key_format : params.value_format;
  int dim = is_key ? params.key_dim : params.value_dim;
  ulong at = (token * params.num_kv_heads + head) * dim;
  HeadRow<PARTS> row;
  row.load((is_key ? keys : values) + at, dim, lane);
  if (is_key && rotates_keys(format)) {
    row.rotate(dim, lane);
  }
  CodeOffsets offsets = code_offsets(
      ulong(slot >> params.block_shift), slot & ((1 << params.block_shift) - 1), params.block_shift,
      params.num_kv_heads, head, format, dim);
  encode(row, is_key ? key_pool : value_pool, offsets, format, dim, lane);
}

// Gathers keys or values of whole sequences into a dense [num_seqs, num_kv_heads, max_context_len,
// dim], with rotations undone and zeros past each context.
// grid: (tokens / 8 rounded up, KV heads, sequences).
template <typename T, int PARTS>
PAGED_KERNEL(paged::DATA_THREADS)
gather_quantized(
    device const uchar* pool [[buffer(0)]], device const int* block_tables [[buffer(1)]],
    device const int* context_lens [[buffer(2)]], device T* dense [[buffer(3)]],
    constant paged::GatherQuantizedParams& params [[buffer(4)]],
    uint3 group_id [[threadgroup_position_in_grid]], PAGED_SIMD_POSITION) {
  using namespace paged;
  int token = int(group_id.x) * (DATA_THREADS / 32) + int(simd_id);
  if (token >= params.max_context_len) {
    return;
  }
  int head = group_id.y;
  ulong sequence = group_id.z;
  ulong at = (sequence * params.num_kv_heads + head) * params.max_context_len + token;
  HeadRow<PARTS> row;
  if (token < context_lens[sequence]) {
    BlockTable table = {block_tables + sequence * params.max_blocks, params.block_shift};
    CodeOffsets offsets =
        code_offsets(table, token, params.num_kv_heads, head, params.format, params.dim);
    decode(row, pool, offsets, params.format, params.dim, lane);
    if (params.rotated) {
      row.rotate_back(params.dim, lane);
    }
  } else {
    PAGED_UNROLL
    for (int i = 0; i < PARTS; i++) {
      row.x[i] = 0.0f;
    }
  }
  row.store(dense + at * params.dim, params.dim, lane);
}

// Rotates queries to match rotated keys.
// grid: rows of all heads / 8 rounded up.
template <typename T, int PARTS>
PAGED_KERNEL(paged::DATA_THREADS)
rotate_queries(
    device const T* queries [[buffer(0)]], device T* rotated [[buffer(1)]],
    constant paged::RotateParams& params [[buffer(2)]],
    uint3 group_id [[threadgroup_position_in_grid]], PAGED_SIMD_POSITION) {
  using namespace paged;
  int index = int(group_id.x) * (DATA_THREADS / 32) + int(simd_id);
  if (index >= params.num_rows) {
    return;
  }
  ulong at = ulong(index) * params.dim;
  HeadRow<PARTS> row;
  row.load(queries + at, params.dim, lane);
  row.rotate(params.dim, lane);
  row.store(rotated + at, params.dim, lane);
}
