// Copyright © 2026 the mlx_paged authors. Apache-2.0.
//
// Products of few rows with a transposed matrix, as decode has them: x [rows, k] times the rows of
// weights [n, k]. A general product packs the weights first, which for few rows costs more than the
// product. Weights are read as the checkpoint has them; x, sums and results are float32.

#pragma once

#include <stdint.h>

#include "../dtype.h"
#include "../weight_format.h"

namespace mlx_paged::cpu {

// A matrix [n, k]. Of a quantised one each row is k * bits / 8 bytes, lowest bits first, as MLX
// packs them, and has k / group_size scales.
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
  int64_t row_bytes = 0;  // from one row of data to the next

  static WeightView float32(const float* data, int n, int k, int64_t stride) {
    WeightView w;
    w.data = data;
    w.n = n;
    w.k = k;
    w.row_bytes = stride * int64_t(sizeof(float));
    return w;
  }

  // The rows from `row` on.
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
  // Columns [begin, end) of c, of any number of rows. Each element is summed in the same order
  // whatever `rows` is.
  void (*few_rows)(const ProductArgs& args, int64_t begin, int64_t end);
  // Rows [begin, end) of a matrix as float32, one after the other.
  void (*unpack)(const WeightView& weights, int64_t begin, int64_t end, float* out);
  // Up to how many rows `few_rows` pays: of float32 weights, and of the other formats, which a
  // general product would have to unpack first.
  int most_rows_float32;
  int most_rows_packed;

  int most_rows(const WeightView& weights) const {
    return weights.format == WeightFormat::dense && weights.dtype == DType::float32
               ? most_rows_float32
               : most_rows_packed;
  }
};

}  // namespace mlx_paged::cpu
