// Copyright © 2026 the mlx_paged authors. Apache-2.0.
//
// Products of few rows with a transposed matrix, as in decode: x [rows, k] times the rows of
// weights [n, k]. A general product packs the weights first, which costs more than a product of few
// rows. Weights keep the checkpoint's format; x, sums and results are float32.

#pragma once

#include <stdint.h>

#include "../dtype.h"
#include "../weight_format.h"

namespace mlx_paged::cpu {

// A matrix [n, k]. Each row of a quantized matrix has k * bits / 8 bytes, lowest bits first, as MLX
// packs them, and k / group_size scales.
struct WeightView {
  const void* data = nullptr;
  const void* scales = nullptr;  // [n, k / group_size]
  const void* biases = nullptr;  // like scales
  int n = 0;
  int k = 0;
  WeightFormat format = WeightFormat::dense;
  DType dtype = DType::float32;
  int bits = 32;
  int group_size = 0;
  int64_t row_bytes = 0;  // between rows of data

  static WeightView float32(const float* data, int n, int k, int64_t stride) {
    WeightView w;
    w.data = data;
    w.n = n;
    w.k = k;
    w.row_bytes = stride * int64_t(sizeof(float));
    return w;
  }

  // View of the rows from `row` on.
  WeightView from_row(int64_t row) const {
    auto after = [](const void* p, int64_t bytes) {
      return p ? static_cast<const char*>(p) + bytes : nullptr;
    };
    WeightView w = *this;
    w.n -= int(row);
    w.data = after(data, row * row_bytes);
    if (group_size) {
      int64_t scale_bytes = format != WeightFormat::affine ? 1 : dtype == DType::float32 ? 4 : 2;
      int64_t bytes = row * (k / group_size) * scale_bytes;
      w.scales = after(scales, bytes);
      w.biases = after(biases, bytes);
    }
    return w;
  }
};

struct ProductArgs {
  const float* a;  // [rows, weights.k], rows lda apart
  WeightView weights;
  float* c;  // [rows, weights.n], rows ldc apart
  int rows;
  int64_t lda;
  int64_t ldc;
};

struct ProductKernels {
  // Computes columns [begin, end) of c for any number of rows. Each element is summed in the same
  // order for any `rows`.
  void (*few_rows)(const ProductArgs& args, int64_t begin, int64_t end);
  // Unpacks rows [begin, end) of a matrix to contiguous float32.
  void (*unpack)(const WeightView& weights, int64_t begin, int64_t end, float* out);
  // Maximum rows for which `few_rows` pays off: for float32 weights, and for the other formats,
  // which a general product would have to unpack first.
  int max_rows_float32;
  int max_rows_packed;

  int max_rows(const WeightView& weights) const {
    return weights.format == WeightFormat::dense && weights.dtype == DType::float32
               ? max_rows_float32
               : max_rows_packed;
  }
};

}  // namespace mlx_paged::cpu
