// Copyright © 2026 the mlx_paged authors. Apache-2.0.

#include <algorithm>
#include <cmath>
#include <cstring>
#include <string>

#include "kernels.h"
#include "lora.h"
#include "lowering.h"
#include "mlx/primitives.h"
#include "mlx_rows.h"
#include "rotations.h"
#include "weights.h"

namespace mlx_paged::cpu {

void CpuLowering::lower_rows(const GraphNode& node) {
  if (auto function = mlx_function(node.op)) {
    return lower_by_element(node, *function);
  }
  switch (node.op) {
    case Op::rms_norm:
      return lower_rms_norm(node);
    case Op::layer_norm:
      return lower_layer_norm(node);
    case Op::rope_rotations:
      return lower_rope_rotations(node);
    case Op::rope:
      return lower_rope(node);
    case Op::lora:
      return lower_lora(node);
    case Op::lookup:
      return lower_lookup(node);
    case Op::gather:
      return lower_gather(node);
    case Op::gather_axis:
      return lower_gather_axis(node);
    case Op::arg_partition:
      return lower_argpartition(node);
    case Op::sum:
      return lower_sum(node);
    case Op::silu_mul:
      return lower_gated(node, [](const float* gate, const float* x, float* out, int64_t size) {
        kernels().layer.silu_mul({DType::float32, gate, x, out}, 0, size);
      });
    case Op::clipped_swiglu: {
      const auto& swiglu = node.as<ClippedSwiglu>();
      return lower_gated(
          node, [alpha = swiglu.alpha(), limit = swiglu.limit()](
                    const float* gate, const float* x, float* out, int64_t size) {
            kernels().layer.clipped_swiglu({DType::float32, gate, x, out, alpha, limit}, 0, size);
          });
    }
    case Op::gelu:
      return lower_by_element(
          node, [kind = node.as<Gelu>().kind()](const float* x, float* out, int64_t size) {
            kernels().layer.gelu({DType::float32, kind, x, out}, 0, size);
          });
    case Op::softmax: {
      int64_t size = node.inputs[0].shape(-1);
      return lower_by_element(node, [size](const float* x, float* out, int64_t count) {
        for (int64_t i = 0; i < count; i += size) {
          mlx_softmax(x + i, out + i, size);
        }
      });
    }
    case Op::add:
      return lower_elementwise(node, [](float a, float b) { return a + b; });
    case Op::subtract:
      return lower_elementwise(node, [](float a, float b) { return a - b; });
    case Op::multiply:
      return lower_elementwise(node, [](float a, float b) { return a * b; });
    case Op::divide:
      return lower_elementwise(node, [](float a, float b) { return a / b; });
    case Op::maximum:
      return lower_elementwise(node, mlx_maximum);
    default:
      return lower_view(node);
  }
}

void CpuLowering::lower_view(const GraphNode& node) {
  const auto& out = node.outputs[0];
  if (node.op == Op::stop_gradient) {
    views_[out.id()] = view(node.inputs[0]);
    return;
  }
  if (node.op == Op::broadcast) {
    View in = view(node.inputs[0]);
    mx::Strides strides(out.ndim(), 0);
    size_t missing = out.ndim() - in.shape.size();
    for (size_t i = 0; i < in.shape.size(); i++) {
      strides[missing + i] = in.shape[i] == 1 ? 0 : in.strides[i];
    }
    views_[out.id()] = {in.buffer, in.offset, out.shape(), strides};
    return;
  }
  require(is_view(node.op), std::string("the operation ") + node.primitive->name());
  View in = view(node.inputs[0]);
  if (auto views = views_of(node, in)) {
    for (size_t i = 0; i < views->size(); i++) {
      views_[node.outputs[i].id()] = (*views)[i];
    }
    return;
  }
  require(node.inputs[0].itemsize() == sizeof(float), "a copy of other than four bytes");
  View dense = copied(in);
  views_[out.id()] = {dense.buffer, dense.offset, out.shape(), dense_strides(out.shape())};
}

void CpuLowering::lower_gather(const GraphNode& node) {
  auto [axes, slices] = node.as<mx::Gather>().state();
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
  add_row_task(to, {index}, {source.buffer}, [=](const Bases& bases, int64_t begin, int64_t end) {
    for (int64_t i = begin; i < end; i++) {
      int64_t at = *index.row<int32_t>(bases, i);
      at += at < 0 ? count : 0;
      if (at < 0 || at >= count) {  // an exception would end the stream
        std::fill_n(to.row(bases, i), size, std::nanf(""));
        continue;
      }
      std::memcpy(to.row(bases, i), source.row(bases, at), size * sizeof(float));
    }
  });
}

void CpuLowering::lower_lookup(const GraphNode& node) {
  Arrays in = with_weights(node);
  View ids = view(node.inputs[0]);
  require(ids.row_size() == 1, "a lookup of several rows for a row");
  View to = new_value(node.outputs[0]);
  add_row_task(
      to, {ids}, {},
      [=, weights = weights_of(&in[1], node.as<Lookup>().codes())](
          const Bases& bases, int64_t begin, int64_t end) {
        for (int64_t i = begin; i < end; i++) {
          read_row(weights, *ids.row<int32_t>(bases, i), to.row(bases, i));
        }
      });
}

void CpuLowering::lower_rms_norm(const GraphNode& node) {
  View x = dense_rows(view(node.inputs[0]));
  View to = new_value(node.outputs[0]);
  const float* weight = node.inputs.size() > 1 ? constant(node.inputs[1]) : nullptr;
  int64_t size = x.shape.back();
  require(x.shape.size() > 1, "a norm over its rows");
  int64_t groups = x.row_size() / size;
  add_row_task(
      to, {x}, {},
      [=, eps = node.as<RmsNorm>().eps()](const Bases& bases, int64_t begin, int64_t end) {
        for (int64_t i = begin; i < end; i++) {
          RmsNormArgs args{DType::float32, x.row(bases, i), weight, to.row(bases, i), size, eps};
          kernels().layer.rms_norm(args, 0, groups);
        }
      });
}

void CpuLowering::lower_rope_rotations(const GraphNode& node) {
  View positions = view(node.inputs[0]);
  const float* inv_freqs = constant(node.inputs[1]);
  View to = new_value(node.outputs[0]);
  int half_dims = node.inputs[1].shape(0);
  add_row_task(
      to, {positions}, {},
      [=, scale = node.as<RopeRotations>().scale()](
          const Bases& bases, int64_t begin, int64_t end) {
        for (int64_t i = begin; i < end; i++) {
          rotate(*positions.row<int32_t>(bases, i), scale, inv_freqs, half_dims, to.row(bases, i));
        }
      });
}

void CpuLowering::lower_rope(const GraphNode& node) {
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
  common.traditional = node.as<Rope>().traditional();
  require(rotations.is_dense(), "rotations that are not dense");
  add_row_task(to, {x, rotations}, {}, [=](const Bases& bases, int64_t begin, int64_t end) {
    RopeArgs args = common;
    args.x = x.row(bases, 0);
    args.rotations = rotations.row(bases, 0);
    args.out = to.row(bases, 0);
    kernels().layer.rope(args, begin, end);
  });
}

// A lora whose base is not made by a product of the same x.
void CpuLowering::lower_lora(const GraphNode& node) {
  View base = dense_rows(view(node.inputs[Lora::kBase]));
  Adapters with = adapters_of(node, dense_rows(view(node.inputs[Lora::kX])));
  require(base.row_size() == with.shape.n, "adapters of several vectors");
  View to = new_value(node.outputs[0]);
  add_row_task(
      to, {base, with.hidden, with.adapters}, {with.b.buffer},
      [=](const Bases& bases, int64_t begin, int64_t end) {
        for (int64_t i = begin; i < end; i++) {
          std::copy_n(base.row(bases, i), with.shape.n, to.row(bases, i));
        }
        lora_up(
            with.rows(bases).part(begin, end), to.row(bases, begin), with.shape.n, 0, with.shape.n);
      });
}

void CpuLowering::lower_layer_norm(const GraphNode& node) {
  const auto& norm = node.as<LayerNorm>();
  View x = dense_rows(view(node.inputs[0]));
  View to = new_value(node.outputs[0]);
  size_t bias_at = norm.has_weight() ? 2 : 1;
  const float* weight = norm.has_weight() ? constant(node.inputs[1]) : nullptr;
  const float* bias = node.inputs.size() > bias_at ? constant(node.inputs[bias_at]) : nullptr;
  int64_t size = x.shape.back();
  require(x.shape.size() > 1, "a norm over its rows");
  int64_t groups = x.row_size() / size;
  add_row_task(to, {x}, {}, [=, eps = norm.eps()](const Bases& bases, int64_t begin, int64_t end) {
    for (int64_t i = begin; i < end; i++) {
      LayerNormArgs args{
          DType::float32, x.row(bases, i), weight, bias, to.row(bases, i), size, eps};
      kernels().layer.layer_norm(args, 0, groups);
    }
  });
}

// f(x, out, size) on whole rows.
template <typename F>
void CpuLowering::lower_by_element(const GraphNode& node, F f) {
  require(node.inputs[0].dtype() == mx::float32, "a function of other than float32");
  View x = dense_rows(view(node.inputs[0]));
  require(x.shape.size() > 1, "a function over its rows");
  View to = new_value(node.outputs[0]);
  add_row_task(
      to, {x}, {}, [=, size = to.row_size()](const Bases& bases, int64_t begin, int64_t end) {
        for (int64_t i = begin; i < end; i++) {
          f(x.row(bases, i), to.row(bases, i), size);
        }
      });
}

// f(gate, x, out, size) on whole rows.
template <typename F>
void CpuLowering::lower_gated(const GraphNode& node, F f) {
  View gate = dense_rows(view(node.inputs[0]));
  View x = dense_rows(view(node.inputs[1]));
  View to = new_value(node.outputs[0]);
  add_row_task(
      to, {gate, x}, {}, [=, size = to.row_size()](const Bases& bases, int64_t begin, int64_t end) {
        for (int64_t i = begin; i < end; i++) {
          f(gate.row(bases, i), x.row(bases, i), to.row(bases, i), size);
        }
      });
}

// Operands of a row can have any strides that two nested loops can follow.
template <typename F>
void CpuLowering::lower_elementwise(const GraphNode& node, F combine) {
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
    a = dense_rows(a);
    b = dense_rows(b);
    axes = inner_axes({&a, &b});
  }
  // The outer loop comes first.
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
  add_row_task(to, {a, b}, {}, [=](const Bases& bases, int64_t begin, int64_t end) {
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

void CpuLowering::lower_gather_axis(const GraphNode& node) {
  int axis = node.as<mx::GatherAxis>().state();
  const auto& out = node.outputs[0];
  require(
      axis == int(out.ndim()) - 1 && axis > 0 && node.inputs[0].dtype() == mx::float32 &&
          node.inputs[1].dtype() == mx::uint32,
      "a gather of other than float32 along a row");
  View source = dense_rows(view(node.inputs[0]));
  View index = dense_rows(view(node.inputs[1]));
  int64_t from = source.shape.back();
  int64_t count = index.shape.back();
  require(
      std::equal(
          source.shape.begin(), source.shape.end() - 1, index.shape.begin(), index.shape.end() - 1),
      "a gather of other rows");
  View to = new_value(out);
  int64_t groups = to.row_size() / count;
  add_row_task(to, {source, index}, {}, [=](const Bases& bases, int64_t begin, int64_t end) {
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

void CpuLowering::lower_argpartition(const GraphNode& node) {
  auto [kth, axis] = node.as<mx::ArgPartition>().state();
  const auto& in = node.inputs[0];
  axis += axis < 0 ? in.ndim() : 0;
  require(
      axis == int(in.ndim()) - 1 && axis > 0 && in.dtype() == mx::float32,
      "a partition of other than float32 along a row");
  View x = dense_rows(view(in));
  View to = new_ids(node.outputs[0]);
  int64_t size = x.shape.back();
  int64_t groups = x.row_size() / size;
  add_row_task(to, {x}, {}, [=](const Bases& bases, int64_t begin, int64_t end) {
    for (int64_t i = begin; i < end; i++) {
      for (int64_t g = 0; g < groups; g++) {
        mlx_argpartition(
            x.row(bases, i) + g * size, to.row<uint32_t>(bases, i) + g * size, size, kth);
      }
    }
  });
}

void CpuLowering::lower_sum(const GraphNode& node) {
  const auto& axes = node.as<mx::Reduce>().state().second;
  const auto& in = node.inputs[0];
  require(in.dtype() == mx::float32, "a sum of other than float32");
  require(axes.size() == 1, "a sum over several axes");
  int axis = axes[0] + (axes[0] < 0 ? int(in.ndim()) : 0);
  require(axis > 0, "a sum over rows");
  View x = dense_rows(view(in));
  View to = new_value(node.outputs[0]);
  int64_t count = x.shape[axis];
  int64_t inner = 1;
  for (size_t i = axis + 1; i < x.shape.size(); i++) {
    inner *= x.shape[i];
  }
  int64_t groups = to.row_size() / inner;
  add_row_task(to, {x}, {}, [=](const Bases& bases, int64_t begin, int64_t end) {
    for (int64_t i = begin; i < end; i++) {
      for (int64_t g = 0; g < groups; g++) {
        mlx_sum(x.row(bases, i) + g * count * inner, to.row(bases, i) + g * inner, count, inner);
      }
    }
  });
}

}  // namespace mlx_paged::cpu
