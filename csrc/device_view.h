// Copyright © 2026 the mlx_paged authors. Apache-2.0.
//
// Where a value of a device program lies in one of its buffers, and the ways to see it that move
// nothing.

#pragma once

#include <cstdint>
#include <optional>

#include "mlx/array.h"

namespace mlx_paged {

namespace mx = mlx::core;

// Offset and strides are in elements.
struct View {
  int buffer;
  int64_t offset = 0;
  mx::Shape shape;
  mx::Strides strides;

  int64_t rows() const { return shape.empty() ? 1 : shape[0]; }

  int64_t row_size() const {
    int64_t size = 1;
    for (size_t i = 1; i < shape.size(); i++) {
      size *= shape[i];
    }
    return size;
  }

  // True if the elements of a row lie side by side.
  bool has_dense_rows() const {
    int64_t size = 1;
    for (size_t i = shape.size(); i-- > 1;) {
      if (shape[i] != 1 && strides[i] != size) {
        return false;
      }
      size *= shape[i];
    }
    return true;
  }

  int64_t row_stride() const { return rows() == 1 ? row_size() : strides[0]; }
  bool is_dense() const { return has_dense_rows() && row_stride() == row_size(); }
};

mx::Strides dense_strides(const mx::Shape& shape);

// The strides with which `view` can be seen in another shape; none where that needs a copy.
std::optional<mx::Strides> reshaped(const View& view, const mx::Shape& shape);

// A row's heads side by side, [rows, heads, dim], from shapes with axes of 1 between them; none
// where they do not lie so.
std::optional<View> rows_of_heads(const View& view, int heads, int dim);

// The view that a Transpose, Slice or part of a Split has of its input; none if it is not only a
// view.
View transposed(const View& view, const std::vector<int>& axes);
std::optional<View> sliced(
    const View& view, const mx::Shape& begin, const mx::Shape& steps, const mx::Shape& shape);
View part_of(const View& view, int axis, int64_t begin, const mx::Shape& shape);

}  // namespace mlx_paged
