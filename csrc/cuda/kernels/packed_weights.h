// Copyright © 2026 the mlx_paged authors. Apache-2.0.
//
// Weights packed by mx.quantize, as left operands of mma.m16n8k16.
//
// Codes become 16-bit numbers exactly. Where they are not scaled in 16 bits, a group of columns is
// multiplied and summed in fp32, and its scale and bias apply to that sum:
//   x . (code * scale + bias) = scale * (x . code) + bias * (sum of x)
//
// Each of a row's four lanes holds a contiguous quarter of a group. The order of columns within a
// product is free as long as x agrees. Where a word holds whole pairs of codes 16 bits apart, those
// are the pairs of a fragment, and one logical operation extracts each.

#pragma once

#include <type_traits>

#include "../quantized_shape.h"
#include "linear_math.h"
#include "ordered_rows.h"
#include "shared_memory.h"

namespace mlx_paged::cuda {

__device__ __forceinline__ unsigned int bits_of(__nv_bfloat162 v) {
  return *reinterpret_cast<unsigned int*>(&v);
}

__device__ __forceinline__ __nv_bfloat162 as_pair(unsigned int bits) {
  return *reinterpret_cast<__nv_bfloat162*>(&bits);
}

// The lower or upper half of a word.
template <typename T>
__device__ __forceinline__ float element(unsigned int pair, int which) {
  if constexpr (std::is_same_v<T, __nv_bfloat16>) {
    return __uint_as_float(which ? pair & 0xffff0000u : pair << 16);
  } else {
    const unsigned short half = static_cast<unsigned short>(pair >> 16 * which);
    return __half2float(__ushort_as_half(half));
  }
}

// 2^(code - 127).
__device__ __forceinline__ float power_of_two(unsigned int code) {
  return __uint_as_float(code == 0 ? 0x00400000u : code << 23);
}

// Converts the codes in the low bits of each half of a word to code * kUnit + kOffset. Ignores the
// other bits.
template <typename T, CodeFormat FORMAT, int BITS>
struct CodesOf;

// Denormals, which the product accepts as they are.
template <int BITS>
struct CodesOf<__half, CodeFormat::affine, BITS> {
  static constexpr float kOffset = 0.0f;
  static constexpr float kPerUnit = 16777216.0f;  // code * 2^-24
  __device__ __forceinline__ static unsigned int pair(unsigned int raw) {
    return raw & ((1u << BITS) - 1) * 0x10001u;
  }
};

// 128 + code.
template <int BITS>
struct CodesOf<__nv_bfloat16, CodeFormat::affine, BITS> {
  static constexpr float kOffset = 128.0f;
  static constexpr float kPerUnit = 1.0f;
  __device__ __forceinline__ static unsigned int pair(unsigned int raw) {
    return masked_or(raw, ((1u << BITS) - 1) * 0x10001u, 0x43004300u);
  }
};

// code - 128, as 128 + (the lower seven bits) - (128 or 256).
template <>
struct CodesOf<__nv_bfloat16, CodeFormat::affine, 8> {
  static constexpr float kOffset = -128.0f;
  static constexpr float kPerUnit = 1.0f;
  __device__ __forceinline__ static unsigned int pair(unsigned int raw) {
    return bits_of(__hsub2(
        as_pair(masked_or(raw, 0x007f007fu, 0x43004300u)),
        as_pair(masked_or(~raw, 0x00800080u, 0x43004300u))));
  }
};

// A small float has the bits of an fp16 with a shorter exponent, so the value differs by a power of
// two.
template <>
struct CodesOf<__half, CodeFormat::mxfp4, 4> {
  static constexpr float kOffset = 0.0f;
  static constexpr float kPerUnit = 16384.0f;
  __device__ __forceinline__ static unsigned int pair(unsigned int raw) {
    return (raw << 12 & 0x80008000u) | (raw << 9 & 0x0e000e00u);
  }
};

template <>
struct CodesOf<__half, CodeFormat::mxfp8, 8> {
  static constexpr float kOffset = 0.0f;
  static constexpr float kPerUnit = 256.0f;
  __device__ __forceinline__ static unsigned int pair(unsigned int raw) {
    return (raw << 8 & 0x80008000u) | (raw << 7 & 0x3f803f80u);
  }
};

// bf16's exponent range is wider: products with its denormals would underflow fp32.
template <>
struct CodesOf<__nv_bfloat16, CodeFormat::mxfp4, 4> {
  static constexpr float kOffset = 0.0f;
  static constexpr float kPerUnit = 1.0f;
  __device__ __forceinline__ static unsigned int pair(unsigned int raw) {
    unsigned int small = (raw << 12 & 0x80008000u) | (raw << 6 & 0x01c001c0u);
    return bits_of(__hmul2(as_pair(small), as_pair(0x7e807e80u)));  // by 2^126
  }
};

template <>
struct CodesOf<__nv_bfloat16, CodeFormat::mxfp8, 8> {
  static constexpr float kOffset = 0.0f;
  static constexpr float kPerUnit = 1.0f;
  __device__ __forceinline__ static unsigned int pair(unsigned int raw) {
    unsigned int small = (raw << 8 & 0x80008000u) | (raw << 4 & 0x07f007f0u);
    return bits_of(__hmul2(as_pair(small), as_pair(0x7b807b80u)));  // by 2^120
  }
};

// 2^(code - 127) in 16 bits. fp16 gives 0 below 2^-24 and infinity above 2^15.
template <typename T>
__device__ __forceinline__ unsigned int scale_of_code(unsigned int code) {
  if constexpr (std::is_same_v<T, __nv_bfloat16>) {
    return code == 0 ? 0x40u : code << 7;
  } else {
    return code < 103   ? 0u
           : code < 113 ? 1u << (code - 103)
           : code > 142 ? 0x7c00u
                        : (code - 112) << 10;
  }
}

__device__ __forceinline__ __half2 as_halves(unsigned int bits) {
  return *reinterpret_cast<__half2*>(&bits);
}

__device__ __forceinline__ unsigned int bits_of(__half2 v) {
  return *reinterpret_cast<unsigned int*>(&v);
}

// Bits [at, at + 32) of `words`; bits outside of the array are arbitrary. `at` is a compile-time
// constant after unrolling.
template <int WORDS>
__device__ __forceinline__ unsigned int bits_from(const unsigned int (&words)[WORDS], int at) {
  if (at < 0) {
    return words[0] << -at;
  }
  const int word = at / 32;
  if (at % 32 == 0 || word + 1 >= WORDS) {
    return words[word] >> at % 32;
  }
  return __funnelshift_r(words[word], words[word + 1], at % 32);
}

// Maximum number of words that a lane's codes span; they can start inside a word.
constexpr int words_of_lane(int bits) {
  int max_words = 0;
  for (int lane = 0; lane < 4; lane++) {
    const int words = ((lane + 1) * bits - 1) / 32 - lane * bits / 32 + 1;
    max_words = words > max_words ? words : max_words;
  }
  return max_words;
}

// A lane's share of a group in a row: kColumns adjacent columns, two for each pair p of the
// fragments.
template <typename T, CodeFormat FORMAT, int BITS, int GROUP>
struct GroupOf {
  using Element = T;
  using Codes = CodesOf<T, FORMAT, BITS>;
  static constexpr int kColumns = GROUP / 4;
  static constexpr int kPairs = kColumns / 2;
  static constexpr int kProducts = kPairs / 2;  // mma instructions
  static constexpr int kLaneBits = kColumns * BITS;
  static constexpr bool kInWords = kLaneBits % 32 == 0;
  static constexpr int kWords = words_of_lane(kLaneBits);
  static constexpr int kGroupWords = GROUP * BITS / 32;
  // Pairs are codes 16 bits apart rather than neighbors.
  static constexpr bool kApart = kInWords && (BITS == 4 || BITS == 8);
  static constexpr int kColumnsApart = kApart ? 16 / BITS : 1;
  static constexpr bool kHasBiases = FORMAT == CodeFormat::affine;

