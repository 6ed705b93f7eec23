// Copyright © 2026 the mlx_paged authors. Apache-2.0.

#include "view.h"

#include <algorithm>

#include "step_graph.h"

namespace mlx_paged {

int64_t View::row_size() const {
  int64_t size = 1;
  for (size_t i = 1; i < shape.size(); i++) {
    size *= shape[i];
  }
  return size;
}

bool View::has_dense_rows() const {
  int64_t size = 1;
  for (size_t i = shape.size(); i-- > 1;) {
    if (shape[i] != 1 && strides[i] != size) {
      return false;
    }
    size *= shape[i];
  }
  return true;
}

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
  mx::Shape from;  // without axes of 1, and with contiguous axes joined
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
  // Ignores axes of 1, so [rows, 1, heads, dim] and [rows, heads, 1, dim] are the same.
  View packed{view.buffer, view.offset, {}, {}};
  for (size_t i = 0; i < view.shape.size(); i++) {
    if (view.shape[i] != 1 || i == 0) {
      packed.shape.push_back(view.shape[i]);
      packed.strides.push_back(view.strides[i]);
    }
  }
  auto strides = reshaped(packed, shape);
  if (!strides || ((*strides)[2] != 1 && dim != 1) || (heads != 1 && (*strides)[1] != dim)) {
    return std::nullopt;
  }
  return View{view.buffer, view.offset, shape, *strides};
}

namespace {

View sliced(const GraphNode& node, const View& in) {
  auto [begin, end, steps] = node.as<mx::Slice>().state();
  View seen = in;
  for (size_t i = 0; i < begin.size(); i++) {
    require(steps[i] > 0, "a slice with a negative step");
    seen.offset += begin[i] * in.strides[i];
    seen.strides[i] *= steps[i];
  }
  seen.shape = node.outputs[0].shape();
  return seen;
}

View transposed(const GraphNode& node, const View& in) {
  View seen = in;
  auto axes = node.as<mx::Transpose>().state();
  for (size_t i = 0; i < axes.size(); i++) {
    seen.shape[i] = in.shape[axes[i]];
    seen.strides[i] = in.strides[axes[i]];
  }
  return seen;
}

// MLX selects kernels by the strides of axes of 1, so this matches those of ExpandDims and Squeeze.
View with_new_axes(const GraphNode& node, const View& in) {
  View seen = in;
  for (int axis : node.as<mx::ExpandDims>().state()) {
    seen.shape.insert(seen.shape.begin() + axis, 1);
    seen.strides.insert(seen.strides.begin() + axis, 1);
  }
  return seen;
}

View without_axes(const GraphNode& node, const View& in) {
  View seen{in.buffer, in.offset, {}, {}};
  auto axes = node.as<mx::Squeeze>().state();
  for (int axis = 0; axis < int(in.shape.size()); axis++) {
    if (std::find(axes.begin(), axes.end(), axis) == axes.end()) {
      seen.shape.push_back(in.shape[axis]);
      seen.strides.push_back(in.strides[axis]);
    }
  }
  return seen;
}

std::vector<View> parts(const GraphNode& node, const View& in) {
  int axis = node.as<mx::Split>().state().second;
  std::vector<View> views;
  int64_t begin = 0;
  for (const auto& part : node.outputs) {
    views.push_back({in.buffer, in.offset + begin * in.strides[axis], part.shape(), in.strides});
    begin += part.shape(axis);
  }
  return views;
}

}  // namespace

std::optional<std::vector<View>> views_of(const GraphNode& node, const View& in) {
  switch (node.op) {
    case Op::transpose:
      return {{transposed(node, in)}};
    case Op::slice:
      return {{sliced(node, in)}};
    case Op::split:
      return parts(node, in);
    case Op::expand_dims:
      return {{with_new_axes(node, in)}};
    case Op::squeeze:
      return {{without_axes(node, in)}};
    default:
      break;
  }
  const auto& shape = node.outputs[0].shape();
  auto strides = reshaped(in, shape);
  if (!strides) {
    return std::nullopt;
  }
  return {{View{in.buffer, in.offset, shape, *strides}}};
}

}  // namespace mlx_paged
