// Copyright © 2026 the mlx_paged authors. Apache-2.0.
//
// Unpacks weights of every format to float32. Compiled once per instruction set; see simd.h.

#pragma once

#include "product.h"
#include "simd.h"

namespace mlx_paged::cpu::MLX_PAGED_ISA {

inline float bits_as_float(uint32_t u) {
  float x;
  __builtin_memcpy(&x, &u, 4);
  return x;
}

inline float widen(float x) {
  return x;
}

inline float widen(BFloat x) {
  return bits_as_float(uint32_t(x.bits) << 16);
}

inline float widen(Half x) {
#if defined(__AVX2__)
  return _cvtsh_ss(x.bits);
#else
  return load_tail(&x, 1)[0];
#endif
}

// 2^(e - 127); 255, NaN in the format, gives infinity.
inline float e8m0(uint8_t e) {
  return bits_as_float(e == 0 ? 0x00400000u : uint32_t(e) << 23);
}

// E4M3 as MLX reads it: 0x7f is 480. Avoids intermediate denormals, which are slow.
inline VecF e4m3(VecU x) {
  VecU magnitude = (x & 0x7fu) << 20;
  VecF normal = as_float(magnitude + (120u << 23));
  VecF subnormal = as_float(magnitude + (121u << 23)) - 0x1p-6f;
  VecF value = select((VecI)(magnitude < (1u << 23)), subnormal, normal);
  return as_float(as_uint(value) | (x & 0x80u) << 24);
}

inline float e4m3(uint8_t x) {
  return e4m3(VecU{} + x)[0];
}

constexpr float kE2M1[16] = {0, 0.5f, 1, 1.5f, 2, 3, 4, 6, -0.0f, -0.5f, -1, -1.5f, -2, -3, -4, -6};

// Loads kWidth values of Bits bits each, lowest bits first. Higher bits of the result may hold the
// next values; apply `& mask` where that matters.
template <int Bits>
inline VecU spread(const uint8_t* p, int element) {
  if constexpr (Bits == 8) {
#if defined(__AVX512F__)
    return (VecU)_mm512_cvtepu8_epi32(load_as<__m128i>(p + element));
#elif defined(__AVX2__)
    return (VecU)_mm256_cvtepu8_epi32(
        _mm_loadl_epi64(reinterpret_cast<const __m128i*>(p + element)));
#else
    typedef uint8_t VecB __attribute__((vector_size(kWidth)));
    return __builtin_convertvector(load_as<VecB>(p + element), VecU);
#endif
  } else {
    constexpr uint32_t B = Bits;
#if defined(__AVX512F__)
    if constexpr (Bits <= 4) {
      // Eight values per word.
      uint32_t word[2];
      for (int i = 0; i < 2; i++) {
        const uint8_t* q = p + (element / 8 + i) * Bits;
        if constexpr (Bits == 2) {
          word[i] = load_as<uint16_t>(q);
        } else if constexpr (Bits == 3) {
          word[i] = load_as<uint16_t>(q) | uint32_t(q[2]) << 16;
        } else {
          word[i] = load_as<uint32_t>(q);
        }
      }
      const __m512i shifts = _mm512_setr_epi32(
          0, B, 2 * B, 3 * B, 4 * B, 5 * B, 6 * B, 7 * B, 0, B, 2 * B, 3 * B, 4 * B, 5 * B, 6 * B,
          7 * B);
      __m512i v = _mm512_mask_set1_epi32(_mm512_set1_epi32(int(word[0])), 0xff00, int(word[1]));
      return (VecU)_mm512_srlv_epi32(v, shifts);
    } else {
      // Each value spans at most two bytes.
      constexpr auto pair = [](int i) {
        return uint32_t(0x80800000 | (i * Bits / 8 + 1) << 8 | (i * Bits / 8));
      };
      constexpr auto shift = [](int i) { return int(i * Bits % 8); };
      const __m512i bytes = _mm512_setr_epi32(
          pair(0), pair(1), pair(2), pair(3), pair(4), pair(5), pair(6), pair(7), pair(8), pair(9),
          pair(10), pair(11), pair(12), pair(13), pair(14), pair(15));
      const __m512i shifts = _mm512_setr_epi32(
          shift(0), shift(1), shift(2), shift(3), shift(4), shift(5), shift(6), shift(7), shift(8),
          shift(9), shift(10), shift(11), shift(12), shift(13), shift(14), shift(15));
      __m128i packed = _mm_maskz_loadu_epi8((1 << 2 * Bits) - 1, p + element / 8 * Bits);
      __m512i v = _mm512_shuffle_epi8(_mm512_broadcast_i32x4(packed), bytes);
      return (VecU)_mm512_srlv_epi32(v, shifts);
    }
#else
    // Eight values take Bits bytes: loads the first four and the last four into a word each.
    auto words = [p](int at, uint32_t& low, uint32_t& high) {
      const uint8_t* q = p + at / 8 * Bits;
      if constexpr (Bits == 2) {
        low = load_as<uint16_t>(q);
        high = low >> 8;
      } else if constexpr (Bits == 3) {
        low = load_as<uint16_t>(q) | uint32_t(q[2]) << 16;
        high = low >> 12;
      } else if constexpr (Bits == 4) {
        low = load_as<uint32_t>(q);
        high = low >> 16;
      } else if constexpr (Bits == 5) {
        low = load_as<uint32_t>(q);
        high = low >> 20 | uint32_t(q[4]) << 12;
      } else {
        static_assert(Bits == 6);
        low = load_as<uint32_t>(q);
        high = low >> 24 | uint32_t(load_as<uint16_t>(q + 4)) << 8;
      }
    };
    uint32_t low, high;
    words(element, low, high);
#if defined(__AVX2__)
    const VecU shifts = {0, B, 2 * B, 3 * B, 0, B, 2 * B, 3 * B};
    return VecU{low, low, low, low, high, high, high, high} >> shifts;
#else
    uint32_t word = element % 8 ? high : low;
    const VecU shifts = {0, B, 2 * B, 3 * B};
    return VecU{word, word, word, word} >> shifts;
#endif
#endif
  }
}

inline VecF to_float(VecU q) {
#if defined(__AVX512F__)
  return (VecF)_mm512_cvtepi32_ps((__m512i)q);
#else
  return __builtin_convertvector((VecI)q, VecF);  // values are small
#endif
}

#if defined(__AVX512F__)
// The 16 values of a 4-bit code, already scaled.
struct Table {
  VecF values;
  explicit Table(VecF v) : values(v) {}
  VecF operator()(VecU index) const {  // uses the low four bits
    return (VecF)_mm512_permutexvar_ps((__m512i)index, (__m512)values);
  }
};
#endif

// Unpacks `groups` groups of q * scale + bias.
template <int Bits, typename T>
inline void unpack_affine(
    const uint8_t* p, const T* scales, const T* biases, int groups, int group_size, float* out) {
  constexpr uint32_t kMask = (1u << Bits) - 1;
  for (int g = 0; g < groups; g++) {
    float scale = widen(scales[g]);
    float bias = widen(biases[g]);
#if defined(__AVX512F__)
    if constexpr (Bits <= 4) {
      VecU index = {0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15};
      Table table(to_float(index & kMask) * scale + bias);
      for (int i = 0; i < group_size; i += kWidth) {
        store(out + i, table(spread<Bits>(p, i)));
      }
    } else
#endif
    {
      for (int i = 0; i < group_size; i += kWidth) {
        store(out + i, to_float(spread<Bits>(p, i) & kMask) * scale + bias);
      }
    }
    p += group_size * Bits / 8;
    out += group_size;
  }
}

// Unpacks groups of E2M1 codes.
template <typename Scale>
inline void unpack_fp4(
    const uint8_t* p, const uint8_t* scales, int groups, int group_size, const Scale& scale_of,
    float* out) {
  for (int g = 0; g < groups; g++) {
    float scale = scale_of(scales[g]);
#if defined(__AVX512F__)
    Table table(load(kE2M1) * scale);
    for (int i = 0; i < group_size; i += kWidth) {
      store(out + i, table(spread<4>(p, i)));
    }
#else
    float values[16];
    for (int i = 0; i < 16; i++) {
      values[i] = kE2M1[i] * scale;
    }
    for (int i = 0; i < group_size; i += 2) {
      out[i] = values[p[i / 2] & 15];
      out[i + 1] = values[p[i / 2] >> 4];
    }
#endif
    p += group_size / 2;
    out += group_size;
  }
}

inline void unpack_fp8(const uint8_t* p, const uint8_t* scales, int groups, float* out) {
  constexpr int kGroup = 32;
  for (int g = 0; g < groups; g++) {
    float scale = e8m0(scales[g]);
    for (int i = 0; i < kGroup; i += kWidth) {
      store(out + i, e4m3(spread<8>(p, i)) * scale);
    }
    p += kGroup;
    out += kGroup;
  }
}

template <typename T>
inline void widen_row(const T* p, int count, float* out) {
  int i = 0;
  for (; i + kWidth <= count; i += kWidth) {
    store(out + i, load(p + i));
  }
  if (i < count) {
    VecF last = load_tail(p + i, count - i);
    __builtin_memcpy(out + i, &last, (count - i) * sizeof(float));
  }
}

// Unpacks elements [begin, begin + count) of a row. In a quantized row both are whole groups.
inline void unpack_row(const WeightView& w, int64_t row, int begin, int count, float* out) {
  auto p = static_cast<const uint8_t*>(w.data) + row * w.row_bytes + int64_t(begin) * w.bits / 8;
  if (w.format == WeightFormat::dense) {
    return with_type(w.dtype, [&](auto type) {
      widen_row(reinterpret_cast<const decltype(type)*>(p), count, out);
    });
  }
  int64_t first = (row * w.k + begin) / w.group_size;
  int groups = count / w.group_size;
  auto scales = static_cast<const uint8_t*>(w.scales) + first;
  switch (w.format) {
    case WeightFormat::mxfp4:
      return unpack_fp4(p, scales, groups, w.group_size, e8m0, out);
    case WeightFormat::nvfp4:
      return unpack_fp4(p, scales, groups, w.group_size, [](uint8_t x) { return e4m3(x); }, out);
    case WeightFormat::mxfp8:
      return unpack_fp8(p, scales, groups, out);
    default:
      break;
  }
  with_type(w.dtype, [&](auto type) {
    auto of = [first](const void* p) { return static_cast<const decltype(type)*>(p) + first; };
    auto affine = [&](auto function) {
      function(p, of(w.scales), of(w.biases), groups, w.group_size, out);
    };
    using T = decltype(type);
    switch (w.bits) {
      case 2:
        return affine(unpack_affine<2, T>);
      case 3:
        return affine(unpack_affine<3, T>);
      case 4:
        return affine(unpack_affine<4, T>);
      case 5:
        return affine(unpack_affine<5, T>);
      case 6:
        return affine(unpack_affine<6, T>);
      case 8:
        return affine(unpack_affine<8, T>);
    }
  });
}

inline void unpack(const WeightView& w, int64_t begin, int64_t end, float* out) {
  for (int64_t row = begin; row < end; row++, out += w.k) {
    unpack_row(w, row, 0, w.k, out);
  }
}

}  // namespace mlx_paged::cpu::MLX_PAGED_ISA