  // Loads from shared memory. `group`: address of the row's codes of this group.
  __device__ __forceinline__ static void load(
      unsigned int group, int lane, unsigned int (&words)[kWords]) {
    if constexpr (kInWords) {
      load_words(group + lane * (kWords * 4), words);
    } else {
      const int first = lane * kLaneBits / 32;
#pragma unroll
      for (int i = 0; i < kWords; i++) {
        words[i] = load_shared_word(group + min(first + i, kGroupWords - 1) * 4);
      }
    }
  }

  // `from`: address of the lane's codes.
  __device__ __forceinline__ static void load_words(
      unsigned int from, unsigned int (&words)[kWords]) {
    if constexpr (kWords % 4 == 0) {
#pragma unroll
      for (int i = 0; i < kWords; i += 4) {
        const Eight v = load_shared(from + i * 4);
        words[i] = v.x;
        words[i + 1] = v.y;
        words[i + 2] = v.z;
        words[i + 3] = v.w;
      }
    } else if constexpr (kWords % 2 == 0) {
#pragma unroll
      for (int i = 0; i < kWords; i += 2) {
        load_shared_pair(from + i * 4, words[i], words[i + 1]);
      }
    } else {
#pragma unroll
      for (int i = 0; i < kWords; i++) {
        words[i] = load_shared_word(from + i * 4);
      }
    }
  }

