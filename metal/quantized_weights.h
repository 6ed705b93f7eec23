// Copyright © 2026 the mlx_paged authors. Apache-2.0.
//
// Weights from mx.quantize, as the `Weight` of few_rows.h. Codes of a row are one string of bits,
// lowest first. A unit has 32 of them, which are whole words at any width, and belongs to one group
// (nvfp4: two).

#pragma once

#include <metal_stdlib>

#include "few_rows.h"
#include "vector_load.h"

using namespace metal;

namespace paged {

enum { UNIT_CODES = 32 };

// The codes of a unit.
template <int BITS>
struct Codes {
  uint words[BITS];

  // With the widest loads that the alignment of rows allows.
  METAL_FUNC void load(WeightRows rows, uint unit) thread {
    device const uint* from =
        (device const uint*)rows.elements + rows.first_unit() * BITS + unit * BITS;
    constexpr int FOURS = BITS % 4 == 0 ? BITS / 4 : 0;
    constexpr int TWOS = BITS % 4 != 0 && BITS % 2 == 0 ? BITS / 2 : 0;
    constexpr int ONES = BITS % 2 != 0 ? BITS : 0;
    PAGED_UNROLL
    for (int i = 0; i < FOURS; i++) {
      uint4 four = ((device const uint4*)from)[i];
      words[4 * i] = four.x;
      words[4 * i + 1] = four.y;
      words[4 * i + 2] = four.z;
      words[4 * i + 3] = four.w;
    }
    PAGED_UNROLL
    for (int i = 0; i < TWOS; i++) {
      uint2 two = ((device const uint2*)from)[i];
      words[2 * i] = two.x;
      words[2 * i + 1] = two.y;
    }
    PAGED_UNROLL
    for (int i = 0; i < ONES; i++) {
      words[i] = from[i];
    }
  }

  METAL_FUNC uint code(int i) const thread {
    int bit = i * BITS;
    int shift = bit % 32;
    uint bits = words[bit / 32] >> shift;
    if (shift + BITS > 32) {
      bits |= words[bit / 32 + 1] << (32 - shift);
    }
    return bits & ((1u << BITS) - 1);
  }
};

// A chunk of a unit as elements of T.
template <typename T, typename Weight>
METAL_FUNC uint4 pack_chunk(Weight weight, int chunk) {
  float values[chunk_size<T>()];
  weight.unpack_chunk(chunk, values);
  return pack(values, T(0.0f));
}

// Values: code * scale + bias.
template <typename T, int BITS>
struct AffineWeight {
  Codes<BITS> codes;
  float scale;
  float bias;

  METAL_FUNC static constexpr int unit_size() { return UNIT_CODES; }

  // The lanes of a group share what its first lane loads. A row has whole groups.
  METAL_FUNC void load(WeightRows rows, uint unit, bool exists, int lane) thread {
    if (exists) {
      codes.load(rows, unit);
    }
    int first_lane = lane >> rows.group_shift << rows.group_shift;
    scale = 0.0f;
    bias = 0.0f;
    if (exists && lane == first_lane) {
      load_group(rows, unit);
    }
    scale = simd_shuffle(scale, ushort(first_lane));
    bias = simd_shuffle(bias, ushort(first_lane));
  }

  METAL_FUNC void load_alone(WeightRows rows, uint unit) thread {
    codes.load(rows, unit);
    load_group(rows, unit);
  }

  METAL_FUNC void load_group(WeightRows rows, uint unit) thread {
    ulong first = rows.first_unit() >> rows.group_shift;
    uint group = unit >> rows.group_shift;
    scale = float(((device const T*)rows.scales + first)[group]);
    bias = float(((device const T*)rows.biases + first)[group]);
  }

  METAL_FUNC void unpack_chunk(int chunk, thread float* out) const thread {
    constexpr int CHUNK = chunk_size<T>();
    PAGED_UNROLL
    for (int e = 0; e < CHUNK; e++) {
      out[e] = fma(float(codes.code(chunk * CHUNK + e)), scale, bias);
    }
  }

  METAL_FUNC uint4 packed_chunk(int chunk) const thread { return pack_chunk<T>(*this, chunk); }
};

// The numbers of a code. Shifted, its exponent and fraction are those of a half, with another bias.
METAL_FUNC float e2m1(uint code) {
  float magnitude = float(as_type<half>(ushort((code & 7u) << 9))) * 16384.0f;
  return code & 8u ? -magnitude : magnitude;
}

METAL_FUNC float e4m3(uint code) {
  float magnitude = float(as_type<half>(ushort((code & 127u) << 7))) * 256.0f;
  return code & 128u ? -magnitude : magnitude;
}

// 2^(code - 127).
METAL_FUNC float e8m0(uint code) {
  return as_type<float>(code == 0 ? 0x00400000u : code << 23);
}

// Values: e2m1 (4 bits) or e4m3 (8 bits) * 2^(scale - 127).
template <typename T, int BITS>
struct MxWeight {
  Codes<BITS> codes;
  float scale;

  METAL_FUNC static constexpr int unit_size() { return UNIT_CODES; }

  METAL_FUNC void load(WeightRows rows, uint unit, bool exists, int) thread {
    if (exists) {
      codes.load(rows, unit);
      scale = e8m0((rows.scales + rows.first_unit())[unit]);
    }
  }

  METAL_FUNC void load_alone(WeightRows rows, uint unit) thread { load(rows, unit, true, 0); }

  METAL_FUNC void unpack_chunk(int chunk, thread float* out) const thread {
    constexpr int CHUNK = chunk_size<T>();
    PAGED_UNROLL
    for (int e = 0; e < CHUNK; e++) {
      uint code = codes.code(chunk * CHUNK + e);
      out[e] = (BITS == 4 ? e2m1(code) : e4m3(code)) * scale;
    }
  }

  METAL_FUNC uint4 packed_chunk(int chunk) const thread { return pack_chunk<T>(*this, chunk); }
};

// Values: e2m1 * an e4m3 scale per 16.
template <typename T>
struct Nvfp4Weight {
  Codes<4> codes;
  float scales[2];

  METAL_FUNC static constexpr int unit_size() { return UNIT_CODES; }

  METAL_FUNC void load(WeightRows rows, uint unit, bool exists, int) thread {
    if (exists) {
      codes.load(rows, unit);
      uint both = ((device const ushort*)rows.scales + rows.first_unit())[unit];
      scales[0] = e4m3(both & 255u);
      scales[1] = e4m3(both >> 8);
    }
  }

  METAL_FUNC void load_alone(WeightRows rows, uint unit) thread { load(rows, unit, true, 0); }

  METAL_FUNC void unpack_chunk(int chunk, thread float* out) const thread {
    constexpr int CHUNK = chunk_size<T>();
    PAGED_UNROLL
    for (int e = 0; e < CHUNK; e++) {
      int i = chunk * CHUNK + e;
      out[e] = e2m1(codes.code(i)) * scales[i / 16];
    }
  }

  METAL_FUNC uint4 packed_chunk(int chunk) const thread { return pack_chunk<T>(*this, chunk); }
};

}  // namespace paged
