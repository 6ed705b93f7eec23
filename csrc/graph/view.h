// Copyright © 2026 the mlx_paged authors. Apache-2.0.
//
// View: a value of a step as part of one of its executable's buffers. Reshapes, slices and
// transposes are views that move no data.

#pragma once

#include <cstdint>
#include <optional>
#include <vector>

#include "mlx/array.h"

namespace mlx_paged {

namespace mx = mlx::core;

struct GraphNode;

// The first axis is the rows. Offset and strides are in elements.
struct View {
  int buffer;
  int64_t offset = 0;
  mx::Shape shape;
  mx::Strides strides;

  int64_t rows() const { return shape.empty() ? 1 : shape[0]; }
  int64_t row_size() const;  // elements
  // True if the elements of a row are contiguous.
  bool has_dense_rows() const;
  int64_t row_stride() const { return rows() == 1 ? row_size() : strides[0]; }
  bool is_dense() const { return has_dense_rows() && row_stride() == row_size(); }

  // Address of row i, given the address of each buffer.
  template <typename T = float>
  T* row(const std::vector<char*>& bases, int64_t i) const {
    return reinterpret_cast<T*>(bases[buffer]) + offset + i * strides[0];
  }
};

mx::Strides dense_strides(const mx::Shape& shape);

// The strides of `view` in another shape; nothing if the reshape needs a copy.
std::optional<mx::Strides> reshaped(const View& view, const mx::Shape& shape);

// `view`, with axes of 1 anywhere, as [rows, heads, dim] with adjacent heads in a row; nothing if
// they are not adjacent.
std::optional<View> rows_of_heads(const View& view, int heads, int dim);

// The outputs of a view operation as views of its input; nothing if that needs a copy. Throws
// UnsupportedGraph for a slice with a negative step.
std::optional<std::vector<View>> views_of(const GraphNode& node, const View& in);

}  // namespace mlx_paged