  // Shifts the loaded words so that they start with the lane's first code.
  __device__ __forceinline__ static void align(int lane, unsigned int (&words)[kWords]) {
    if constexpr (!kInWords) {
      const int shift = lane * kLaneBits % 32;
#pragma unroll
      for (int i = 0; i + 1 < kWords; i++) {
        words[i] = __funnelshift_r(words[i], words[i + 1], shift);
      }
      words[kWords - 1] >>= shift;
    }
  }

  __device__ __forceinline__ static unsigned int pair(const unsigned int (&words)[kWords], int p) {
    if constexpr (kApart) {
      constexpr int kOfWord = 16 / BITS;
      return Codes::pair(words[p / kOfWord] >> p % kOfWord * BITS);
    } else {
      return Codes::pair(unshifted_codes(words, p));
    }
  }

  // The codes of pair p, masked, at the bottom of their halves or `shift_of(p)` bits above it,
  // which saves a shift.
  __device__ __forceinline__ static unsigned int unshifted_codes(
      const unsigned int (&words)[kWords], int p) {
    constexpr unsigned int kMask = (1u << BITS) - 1;
    if constexpr (kApart) {
      constexpr int kOfWord = 16 / BITS;
      const int shift = shift_of(p);
      return words[p / kOfWord] >> (p % kOfWord * BITS - shift) & (kMask << shift) * 0x10001u;
    } else {
      const unsigned int low = bits_from(words, 2 * p * BITS);
      const unsigned int high = bits_from(words, (2 * p + 1) * BITS - 16);
      return (low & kMask) | (high & kMask << 16);
    }
  }
  __device__ __forceinline__ static constexpr int shift_of(int p) {
    return kApart && BITS == 4 ? p % 2 * 4 : 0;
  }

  // Regroups eight adjacent elements of x as pairs.
  __device__ __forceinline__ static Eight pairs_of(Eight x) {
    return cuda::pairs_of<kColumnsApart>(x);
  }
};

// Converts a row's codes of a group to 16-bit weights, rounded once. `scale` and `bias` fill both
// halves of a word.
//
// For bf16, the bits n <= 255 represent n * 2^-133 (the denormals and the first normal numbers). So
// the low eight bits of a half are already the code as a number, with no offset to subtract. The
// scale is multiplied by 2^96 and the bias to match, so weights are 2^37 too small until the sums
// are stored. Scales stay below 2^32; parts of a weight below 2^-96 are lost.
template <typename Group>
class Scaling {
  using T = typename Group::Element;
  using Codes = typename Group::Codes;
  static constexpr bool kInHalves = std::is_same_v<T, __half>;
  static constexpr bool kTiny = Group::kHasBiases && !kInHalves;

