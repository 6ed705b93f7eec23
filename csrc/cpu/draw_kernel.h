// Copyright © 2026 the mlx_paged authors. Apache-2.0.
//
// Draws tokens from softmax(logits): the largest sum of a scaled logit and Gumbel noise, which is
// -log(-log(u)). The noise is that of mx.random.categorical, bit for bit. The vectors only compute
// upper bounds of the sums; a few tokens of a row pass them, and the C library decides among those.
// Compiled once per instruction set; see simd.h.

#pragma once

#include "../../metal/threefry.h"
#include "layer.h"
#include "layer_kernel.h"
#include "simd.h"

namespace mlx_paged::cpu::MLX_PAGED_ISA {

// The draw from one row of T.
template <typename T>
class RowDraw {
 public:
  RowDraw(const DrawArgs& args, int64_t row)
      : logits_(static_cast<const T*>(args.logits) + row * args.size),
        size_(args.size),
        pair_stride_(args.size - args.size / 2),
        largest_(args.largest[row]),
        temperature_(args.temperature[row]),
        threshold_(args.thresholds[row]),
        key_0_(args.keys[2 * row]),
        key_1_(args.keys[2 * row + 1]),
        token_(args.tokens[row]) {
    raise_bars();
  }

  int32_t token() {
    // The likeliest token sets a bar that most others cannot reach.
    see_greedy();
    int64_t pair = 0;
    for (; pair + kWidth <= size_ - pair_stride_; pair += kWidth) {
      see_pairs(pair, load(logits_ + pair), load(logits_ + pair_stride_ + pair), kWidth);
    }
    int rest = int(size_ - pair_stride_ - pair);
    if (rest > 0) {
      see_pairs(
          pair, load_tail(logits_ + pair, rest), load_tail(logits_ + pair_stride_ + pair, rest),
          rest);
    }
    if (size_ % 2) {  // the token in the middle
      see_tokens(
          pair_stride_ - 1, load_tail(logits_ + pair_stride_ - 1, 1),
          bits_of(pair_stride_ - 1, 0).first, 1);
    }
    return token_;
  }

 private:
  // Above the noise of the largest u, 1 - 2^-24.
  static constexpr float kMaxNoise = 16.64f;
  // Above the rounding errors of a bound.
  static constexpr float kSlack = 1e-3f;

  // Bits of kWidth counters from `pair` on. mx.random gives the token `pair` of a row the first
  // word of (pair, stride + pair), and the token `stride + pair` the second. The one in the middle
  // of an odd row has the counter (pair, 0).
  paged::RandomPair<VecU> bits_of(int64_t pair, int64_t other) const {
    VecU lanes;
    for (int lane = 0; lane < kWidth; lane++) {
      lanes[lane] = lane;
    }
    return paged::threefry<VecU>(key_0_, key_1_, {lanes + uint32_t(pair), lanes + uint32_t(other)});
  }

  void see_greedy() {
    int64_t pair = token_ < pair_stride_ ? token_ : token_ - pair_stride_;
    bool is_middle = size_ % 2 && token_ == pair_stride_ - 1;
    auto bits = bits_of(pair, is_middle ? 0 : pair_stride_ + pair);
    see(token_, token_ < pair_stride_ ? bits.first[0] : bits.second[0]);
  }

  void see_pairs(int64_t pair, VecF first, VecF second, int count) {
    if (!any((first >= logit_bar_) | (second >= logit_bar_))) {
      return;
    }
    auto bits = bits_of(pair, pair_stride_ + pair);
    see_tokens(pair, first, bits.first, count);
    see_tokens(pair_stride_ + pair, second, bits.second, count);
  }

  void see_tokens(int64_t token, VecF logits, VecU bits, int count) {
    // -log(-log(u)) <= -log(1 - u), and log2(1 + m) >= m for the mantissa of a number. 1 - u is at
    // least `left` after u has been rounded to 24 bits.
    VecU left = ~bits;
    left = (left > 384 ? left : 384 + VecU{}) - 128;
    VecU exponent_and_mantissa = as_uint(__builtin_convertvector(left, VecF));
    VecF log2_left = __builtin_convertvector(exponent_and_mantissa, VecF) * 0x1p-23f - 159.0f;
    VecF bound = (logits - largest_) * (1.0f / temperature_) - log2_left * 0.693147181f;
    VecI may_win = (bound >= score_bar_) & (logits >= logit_bar_);
    if (!any(may_win)) {
      return;
    }
    for (int lane = 0; lane < count; lane++) {
      if (may_win[lane]) {
        see(int32_t(token + lane), bits[lane]);
      }
    }
  }

  void see(int32_t token, uint32_t bits) {
    float scaled = (load_one(logits_ + token) - largest_) / temperature_;
    float u = float(bits) * 0x1p-32f;
    u = u < 1.0f ? u : 1 - 0x1p-24f;
    float score = scaled - __builtin_logf(-__builtin_logf(u));
    if (scaled >= threshold_ && score > -kInf &&
        (score > score_ || (score == score_ && token < token_))) {
      score_ = score;
      token_ = token;
      raise_bars();
    }
  }

  void raise_bars() {
    score_bar_ = score_ - kSlack;
    float scaled = score_ - kMaxNoise > threshold_ ? score_ - kMaxNoise : threshold_;
    float below = temperature_ * scaled;
    logit_bar_ = largest_ + below - 1e-6f * (__builtin_fabsf(largest_) + __builtin_fabsf(below));
  }

  const T* logits_;
  int64_t size_;
  int64_t pair_stride_;  // distance of the two tokens of a pair
  float largest_;
  float temperature_;
  float threshold_;
  uint32_t key_0_;
  uint32_t key_1_;
  int32_t token_;
  float score_ = -kInf;
  // A token can win only if its bound reaches score_bar_ and its logit reaches logit_bar_, which
  // allows for the largest noise.
  float score_bar_;
  float logit_bar_;
};

inline void draw(const DrawArgs& args, int64_t begin, int64_t end) {
  with_type(args.dtype, [&](auto type) {
    for (int64_t i = begin; i < end; i++) {
      int32_t row = args.rows[i];
      args.drawn[row] = RowDraw<decltype(type)>(args, row).token();
    }
  });
}

}  // namespace mlx_paged::cpu::MLX_PAGED_ISA
