// Copyright © 2026 the mlx_paged authors. Apache-2.0.
//
// What the programs that run products on the CPU have in common.

#pragma once

#include <random>
#include <string>

#include "fibers.h"

namespace {

int compared = 0;
int failed = 0;

template <typename T>
constexpr bool kIsHalf = std::is_same_v<T, __half>;

template <typename T>
T rounded_to(double v) {
  if constexpr (kIsHalf<T>) {
    return __float2half(float(v));
  } else {
    return __float2bfloat16(float(v));
  }
}

template <typename T>
struct Aligned {
  explicit Aligned(size_t size)
      : data(static_cast<T*>(std::aligned_alloc(64, (size * sizeof(T) + 127) / 64 * 64))),
        size(size) {}
  ~Aligned() { std::free(data); }
  Aligned(const Aligned&) = delete;
  T& operator[](size_t i) { return data[i]; }
  T* data;
  size_t size;
};

enum class Kind { plain, gated, heads };

}  // namespace