 public:
  static constexpr float kPerSum = kTiny ? 137438953472.0f : 1.0f;  // 2^37

  __device__ __forceinline__ Scaling(unsigned int scale, unsigned int bias) {
    if constexpr (kTiny) {
      scale_[0] = bits_of(__hmul2(as_pair(scale), as_pair(0x6f806f80u)));
      scale_[1] = bits_of(__hmul2(as_pair(scale), as_pair(0x6d806d80u)));  // divided by 16
      bias_ = bits_of(__hmul2(as_pair(bias), as_pair(0x2d002d00u)));
    } else {
      scale_[0] = scale;
      bias_ = bias;
    }
  }

  // Pair p of the group.
  __device__ __forceinline__ unsigned int pair(
      const unsigned int (&words)[Group::kWords], int p) const {
    if constexpr (!Group::kHasBiases) {
      const unsigned int codes = Group::pair(words, p);
      if constexpr (kInHalves) {
        const __half2 value = __hmul2(as_halves(codes), __float2half2_rn(Codes::kPerUnit));
        return bits_of(__hmul2(value, as_halves(scale_[0])));
      } else {
        static_assert(Codes::kPerUnit == 1.0f);
        return bits_of(__hmul2(as_pair(codes), as_pair(scale_[0])));
      }
    } else {
      const int shift = Group::shift_of(p);
      const unsigned int codes = Group::unshifted_codes(words, p);
      if constexpr (kInHalves) {
        constexpr unsigned int k1024 = 0x64006400u;  // its last bit is worth 1
        const __half2 more = as_halves(codes | k1024);
        const __half2 code = shift == 0
                                 ? __hsub2(more, as_halves(k1024))
                                 : __hfma2(more, as_halves(0x2c002c00u), as_halves(0xd400d400u));
        return bits_of(__hfma2(code, as_halves(scale_[0]), as_halves(bias_)));
      } else {
        return bits_of(__hfma2(as_pair(codes), as_pair(scale_[shift == 4]), as_pair(bias_)));
      }
    }
  }

