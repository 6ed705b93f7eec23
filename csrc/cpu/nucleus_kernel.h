// Copyright © 2026 the mlx_paged authors. Apache-2.0.
//
// Top-p without sorting. Finds a row's threshold digit by digit like a radix select, but by the
// probability mass of the digits instead of their counts. Makes three passes over the row. Compiled
// once per instruction set; see simd.h.

#pragma once

#include "layer.h"
#include "simd.h"

namespace mlx_paged::cpu::MLX_PAGED_ISA {

// e^x for x <= 0, to about 2e-7 relative; 0 below about -87; NaN stays NaN. 2^(x log2 e) would lose
// a digit far from 0.
inline VecF exp_below_zero(VecF x) {
  VecF clamped = select(x < -104.0f, splat(-104.0f), x);
  VecF n = (clamped * 1.44269504088896340736f + 0x1.8p23f) - 0x1.8p23f;
  VecF rest = (clamped - n * 0.693359375f) + n * 2.12194440e-4f;
  return exp2(rest * 1.44269504088896340736f) * exp2(n);
}

// Sort key of a logit that is at most 0: 31 bits, in descending order.
inline uint32_t nucleus_key(float logit) {
  return uint32_t(__builtin_bit_cast(int32_t, logit)) & 0x7fffffff;
}

// Masses of logits whose key starts with `prefix`, by the next `num_bits` bits.
class NucleusDigit {
 public:
  static constexpr int kMaxBits = 11;

  NucleusDigit(uint32_t prefix, int num_bits, int shift)
      : prefix_(prefix), num_bits_(num_bits), shift_(shift) {
    __builtin_memset(masses_, 0, sizeof(double) << num_bits);
  }

  void add_row(const float* logits, int64_t size, float floor) {
    int count = 0;
    for (int64_t i = 0; i < size; i++) {
      waiting_[count] = logits[i];
      count += logits[i] >= floor && nucleus_key(logits[i]) >> (shift_ + num_bits_) == prefix_;
      if (count == kWaiting) {
        add(count);
        count = 0;
      }
    }
    add(count);
  }

  double total() const {
    double sum = 0;
    for (int digit = 0; digit < 1 << num_bits_; digit++) {
      sum += masses_[digit];
    }
    return sum;
  }

  // Returns the last digit with less than `wanted` mass above it, or -1; sets `above` to that mass.
  int last_inside(double wanted, double* above) const {
    int found = -1;
    double sum = *above;
    for (int digit = 0; digit < 1 << num_bits_ && sum < wanted; digit++) {
      if (masses_[digit] > 0) {
        found = digit;
        *above = sum;
        sum += masses_[digit];
      }
    }
    return found;
  }

 private:
  static constexpr int kWaiting = 256;

  void add(int count) {
    for (int i = 0; i < count; i += kWidth) {
      store(weights_ + i, exp_below_zero(load(waiting_ + i)));
    }
    for (int i = 0; i < count; i++) {
      masses_[(nucleus_key(waiting_[i]) >> shift_) & ((1u << num_bits_) - 1)] += weights_[i];
    }
  }

  uint32_t prefix_;
  int num_bits_;
  int shift_;
  float waiting_[kWaiting + 1] = {};
  float weights_[kWaiting];
  double masses_[1 << kMaxBits];
};

inline float nucleus_row(const float* logits, int64_t size, float floor, float top_p) {
  NucleusDigit first(0, 11, 20);
  first.add_row(logits, size, floor);
  double wanted = top_p * first.total();
  double above = 0;
  int digit = first.last_inside(wanted, &above);
  if (digit < 0) {
    return floor;  // only NaNs: no digit has mass
  }
  uint32_t key = digit;
  for (int shift = 10; shift >= 0; shift -= 10) {
    NucleusDigit next(key, 10, shift);
    next.add_row(logits, size, floor);
    key = key << 10 | uint32_t(next.last_inside(wanted, &above));
  }
  return -__builtin_bit_cast(float, key);
}

inline void nucleus(const NucleusArgs& args, int64_t begin, int64_t end) {
  for (int64_t row = begin; row < end; row++) {
    args.thresholds[row] =
        nucleus_row(args.logits + row * args.size, args.size, args.floors[row], args.top_p[row]);
  }
}

}  // namespace mlx_paged::cpu::MLX_PAGED_ISA
