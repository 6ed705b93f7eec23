// Copyright © 2026 the mlx_paged authors. Apache-2.0.
//
// min-p, top-k and top-p without sorting. Finds a row's threshold digit by digit like a radix
// select, by the counts of the digits for top-k and by their probability mass for top-p. Each makes
// three passes over the row. Compiled once per instruction set; see simd.h.

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

// Sort key of a scaled logit, which is at most 0: 31 bits, in descending order. Those of NaNs
// follow that of -inf.
inline uint32_t threshold_key(float scaled) {
  return __builtin_bit_cast(uint32_t, scaled) & 0x7fffffff;
}

template <typename T>
struct ScaledRow {
  const T* logits;
  int64_t size;
  float largest;
  float temperature;

  VecF at(int64_t i) const {
    VecF v = i + kWidth <= size ? load(logits + i) : load_tail(logits + i, int(size - i));
    return (v - largest) / temperature;
  }
};

enum class ThresholdWeight { count, mass };

// Weights of the logits whose key is at most `last` and starts with `prefix`, by the next
// `num_bits` bits of the key.
template <ThresholdWeight kWeight>
class DigitSums {
 public:
  static constexpr int kMaxBits = 11;

  DigitSums(uint32_t prefix, uint32_t last, int num_bits, int shift)
      : prefix_(prefix), last_(last), num_bits_(num_bits), shift_(shift) {
    __builtin_memset(sums_, 0, sizeof(double) << num_bits);
  }

  template <typename T>
  void add_row(const ScaledRow<T>& row) {
    int count = 0;
    for (int64_t i = 0; i < row.size; i += kWidth) {
      VecF scaled = row.at(i);
      VecU key = as_uint(scaled) & 0x7fffffffu;
      VecI counts = (key <= last_) & (key >> (shift_ + num_bits_) == prefix_);
      if (sum(counts) == 0) {
        continue;
      }
      int lanes = row.size - i < kWidth ? int(row.size - i) : kWidth;
      for (int lane = 0; lane < lanes; lane++) {
        waiting_[count] = scaled[lane];
        count += counts[lane] != 0;
      }
      if (count >= kWaiting) {
        add(count);
        count = 0;
      }
    }
    add(count);
  }

  double total() const {
    double sum = 0;
    for (int digit = 0; digit < 1 << num_bits_; digit++) {
      sum += sums_[digit];
    }
    return sum;
  }

  // Returns the digit in which the weight above, which starts at `above`, reaches `limit`, or the
  // last with weight, because sums are rounded; -1 if none has. Adds the weights of the digits
  // before it to `above`.
  int at_limit(double limit, double* above) const {
    int found = -1;
    double sum = *above;
    for (int digit = 0; digit < 1 << num_bits_ && sum < limit; digit++) {
      if (sums_[digit] > 0) {
        found = digit;
        *above = sum;
        sum += sums_[digit];
      }
    }
    return found;
  }

 private:
  static constexpr int kWaiting = 256;

  void add(int count) {
    auto digit_of = [&](int i) {
      return (threshold_key(waiting_[i]) >> shift_) & ((1u << num_bits_) - 1);
    };
    if constexpr (kWeight == ThresholdWeight::count) {
      for (int i = 0; i < count; i++) {
        sums_[digit_of(i)] += 1;
      }
      return;
    }
    for (int i = 0; i < count; i += kWidth) {
      store(weights_ + i, exp_below_zero(load(waiting_ + i)));
    }
    for (int i = 0; i < count; i++) {
      sums_[digit_of(i)] += weights_[i];
    }
  }

  uint32_t prefix_;
  uint32_t last_;
  int num_bits_;
  int shift_;
  float waiting_[kWaiting + 2 * kWidth] = {};
  float weights_[kWaiting + 2 * kWidth];
  double sums_[1 << kMaxBits];
};

// Raises `threshold` to the logit at which the weights of the logits that it keeps reach `limit`,
// in descending order: a count, or a share of their mass.
template <ThresholdWeight kWeight, typename T>
inline float raise_threshold(const ScaledRow<T>& row, float threshold, double limit) {
  uint32_t last = threshold_key(threshold);
  DigitSums<kWeight> first(0, last, 11, 20);
  first.add_row(row);
  double total = first.total();
  if (kWeight == ThresholdWeight::mass) {
    limit *= total;
  }
  double above = 0;
  int digit = total < limit ? -1 : first.at_limit(limit, &above);
  if (digit < 0) {
    return threshold;  // the floor leaves fewer than top_k, or all are NaN
  }
  uint32_t key = digit;
  for (int shift = 10; shift >= 0; shift -= 10) {
    DigitSums<kWeight> next(key, last, 10, shift);
    next.add_row(row);
    key = key << 10 | uint32_t(next.at_limit(limit, &above));
  }
  return -__builtin_bit_cast(float, key);
}

inline void thresholds(const ThresholdArgs& args, int64_t begin, int64_t end) {
  with_type(args.dtype, [&](auto type) {
    using T = decltype(type);
    for (int64_t i = begin; i < end; i++) {
      ScaledRow<T> row{
          static_cast<const T*>(args.logits) + i * args.size, args.size, args.largest[i],
          args.temperature[i]};
      float threshold = args.floors[i];
      if (args.top_k[i] > 0 && args.top_k[i] < args.size) {
        threshold = raise_threshold<ThresholdWeight::count>(row, threshold, args.top_k[i]);
      }
      if (args.top_p[i] < 1) {
        threshold = raise_threshold<ThresholdWeight::mass>(row, threshold, args.top_p[i]);
      }
      args.thresholds[i] = threshold;
    }
  });
}

}  // namespace mlx_paged::cpu::MLX_PAGED_ISA