 private:
  unsigned int scale_[kTiny ? 2 : 1];  // for codes at the bottom of their halves, and for codes 4
                                       // bits above it
  unsigned int bias_;
};

// Adds one group's contribution to all products in `sums`. For rows r + 8 i of the weight (r = lane
// / 4), `codes_of(i)` is the shared-memory address of the group's codes, and `scale_of(i)` and
// `bias_of(i)` scale them. `x_of(t, h)` returns the lane's h-th eight columns of tile t of x. `c`:
// lane % 4.
template <
    typename Group, int M_TILES, int TILES, typename Codes, typename Scale, typename Bias,
    typename X>
__device__ __forceinline__ void multiply_group(
    float (&sums)[M_TILES][TILES][4], int c, Codes codes_of, Scale scale_of, Bias bias_of, X x_of) {
  using T = typename Group::Element;
  constexpr int kProducts = Group::kProducts;
  constexpr unsigned int kOne = std::is_same_v<T, __half> ? 0x3c003c00u : 0x3f803f80u;
  unsigned int fragments[M_TILES][kProducts][4];
  float scale[2 * M_TILES];
  float bias[2 * M_TILES];
#pragma unroll
  for (int i = 0; i < 2 * M_TILES; i++) {
    unsigned int codes[Group::kWords];
    Group::load(codes_of(i), c, codes);
    Group::align(c, codes);
#pragma unroll
    for (int p = 0; p < Group::kPairs; p++) {
      fragments[i / 2][p / 2][p % 2 * 2 + i % 2] = Group::pair(codes, p);
    }
    const float s = scale_of(i);
    scale[i] = s * Group::Codes::kPerUnit;
    if constexpr (Group::kHasBiases) {
      bias[i] = bias_of(i) - Group::Codes::kOffset * s;
    }
  }
#pragma unroll
  for (int t = 0; t < TILES; t++) {
    float products[M_TILES][4] = {};
    float x_sums[4] = {};
#pragma unroll
    for (int h = 0; h < kProducts / 2; h++) {
      const Eight x = Group::pairs_of(x_of(t, h));
#pragma unroll
      for (int m = 0; m < M_TILES; m++) {
        paged::multiply_accumulate(products[m], fragments[m][2 * h], {x.x, x.y}, T(0.0f));
        paged::multiply_accumulate(products[m], fragments[m][2 * h + 1], {x.z, x.w}, T(0.0f));
      }
      if constexpr (Group::kHasBiases) {
        paged::multiply_accumulate(x_sums, {kOne, kOne, kOne, kOne}, {x.x, x.y}, T(0.0f));
        paged::multiply_accumulate(x_sums, {kOne, kOne, kOne, kOne}, {x.z, x.w}, T(0.0f));
      }
    }
#pragma unroll
    for (int m = 0; m < M_TILES; m++) {
#pragma unroll
      for (int e = 0; e < 4; e++) {
        float& sum = sums[m][t][e];
        sum = fmaf(scale[2 * m + e / 2], products[m][e], sum);
        if constexpr (Group::kHasBiases) {
          sum = fmaf(bias[2 * m + e / 2], x_sums[e % 2], sum);
        }
      }
    }
  }
}

// First rows of a warp's weight; half of the rows can belong to another weight.
struct QuantizedRowsOf {
  const unsigned char* codes;
  const unsigned char* scales;
  const unsigned char* biases;
};

// A stage of a warp's ring in shared memory: codes and scales of a chunk's groups for sixteen rows.
template <typename T, CodeFormat FORMAT, int BITS, int GROUP>
struct QuantizedStage {
  using Group = GroupOf<T, FORMAT, BITS, GROUP>;
  static constexpr int kRows = 16;
  static constexpr int kChunk = quantized_chunk(GROUP);
  static constexpr int kGroups = kChunk / GROUP;
  static constexpr int kRowBytes = kChunk * BITS / 8;  // codes
  static constexpr int kPieces = kRowBytes / 16;
  static constexpr int kPitch = quantized_pitch(BITS, GROUP);
  static constexpr int kScaleBytes = Group::kHasBiases ? 2 : 1;
  static constexpr int kArrays = Group::kHasBiases ? 2 : 1;
  static constexpr int kScalesBytes = quantized_scale_bytes(FORMAT, GROUP);  // per row
  static constexpr int kRecord = kArrays * kScalesBytes;                     // with biases
  static constexpr int kBytes = quantized_stage_bytes(FORMAT, BITS, GROUP, kRows);

  // Source addresses of a lane's copies in the first chunk. Computed once, as it takes divisions.
  struct Sources {
    static constexpr int kCodes = (kRows * kPieces + 31) / 32;
    static constexpr int kScales = (kRows * kArrays + 31) / 32;
    const unsigned char* codes[kCodes];
    const unsigned char* scales[kScales];

    // `rows_of(row)` returns the weight of row `row` of the tile and sets `row` to the row within
    // it.
    template <typename RowsOf>
    __device__ __forceinline__ Sources(RowsOf rows_of, int num_groups, int lane) {
#pragma unroll
      for (int i = 0; i < kCodes; i++) {
        const int at = i * 32 + lane;
        int row = min(at / kPieces, kRows - 1);
        const unsigned char* first = rows_of(row).codes;
        codes[i] = first + size_t(row) * num_groups * (Group::kGroupWords * 4) + at % kPieces * 16;
      }
#pragma unroll
      for (int i = 0; i < kScales; i++) {
        const int at = i * 32 + lane;
        int row = min(at / kArrays, kRows - 1);
        const QuantizedRowsOf rows = rows_of(row);
        const unsigned char* first = at % kArrays == 0 ? rows.scales : rows.biases;
        scales[i] = first + size_t(row) * num_groups * kScaleBytes;
      }
    }
  };

