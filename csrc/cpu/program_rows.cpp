// Copyright © 2026 the mlx_paged authors. Apache-2.0.

#include "program_rows.h"

#include <algorithm>
#include <cmath>
#include <cstring>
#include <map>
#include <optional>
#include <set>

#include "kernels.h"
#include "mlx_rows.h"
#include "rotations.h"

namespace mlx_paged::cpu {

namespace {

// The strides with which `view` can be seen in another shape; none where that needs a copy.
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

// True if a node is an addition, also as a function that MLX compiled.
bool is_addition(const std::string& name) {
  std::string left = name;
  if (left.rfind("Compiled", 0) == 0) {
    left = left.substr(std::strlen("Compiled"));
    while (left.rfind("Broadcast", 0) == 0) {
      left = left.substr(std::strlen("Broadcast"));
    }
  }
  return left == "Add";
}

}  // namespace

void RowReader::read_rows(const Node& node) {
  const auto* p = node.primitive;
  if (auto* norm = dynamic_cast<const RmsNorm*>(p)) {
    return read_rms_norm(node, *norm);
  }
  if (auto* norm = dynamic_cast<const LayerNorm*>(p)) {
    return read_layer_norm(node, *norm);
  }
  if (auto* rotations = dynamic_cast<const RopeRotations*>(p)) {
    return read_rope_rotations(node, *rotations);
  }
  if (auto* rope = dynamic_cast<const Rope*>(p)) {
    return read_rope(node, *rope);
  }
  if (dynamic_cast<const SiluMul*>(p)) {
    return read_gated(node, [](const float* gate, const float* x, float* out, int64_t size) {
      kernels().layer.silu_mul({DType::float32, gate, x, out}, 0, size);
    });
  }
  if (auto* swiglu = dynamic_cast<const ClippedSwiglu*>(p)) {
    return read_gated(
        node, [alpha = swiglu->alpha(), limit = swiglu->limit()](
                  const float* gate, const float* x, float* out, int64_t size) {
          kernels().layer.clipped_swiglu({DType::float32, gate, x, out, alpha, limit}, 0, size);
        });
  }
  if (auto* gelu = dynamic_cast<const Gelu*>(p)) {
    return read_by_element(node, [kind = gelu->kind()](const float* x, float* out, int64_t size) {
      kernels().layer.gelu({DType::float32, kind, x, out}, 0, size);
    });
  }
  if (auto* lookup = dynamic_cast<const Lookup*>(p)) {
    return read_lookup(node, *lookup);
  }
  if (is(node, "Gather")) {
    return read_gather(node, static_cast<const mx::Gather&>(*p));
  }
  if (is(node, "GatherAxis")) {
    return read_gather_axis(node, static_cast<const mx::GatherAxis&>(*p).state());
  }
  if (is(node, "ArgPartition")) {
    auto [kth, axis] = static_cast<const mx::ArgPartition&>(*p).state();
    return read_argpartition(node, kth, axis);
  }
  if (is(node, "Softmax")) {
    int64_t size = node.inputs[0].shape(-1);
    return read_by_element(node, [size](const float* x, float* out, int64_t count) {
      for (int64_t i = 0; i < count; i += size) {
        mlx_softmax(x + i, out + i, size);
      }
    });
  }
  if (is(node, "Sum")) {
    return read_sum(node, static_cast<const mx::Reduce&>(*p).state().second);
  }
  if (auto function = mlx_function(p->name())) {
    return read_by_element(node, *function);
  }
  if (is_addition(p->name()) && node.inputs.size() == 2) {
    return read_elementwise(node, [](float a, float b) { return a + b; });
  }
  if (is(node, "Subtract")) {
    return read_elementwise(node, [](float a, float b) { return a - b; });
  }
  if (is(node, "Multiply")) {
    return read_elementwise(node, [](float a, float b) { return a * b; });
  }
  if (is(node, "Divide")) {
    return read_elementwise(node, [](float a, float b) { return a / b; });
  }
  if (is(node, "Maximum")) {
    return read_elementwise(node, mlx_maximum);
  }
  read_view(node);
}

void RowReader::read_view(const Node& node) {
  const auto& out = node.outputs[0];
  View in = view(node.inputs[0]);
  if (is(node, "StopGradient")) {
    views_[out.id()] = in;
    return;
  }
  if (is(node, "Transpose")) {
    View seen = in;
    auto axes = static_cast<const mx::Transpose&>(*node.primitive).state();
    for (size_t i = 0; i < axes.size(); i++) {
      seen.shape[i] = in.shape[axes[i]];
      seen.strides[i] = in.strides[axes[i]];
    }
    views_[out.id()] = seen;
    return;
  }
  if (is(node, "Broadcast")) {
    mx::Strides strides(out.ndim(), 0);
    size_t missing = out.ndim() - in.shape.size();
    for (size_t i = 0; i < in.shape.size(); i++) {
      strides[missing + i] = in.shape[i] == 1 ? 0 : in.strides[i];
    }
    views_[out.id()] = {in.buffer, in.offset, out.shape(), strides};
    return;
  }
  if (is(node, "Slice")) {
    auto [begin, end, step] = static_cast<const mx::Slice&>(*node.primitive).state();
    View seen = in;
    for (size_t i = 0; i < begin.size(); i++) {
      require(step[i] > 0, "a slice with a negative step");
      seen.offset += begin[i] * in.strides[i];
      seen.strides[i] *= step[i];
    }
    seen.shape = out.shape();
    views_[out.id()] = seen;
    return;
  }
  if (is(node, "Split")) {
    auto [indices, axis] = static_cast<const mx::Split&>(*node.primitive).state();
    int64_t begin = 0;
    for (const auto& part : node.outputs) {
      View seen = in;
      seen.offset += begin * in.strides[axis];
      seen.shape = part.shape();
      views_[part.id()] = seen;
      begin += part.shape(axis);
    }
    return;
  }
  // (The strides of axes of 1 are MLX's: its products choose their way by them.)
  if (is(node, "ExpandDims")) {
    View seen = in;
    for (int axis : static_cast<const mx::ExpandDims&>(*node.primitive).state()) {
      seen.shape.insert(seen.shape.begin() + axis, 1);
      seen.strides.insert(seen.strides.begin() + axis, 1);
    }
    views_[out.id()] = seen;
    return;
  }
  if (is(node, "Squeeze")) {
    View seen{in.buffer, in.offset, {}, {}};
    auto axes = static_cast<const mx::Squeeze&>(*node.primitive).state();
    for (int axis = 0; axis < int(in.shape.size()); axis++) {
      if (std::find(axes.begin(), axes.end(), axis) == axes.end()) {
        seen.shape.push_back(in.shape[axis]);
        seen.strides.push_back(in.strides[axis]);
      }
    }
    views_[out.id()] = seen;
    return;
  }
  static const std::set<std::string> reshapes{"Reshape", "Flatten", "Unflatten"};
  if (reshapes.count(node.primitive->name())) {
    if (auto strides = reshaped(in, out.shape())) {
      views_[out.id()] = {in.buffer, in.offset, out.shape(), *strides};
      return;
    }
    require(node.inputs[0].itemsize() == sizeof(float), "a copy of other than four bytes");
    View dense = copied(in);
    views_[out.id()] = {dense.buffer, dense.offset, out.shape(), dense_strides(out.shape())};
    return;
  }
  refuse(std::string("the operation ") + node.primitive->name());
}

void RowReader::read_gather(const Node& node, const mx::Gather& gather) {
  auto [axes, slices] = gather.state();
  const auto& out = node.outputs[0];
  require(
      node.inputs.size() == 2 && axes == std::vector<int>{0} && slices[0] == 1 &&
          std::equal(slices.begin() + 1, slices.end(), node.inputs[0].shape().begin() + 1),
      "a gather of other than rows");
  View source = view(node.inputs[0]);
  View index = view(node.inputs[1]);
  require(node.inputs[0].dtype() == mx::float32, "a gather of other than float32");
  auto type = node.inputs[1].dtype();
  require(type == mx::int32 || type == mx::uint32, "a gather by other than int32");
  require(
      source.has_dense_rows() && index.row_size() == 1 && index.rows() == out.shape(0),
      "a gather of several rows for a row");
  View to = new_value(out);
  int64_t size = source.row_size();
  int64_t count = source.rows();
  add_row_operation(
      to, {index}, {source.buffer}, [=](const Bases& bases, int64_t begin, int64_t end) {
        for (int64_t i = begin; i < end; i++) {
          int64_t at = *index.row<int32_t>(bases, i);
          at += at < 0 ? count : 0;
          if (at < 0 || at >= count) {  // (no exception: it would end the stream)
            std::fill_n(to.row(bases, i), size, std::nanf(""));
            continue;
          }
          std::memcpy(to.row(bases, i), source.row(bases, at), size * sizeof(float));
        }
      });
}

void RowReader::read_lookup(const Node& node, const Lookup& lookup) {
  View ids = view(node.inputs[0]);
  require(ids.row_size() == 1, "a lookup of several rows for a row");
  View to = new_value(node.outputs[0]);
  add_row_operation(
      to, {ids}, {},
      [=, weights = lookup.weights(evaluated(node))](
          const Bases& bases, int64_t begin, int64_t end) {
        for (int64_t i = begin; i < end; i++) {
          Lookup::read(weights, *ids.row<int32_t>(bases, i), to.row(bases, i));
        }
      });
}

void RowReader::read_rms_norm(const Node& node, const RmsNorm& norm) {
  View x = with_dense_rows(view(node.inputs[0]));
  View to = new_value(node.outputs[0]);
  const float* weight = node.inputs.size() > 1 ? constant(node.inputs[1]) : nullptr;
  int64_t size = x.shape.back();
  require(x.shape.size() > 1, "a norm over its rows");
  int64_t groups = x.row_size() / size;
  add_row_operation(
      to, {x}, {}, [=, eps = norm.eps()](const Bases& bases, int64_t begin, int64_t end) {
        for (int64_t i = begin; i < end; i++) {
          RmsNormArgs args{DType::float32, x.row(bases, i), weight, to.row(bases, i), size, eps};
          kernels().layer.rms_norm(args, 0, groups);
        }
      });
}

void RowReader::read_rope_rotations(const Node& node, const RopeRotations& rotations) {
  View positions = view(node.inputs[0]);
  const float* inv_freqs = constant(node.inputs[1]);
  View to = new_value(node.outputs[0]);
  int half_dims = node.inputs[1].shape(0);
  add_row_operation(
      to, {positions}, {},
      [=, scale = rotations.scale()](const Bases& bases, int64_t begin, int64_t end) {
        for (int64_t i = begin; i < end; i++) {
          rotate(*positions.row<int32_t>(bases, i), scale, inv_freqs, half_dims, to.row(bases, i));
        }
      });
}

void RowReader::read_rope(const Node& node, const Rope& rope) {
  View x = view(node.inputs[0]);
  View rotations = view(node.inputs[1]);
  View to = new_value(node.outputs[0]);
  RopeArgs common{};
  common.dtype = DType::float32;
  common.row_stride = x.strides[0];
  common.head_stride = x.strides[1];
  common.dim_stride = x.strides[3];
  common.num_heads = x.shape[1];
  common.head_dim = x.shape[3];
  common.half_dims = rotations.shape[2];
  common.traditional = rope.traditional();
  require(rotations.is_dense(), "rotations that are not dense");
  add_row_operation(to, {x, rotations}, {}, [=](const Bases& bases, int64_t begin, int64_t end) {
    RopeArgs args = common;
    args.x = x.row(bases, 0);
    args.rotations = rotations.row(bases, 0);
    args.out = to.row(bases, 0);
    kernels().layer.rope(args, begin, end);
  });
}

void RowReader::read_layer_norm(const Node& node, const LayerNorm& norm) {
  View x = with_dense_rows(view(node.inputs[0]));
  View to = new_value(node.outputs[0]);
  size_t bias_at = norm.has_weight() ? 2 : 1;
  const float* weight = norm.has_weight() ? constant(node.inputs[1]) : nullptr;
  const float* bias = node.inputs.size() > bias_at ? constant(node.inputs[bias_at]) : nullptr;
  int64_t size = x.shape.back();
  require(x.shape.size() > 1, "a norm over its rows");
  int64_t groups = x.row_size() / size;
  add_row_operation(
      to, {x}, {}, [=, eps = norm.eps()](const Bases& bases, int64_t begin, int64_t end) {
        for (int64_t i = begin; i < end; i++) {
          LayerNormArgs args{
              DType::float32, x.row(bases, i), weight, bias, to.row(bases, i), size, eps};
          kernels().layer.layer_norm(args, 0, groups);
        }
      });
}

// f(x, out, size) of whole rows.
template <typename F>
void RowReader::read_by_element(const Node& node, F f) {
  require(node.inputs[0].dtype() == mx::float32, "a function of other than float32");
  View x = with_dense_rows(view(node.inputs[0]));
  require(x.shape.size() > 1, "a function over its rows");
  View to = new_value(node.outputs[0]);
  add_row_operation(
      to, {x}, {}, [=, size = to.row_size()](const Bases& bases, int64_t begin, int64_t end) {
        for (int64_t i = begin; i < end; i++) {
          f(x.row(bases, i), to.row(bases, i), size);
        }
      });
}

// The same of two.
template <typename F>
void RowReader::read_gated(const Node& node, F f) {
  View gate = with_dense_rows(view(node.inputs[0]));
  View x = with_dense_rows(view(node.inputs[1]));
  View to = new_value(node.outputs[0]);
  add_row_operation(
      to, {gate, x}, {}, [=, size = to.row_size()](const Bases& bases, int64_t begin, int64_t end) {
        for (int64_t i = begin; i < end; i++) {
          f(gate.row(bases, i), x.row(bases, i), to.row(bases, i), size);
        }
      });
}

// Operands of a row lie in any way that is two loops.
template <typename F>
void RowReader::read_elementwise(const Node& node, F combine) {
  View to = new_value(node.outputs[0]);
  auto operand = [&](const mx::array& a) {
    require(a.dtype() == mx::float32, "arithmetic on other than float32");
    return view(a);
  };
  View a = operand(node.inputs[0]);
  View b = operand(node.inputs[1]);
  require(a.shape == to.shape && b.shape == to.shape, "arithmetic on arrays of different shapes");
  auto has_steps_to = [](const InnerAxes& axes) {
    auto is_loop = [](const std::vector<int64_t>& steps) {
      return steps.empty() || steps.back() == 0 || steps.back() == 1;
    };
    return axes.sizes.size() <= 2 && is_loop(axes.steps[0]) && is_loop(axes.steps[1]);
  };
  InnerAxes axes = inner_axes({&a, &b});
  if (!has_steps_to(axes)) {
    a = with_dense_rows(a);
    b = with_dense_rows(b);
    axes = inner_axes({&a, &b});
  }
  // (Outer loop first.)
  int64_t sizes[2] = {1, 1};
  int64_t steps[2][2] = {};
  for (size_t i = 0; i < axes.sizes.size(); i++) {
    size_t loop = 2 - axes.sizes.size() + i;
    sizes[loop] = axes.sizes[i];
    steps[0][loop] = axes.steps[0][i];
    steps[1][loop] = axes.steps[1][i];
  }
  int64_t outer = sizes[0], inner = sizes[1];
  int64_t a_outer = steps[0][0], b_outer = steps[1][0];
  bool a_moves = steps[0][1] == 1, b_moves = steps[1][1] == 1;
  add_row_operation(to, {a, b}, {}, [=](const Bases& bases, int64_t begin, int64_t end) {
    for (int64_t i = begin * outer; i < end * outer; i++) {
      const float* x = a.row(bases, i / outer) + i % outer * a_outer;
      const float* y = b.row(bases, i / outer) + i % outer * b_outer;
      float* out = to.row(bases, i / outer) + i % outer * inner;
      if (a_moves && b_moves) {
        for (int64_t j = 0; j < inner; j++) {
          out[j] = combine(x[j], y[j]);
        }
      } else if (a_moves) {
        for (int64_t j = 0; j < inner; j++) {
          out[j] = combine(x[j], *y);
        }
      } else {
        for (int64_t j = 0; j < inner; j++) {
          out[j] = combine(*x, b_moves ? y[j] : *y);
        }
      }
    }
  });
}

void RowReader::read_gather_axis(const Node& node, int axis) {
  const auto& out = node.outputs[0];
  require(
      axis == int(out.ndim()) - 1 && axis > 0 && node.inputs[0].dtype() == mx::float32 &&
          node.inputs[1].dtype() == mx::uint32,
      "a gather of other than float32 along a row");
  View source = with_dense_rows(view(node.inputs[0]));
  View index = with_dense_rows(view(node.inputs[1]));
  int64_t from = source.shape.back();
  int64_t count = index.shape.back();
  require(
      std::equal(
          source.shape.begin(), source.shape.end() - 1, index.shape.begin(), index.shape.end() - 1),
      "a gather of other rows");
  View to = new_value(out);
  int64_t groups = to.row_size() / count;
  add_row_operation(to, {source, index}, {}, [=](const Bases& bases, int64_t begin, int64_t end) {
    for (int64_t i = begin; i < end; i++) {
      for (int64_t g = 0; g < groups; g++) {
        const float* x = source.row(bases, i) + g * from;
        const uint32_t* at = index.row<uint32_t>(bases, i) + g * count;
        float* values = to.row(bases, i) + g * count;
        for (int64_t j = 0; j < count; j++) {
          values[j] = at[j] < uint64_t(from) ? x[at[j]] : std::nanf("");
        }
      }
    }
  });
}

void RowReader::read_argpartition(const Node& node, int kth, int axis) {
  const auto& in = node.inputs[0];
  axis += axis < 0 ? in.ndim() : 0;
  require(
      axis == int(in.ndim()) - 1 && axis > 0 && in.dtype() == mx::float32,
      "a partition of other than float32 along a row");
  View x = with_dense_rows(view(in));
  View to = new_ids(node.outputs[0]);
  int64_t size = x.shape.back();
  int64_t groups = x.row_size() / size;
  add_row_operation(to, {x}, {}, [=](const Bases& bases, int64_t begin, int64_t end) {
    for (int64_t i = begin; i < end; i++) {
      for (int64_t g = 0; g < groups; g++) {
        mlx_argpartition(
            x.row(bases, i) + g * size, to.row<uint32_t>(bases, i) + g * size, size, kth);
      }
    }
  });
}

void RowReader::read_sum(const Node& node, const std::vector<int>& axes) {
  const auto& in = node.inputs[0];
  require(in.dtype() == mx::float32, "a sum of other than float32");
  require(axes.size() == 1, "a sum over several axes");
  int axis = axes[0] + (axes[0] < 0 ? int(in.ndim()) : 0);
  require(axis > 0, "a sum over rows");
  View x = with_dense_rows(view(in));
  View to = new_value(node.outputs[0]);
  int64_t count = x.shape[axis];
  int64_t inner = 1;
  for (size_t i = axis + 1; i < x.shape.size(); i++) {
    inner *= x.shape[i];
  }
  int64_t groups = to.row_size() / inner;
  add_row_operation(to, {x}, {}, [=](const Bases& bases, int64_t begin, int64_t end) {
    for (int64_t i = begin; i < end; i++) {
      for (int64_t g = 0; g < groups; g++) {
        mlx_sum(x.row(bases, i) + g * count * inner, to.row(bases, i) + g * inner, count, inner);
      }
    }
  });
}

}  // namespace mlx_paged::cpu
