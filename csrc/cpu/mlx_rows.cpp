// Copyright © 2026 the mlx_paged authors. Apache-2.0.

#include "mlx_rows.h"

#include <algorithm>
#include <cmath>
#include <limits>
#include <numeric>

#include "mlx/backend/cpu/simd/simd.h"
#include "mlx/backend/cpu/unary_ops.h"

namespace mlx_paged::cpu {

namespace {

namespace simd = mlx::core::simd;
namespace detail = mlx::core::detail;

constexpr int kLanes = simd::max_size<float>;
using Lanes = simd::Simd<float, kLanes>;

template <typename Op>
void elementwise(const float* x, float* out, int64_t size) {
  int64_t i = 0;
  for (; i + kLanes <= size; i += kLanes) {
    simd::store(out + i, Op{}(simd::load<float, kLanes>(x + i)));
  }
  for (; i < size; i++) {
    out[i] = Op{}(x[i]);
  }
}

}  // namespace

void mlx_softmax(const float* x, float* out, int64_t size) {
  Lanes largest(-std::numeric_limits<float>::infinity());
  int64_t i = 0;
  for (; i + kLanes <= size; i += kLanes) {
    largest = simd::maximum(simd::load<float, kLanes>(x + i), largest);
  }
  float maximum = simd::max(largest);
  for (; i < size; i++) {
    maximum = std::max(maximum, x[i]);
  }
  Lanes sums(0.0);
  for (i = 0; i + kLanes <= size; i += kLanes) {
    Lanes e = simd::exp(simd::load<float, kLanes>(x + i) - maximum);
    simd::store(out + i, e);
    sums = sums + e;
  }
  float sum = simd::sum(sums);
  for (; i < size; i++) {
    out[i] = std::exp(x[i] - maximum);
    sum += out[i];
  }
  float factor = 1 / sum;
  for (i = 0; i < size; i++) {
    out[i] *= factor;
  }
}

void mlx_argpartition(const float* x, uint32_t* out, int64_t size, int kth) {
  std::iota(out, out + size, 0u);
  std::nth_element(
      out, out + (kth < 0 ? kth + size : kth), out + size, [x](uint32_t a, uint32_t b) {
        if (std::isnan(x[a])) {
          return false;
        }
        if (std::isnan(x[b])) {
          return true;
        }
        return x[a] < x[b] || (x[a] == x[b] && a < b);
      });
}

void mlx_sum(const float* x, float* out, int64_t count, int64_t inner) {
  if (inner > 1) {
    std::fill_n(out, inner, 0.0f);
    for (int64_t i = 0; i < count; i++, x += inner) {
      for (int64_t j = 0; j < inner; j++) {
        out[j] = out[j] + x[j];
      }
    }
    return;
  }
  Lanes sums(0.0f);
  int64_t i = 0;
  for (; i + kLanes <= count; i += kLanes) {
    sums = sums + simd::load<float, kLanes>(x + i);
  }
  *out = 0.0f + simd::sum(sums);
  for (; i < count; i++) {
    *out = *out + x[i];
  }
}

float mlx_maximum(float a, float b) {
  return std::isnan(a) ? a : a > b ? a : b;
}

std::optional<ElementFunction> mlx_function(Op op) {
  switch (op) {
    case Op::abs:
      return elementwise<detail::Abs>;
    case Op::erf:
      return elementwise<detail::Erf>;
    case Op::exp:
      return elementwise<detail::Exp>;
    case Op::negative:
      return elementwise<detail::Negative>;
    case Op::rsqrt:
      return elementwise<detail::Rsqrt>;
    case Op::sigmoid:
      return elementwise<detail::Sigmoid>;
    case Op::sqrt:
      return elementwise<detail::Sqrt>;
    case Op::square:
      return elementwise<detail::Square>;
    case Op::tanh:
      return elementwise<detail::Tanh>;
    default:
      return std::nullopt;
  }
}

}  // namespace mlx_paged::cpu