  // Starts the copies of a chunk.
  __device__ __forceinline__ static void copy(
      unsigned int stage, const Sources& from, int num_groups, int chunk, int lane,
      paged::CachePolicy once) {
    const int row_bytes = num_groups * (Group::kGroupWords * 4);
    const int begin = chunk * kRowBytes;
#pragma unroll
    for (int i = 0; i < Sources::kCodes; i++) {
      const int at = i * 32 + lane;
      if (kRows * kPieces % 32 != 0 && at >= kRows * kPieces) {
        break;
      }
      const int piece = at % kPieces;
      // Rows can end inside a chunk.
      const int left = max(0, min(row_bytes - begin - piece * 16, 16));
      copy_part_async(
          stage + at / kPieces * kPitch + piece * 16, from.codes[i] + (left > 0 ? begin : 0), left,
          once);
    }
    const int first_group = chunk * kGroups;
    const bool whole = num_groups % kGroups == 0;
#pragma unroll
    for (int i = 0; i < Sources::kScales; i++) {
      const int at = i * 32 + lane;
      if (kRows * kArrays % 32 != 0 && at >= kRows * kArrays) {
        break;
      }
      const unsigned int to =
          stage + kRows * kPitch + at / kArrays * kRecord + at % kArrays * kScalesBytes;
      if (whole) {
        const bool exists = first_group < num_groups;
        copy_few_async<kScalesBytes>(
            to, from.scales[i] + (exists ? first_group * kScaleBytes : 0), exists);
        continue;
      }
#pragma unroll
      for (int g = 0; g < kGroups; g++) {
        const bool exists = first_group + g < num_groups;
        const unsigned char* scale = from.scales[i] + (first_group + g) * kScaleBytes;
        if constexpr (kScaleBytes == 2) {
          store_shared_half(
              to + g * 2, exists ? *reinterpret_cast<const unsigned short*>(scale) : 0);
        } else {
          store_shared_byte(to + g, exists ? *scale : 0);
        }
      }
    }
  }

  // A lane's scales of rows r + 8 i for all groups of a stage.
  struct Scales {
    unsigned int words[2][(kRecord + 3) / 4];

    __device__ __forceinline__ void load(unsigned int stage, int r) {
#pragma unroll
      for (int i = 0; i < 2; i++) {
        const unsigned int from = stage + kRows * kPitch + (r + 8 * i) * kRecord;
        if constexpr (kRecord % 16 == 0) {
#pragma unroll
          for (int j = 0; j < kRecord / 16; j++) {
            const Eight v = load_shared(from + 16 * j);
            words[i][4 * j] = v.x;
            words[i][4 * j + 1] = v.y;
            words[i][4 * j + 2] = v.z;
            words[i][4 * j + 3] = v.w;
          }
        } else if constexpr (kRecord == 8) {
          load_shared_pair(from, words[i][0], words[i][1]);
        } else {
          words[i][0] = load_shared_word(from);
        }
      }
    }

    // Scale `g` of the row; biases follow the scales.
    __device__ __forceinline__ float at(int i, int g) const {
      if constexpr (kScaleBytes == 1) {  // 2^(code - 127)
        const unsigned int code = words[i][g / 4] >> 8 * (g % 4) & 0xff;
        return power_of_two(code);
      } else {
        return element<T>(words[i][g / 2], g % 2);
      }
    }
  };

  // Adds one group's contribution to all products in `sums`. `x_of(t, h)` returns the lane's h-th
  // eight columns of tile t of x.
  template <int TILES, typename X>
  __device__ __forceinline__ static void multiply(
      float (&sums)[1][TILES][4], unsigned int stage, const Scales& scales, int g, int r, int c,
      X x_of) {
    multiply_group<Group>(
        sums, c, [&](int i) { return stage + (r + 8 * i) * kPitch + g * (Group::kGroupWords * 4); },
        [&](int i) { return scales.at(i, g); }, [&](int i) { return scales.at(i, kGroups + g); },
        x_of);
  }
};

}  // namespace mlx_paged::cuda
