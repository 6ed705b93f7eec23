// Copyright © 2026 the mlx_paged authors. Apache-2.0.
//
// Sets logits of forbidden tokens to -inf, one bit per token; NaN and inf stay. Compiled once per
// instruction set; see simd.h.

#pragma once

#include "layer.h"
#include "simd.h"

namespace mlx_paged::cpu::MLX_PAGED_ISA {

// A vector of kWidth words of a logit's size. Logits are treated as integers.
template <typename Word>
struct BitmaskVector;

template <>
struct BitmaskVector<uint32_t> {
  typedef VecU Type;
};

template <>
struct BitmaskVector<uint16_t> {
  typedef VecH Type;
};

// True for non-finite numbers, given as bits; `infinite` holds the bits of infinity.
template <typename Word>
inline auto is_not_finite(Word number, Word infinite) {
  Word magnitude = Word(~Word{}) >> 1;
  return (number & magnitude) >= (infinite & magnitude);
}

// Masks `count` tokens at `logits` by the bits of `word`, at most 32. If `logits` is `out`, allowed
// logits are left untouched.
template <typename Word>
inline void mask_tokens(
    uint32_t word, const Word* logits, Word* out, int64_t count, Word forbidden) {
  typedef typename BitmaskVector<Word>::Type Vector;
  static_assert(32 % kWidth == 0, "a vector is within one word");
  if (word == 0xffffffffu) {
    if (logits != out) {
      __builtin_memcpy(out, logits, count * sizeof(Word));
    }
    return;
  }
  if (count < 32) {
    for (int64_t i = 0; i < count; i++) {
      out[i] = (word >> i & 1) || is_not_finite(logits[i], forbidden) ? logits[i] : forbidden;
    }
    return;
  }
  Vector bit_of_lane;
  for (int lane = 0; lane < kWidth; lane++) {
    bit_of_lane[lane] = Word(1u << lane);
  }
  for (int i = 0; i < 32; i += kWidth) {
    // Needs a variable: with UBSan, GCC takes the cast's operand as the scalar, which is too wide.
    Word shifted = Word(word >> i);
    Vector bits = shifted & bit_of_lane;
    auto values = load_as<Vector>(logits + i);
    auto kept = (bits != 0) | is_not_finite(values, Vector(forbidden - Vector{}));
    Vector masked = kept ? values : forbidden - Vector{};
    __builtin_memcpy(out + i, &masked, sizeof(masked));
  }
}

template <typename Word>
inline void bitmask_rows(const BitmaskArgs& args, int64_t begin, int64_t end, Word forbidden) {
  int64_t num_words = (args.size + 31) / 32;
  for (const MaskedRow* at = args.rows + begin; at < args.rows + end; at++) {
    const Word* logits = static_cast<const Word*>(args.logits) + at->row * args.size;
    Word* out = static_cast<Word*>(args.out) + at->row * args.size;
    if (at->mask < 0) {
      __builtin_memcpy(out, logits, args.size * sizeof(Word));
      continue;
    }
    const uint32_t* words = args.bitmask + at->mask * num_words;
    for (int64_t i = 0; i < num_words; i++) {
      int64_t rest = args.size - 32 * i;
      mask_tokens(words[i], logits + 32 * i, out + 32 * i, rest < 32 ? rest : 32, forbidden);
    }
  }
}

inline void bitmask(const BitmaskArgs& args, int64_t begin, int64_t end) {
  switch (args.dtype) {
    case DType::float32:
      return bitmask_rows<uint32_t>(args, begin, end, 0xff800000u);
    case DType::float16:
      return bitmask_rows<uint16_t>(args, begin, end, 0xfc00);
    case DType::bfloat16:
      return bitmask_rows<uint16_t>(args, begin, end, 0xff80);
  }
}

}  // namespace mlx_paged::cpu::MLX_PAGED_ISA
