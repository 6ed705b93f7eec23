// Copyright © 2026 the mlx_paged authors. Apache-2.0.

#include "device_view.h"

namespace mlx_paged {

mx::Strides dense_strides(const mx::Shape& shape) {
  mx::Strides strides(shape.size());
  int64_t size = 1;
  for (size_t i = shape.size(); i-- > 0;) {
    strides[i] = size;
    size *= shape[i];
  }
  return strides;
}

std::optional<mx::Strides> reshaped(const View& view, const mx::Shape& shape) {
  mx::Shape from;  // without axes of 1, and with those that lie side by side as one
  mx::Strides steps;
  for (size_t i = 0; i < view.shape.size(); i++) {
    if (view.shape[i] == 1) {
      continue;
    }
    if (!from.empty() && steps.back() == view.strides[i] * view.shape[i]) {
      from.back() *= view.shape[i];
      steps.back() = view.strides[i];
    } else {
      from.push_back(view.shape[i]);
      steps.push_back(view.strides[i]);
    }
  }
  mx::Strides strides(shape.size());
  size_t axis = from.size();
  int64_t left = 1;  // of from[axis]
  int64_t step = 1;
  for (size_t i = shape.size(); i-- > 0;) {
    if (shape[i] == 1) {
      strides[i] = step;
      continue;
    }
    if (left == 1) {
      if (axis == 0) {
        return std::nullopt;
      }
      axis--;
      left = from[axis];
      step = steps[axis];
    }
    if (left % shape[i] != 0) {
      return std::nullopt;
    }
    strides[i] = step;
    step *= shape[i];
    left /= shape[i];
  }
  return strides;
}

std::optional<View> rows_of_heads(const View& view, int heads, int dim) {
  mx::Shape shape{int(view.rows()), heads, dim};
  // (From [rows, 1, heads, dim] to [rows, heads, 1, dim] nothing moves.)
  mx::Shape axes;
  mx::Strides strides;
  for (size_t i = 0; i < view.shape.size(); i++) {
    if (view.shape[i] != 1 || i == 0) {
      axes.push_back(view.shape[i]);
      strides.push_back(view.strides[i]);
    }
  }
  auto seen = reshaped({view.buffer, view.offset, axes, strides}, shape);
  if (!seen || ((*seen)[2] != 1 && dim != 1) || (heads != 1 && (*seen)[1] != dim)) {
    return std::nullopt;
  }
  return View{view.buffer, view.offset, shape, *seen};
}

View transposed(const View& view, const std::vector<int>& axes) {
  View seen = view;
  for (size_t i = 0; i < axes.size(); i++) {
    seen.shape[i] = view.shape[axes[i]];
    seen.strides[i] = view.strides[axes[i]];
  }
  return seen;
}

std::optional<View> sliced(
    const View& view, const mx::Shape& begin, const mx::Shape& steps, const mx::Shape& shape) {
  View seen = view;
  for (size_t i = 0; i < begin.size(); i++) {
    if (steps[i] <= 0) {
      return std::nullopt;
    }
    seen.offset += begin[i] * seen.strides[i];
    seen.strides[i] *= steps[i];
  }
  seen.shape = shape;
  return seen;
}

View part_of(const View& view, int axis, int64_t begin, const mx::Shape& shape) {
  View seen = view;
  seen.offset += begin * view.strides[axis];
  seen.shape = shape;
  return seen;
}

}  // namespace mlx_paged
