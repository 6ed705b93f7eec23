// Copyright © 2026 the mlx_paged authors. Apache-2.0.
//
// From the graph that model code builds to a Program.

#include <algorithm>
#include <array>
#include <cmath>
#include <cstring>
#include <map>
#include <optional>
#include <set>
#include <unordered_map>
#include <unordered_set>

#include "../dense.h"
#include "kernels.h"
#include "mlx/transforms.h"
#include "parallel_for.h"
#include "program.h"
#include "program_phases.h"
#include "rotations.h"

namespace mlx_paged::cpu {

namespace {

mx::Strides dense_strides(const mx::Shape& shape) {
  mx::Strides strides(shape.size());
  int64_t size = 1;
  for (size_t i = shape.size(); i-- > 0;) {
    strides[i] = size;
    size *= shape[i];
  }
  return strides;
}

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

// A node of the graph: all the outputs of one primitive.
struct Node {
  const mx::Primitive* primitive;
  Arrays inputs;
  Arrays outputs;
  bool fused = false;  // part of another node's product
};

}  // namespace

class ProgramReader {
 public:
  ProgramReader(Program& program, const Arrays& inputs, const Arrays& outputs)
      : program_(program), inputs_(inputs), outputs_(outputs) {}

  void read() {
    require(kernels().product.most_rows_float32 > 0, "the instruction set has too few registers");
    require(!outputs_.empty(), "it has no outputs");
    add_inputs();
    find_nodes();
    mx::eval(program_.constants_);
    fuse();
    for (const Node& node : nodes_) {
      if (!node.fused) {
        read_node(node);
      }
    }
    add_outputs();
    check_inputs();
    for (size_t i = 0; i < inputs_.size(); i++) {
      program_.any_length_[i] = program_.any_length_[i] || !uses_.count(inputs_[i].id());
    }
    auto made = make_phases(operations_, program_.buffers_);
    program_.phases_ = std::move(made.phases);
    program_.temporary_bytes_ = made.temporary_bytes;
  }

 private:
  using Id = std::uintptr_t;

  // --- The graph ---

  void add_inputs() {
    for (size_t i = 0; i < inputs_.size(); i++) {
      const auto& in = inputs_[i];
      program_.input_shapes_.push_back(in.shape());
      program_.input_dtypes_.push_back(in.dtype());
      int buffer = add_buffer({.kind = Buffer::Kind::input, .index = int(i)});
      views_[in.id()] = {buffer, 0, in.shape(), dense_strides(in.shape())};
      depends_.insert(in.id());
    }
    program_.any_length_.assign(inputs_.size(), false);
  }

  // Fills nodes_, every one after those that it needs, and the program's constants.
  void find_nodes() {
    struct Visit {
      mx::array array;
      size_t next = 0;
    };
    std::unordered_set<Id> seen;
    for (const auto& output : outputs_) {
      std::vector<Visit> stack{{output}};
      while (!stack.empty()) {
        auto& [array, next] = stack.back();
        if (views_.count(array.id()) || (next == 0 && !seen.insert(array.id()).second)) {
          stack.pop_back();
          continue;
        }
        bool is_leaf = !array.has_primitive() || array.status() != mx::array::Status::unscheduled;
        if (!is_leaf && next < array.inputs().size()) {
          auto input = array.inputs()[next++];
          stack.push_back({input});
          continue;
        }
        if (!is_leaf) {
          add_node(array);
          for (const auto& sibling : array.siblings()) {
            seen.insert(sibling.id());
          }
        }
        stack.pop_back();
      }
    }
    std::unordered_set<Id> kept;
    auto keep = [&](const mx::array& a) {
      if (!depends_.count(a.id()) && kept.insert(a.id()).second) {
        program_.constants_.push_back(a);
      }
    };
    for (const Node& node : nodes_) {
      for (const auto& in : node.inputs) {
        keep(in);
        uses_[in.id()]++;
      }
    }
    for (const auto& output : outputs_) {
      require(depends_.count(output.id()), "an output does not depend on the inputs");
      uses_[output.id()]++;
    }
  }

  void add_node(const mx::array& array) {
    const auto& inputs = array.inputs();
    bool depends = std::any_of(inputs.begin(), inputs.end(), [&](const mx::array& in) {
      return depends_.count(in.id()) > 0;
    });
    if (!depends) {
      return;
    }
    Node node{&array.primitive(), inputs, mx::array(array).outputs()};
    for (const auto& out : node.outputs) {
      depends_.insert(out.id());
      producers_[out.id()] = nodes_.size();
    }
    nodes_.push_back(std::move(node));
  }

  // --- Products that end in what follows them ---

  struct Linears {
    size_t gate;
    std::optional<size_t> up;
    std::optional<mx::array> added;
  };

  static bool is_linear(const Node& node) {
    return dynamic_cast<const Linear*>(node.primitive) ||
           dynamic_cast<const QuantizedLinear*>(node.primitive);
  }

  std::optional<size_t> own_linear(const mx::array& a) const {
    auto found = producers_.find(a.id());
    if (found == producers_.end() || uses_.at(a.id()) != 1) {
      return std::nullopt;
    }
    const Node& node = nodes_[found->second];
    return is_linear(node) && !node.fused ? std::optional(found->second) : std::nullopt;
  }

  void fuse() {
    for (size_t i = 0; i < nodes_.size(); i++) {
      const Node& node = nodes_[i];
      if (dynamic_cast<const SiluMul*>(node.primitive)) {
        auto gate = own_linear(node.inputs[0]);
        auto up = own_linear(node.inputs[1]);
        if (gate && up && gate != up &&
            nodes_[*gate].inputs[0].id() == nodes_[*up].inputs[0].id()) {
          nodes_[*gate].fused = nodes_[*up].fused = true;
          linears_[i] = {*gate, up, std::nullopt};
        }
      } else if (is(node, "Add") && node.inputs[0].shape() == node.inputs[1].shape()) {
        for (int side : {1, 0}) {
          if (auto linear = own_linear(node.inputs[side])) {
            nodes_[*linear].fused = true;
            linears_[i] = {*linear, std::nullopt, node.inputs[1 - side]};
            break;
          }
        }
      }
    }
  }

  static bool is(const Node& node, const char* name) {
    return std::strcmp(node.primitive->name(), name) == 0;
  }

  // --- Nodes ---

  // Natively, or as an operation of MLX's own.
  void read_node(const Node& node) {
    size_t num_operations = operations_.size();
    try {
      read_native(node);
    } catch (const Unsupported&) {
      // (What is part of another node's product has no value of its own.)
      if (dynamic_cast<const KernelNode*>(node.primitive) ||
          linears_.count(&node - nodes_.data())) {
        throw;
      }
      operations_.resize(num_operations);
      read_whole(node);
    }
  }

  void read_whole(const Node& node) {
    NodePhase p;
    p.primitive = node.outputs[0].primitive_ptr();
    Operation op;
    op.kind = Operation::Kind::node;
    for (const auto& in : node.inputs) {
      if (depends_.count(in.id())) {
        const View& v = view(in);
        p.inputs.push_back({v, in.dtype(), std::nullopt});
        op.gathers.push_back(v.buffer);
      } else {
        p.inputs.push_back({View{}, in.dtype(), evaluated(in)});
      }
    }
    for (const auto& out : node.outputs) {
      require(out.size() > 0, "an operation without results");
      int buffer = add_buffer({.kind = Buffer::Kind::node});
      views_[out.id()] = {buffer, 0, out.shape(), dense_strides(out.shape())};
      p.outputs.push_back({buffer, out.shape(), out.dtype()});
      op.writes.push_back(buffer);
    }
    require(p.primitive->device() == mx::Device::cpu, "an operation of a GPU");
    auto stream = p.primitive->stream();
    require(!program_.stream_ || *program_.stream_ == stream, "operations of several streams");
    program_.stream_ = stream;
    op.node = std::move(p);
    operations_.push_back(std::move(op));
  }

  void read_native(const Node& node) {
    size_t index = &node - nodes_.data();
    if (auto found = linears_.find(index); found != linears_.end()) {
      return read_product(found->second, node.outputs[0]);
    }
    const auto* p = node.primitive;
    if (is_linear(node)) {
      return read_product({index, std::nullopt, std::nullopt}, node.outputs[0]);
    }
    if (auto* norm = dynamic_cast<const RmsNorm*>(p)) {
      return read_rms_norm(node, *norm);
    }
    if (auto* rotations = dynamic_cast<const RopeRotations*>(p)) {
      return read_rope_rotations(node, *rotations);
    }
    if (auto* rope = dynamic_cast<const Rope*>(p)) {
      return read_rope(node, *rope);
    }
    if (dynamic_cast<const SiluMul*>(p)) {
      return read_silu_mul(node);
    }
    if (auto* lookup = dynamic_cast<const Lookup*>(p)) {
      return read_lookup(node, *lookup);
    }
    if (dynamic_cast<const WriteKV*>(p)) {
      return read_write_kv(node);
    }
    if (auto* attention = dynamic_cast<const PagedAttention*>(p)) {
      return read_attention(node, *attention);
    }
    if (is(node, "Gather")) {
      return read_gather(node, static_cast<const mx::Gather&>(*p));
    }
    if (is(node, "Add")) {
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
    read_view(node);
  }

  void read_view(const Node& node) {
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

  void read_gather(const Node& node, const mx::Gather& gather) {
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

  void read_lookup(const Node& node, const Lookup& lookup) {
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

  void read_rms_norm(const Node& node, const RmsNorm& norm) {
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

  void read_rope_rotations(const Node& node, const RopeRotations& rotations) {
    View positions = view(node.inputs[0]);
    const float* inv_freqs = constant(node.inputs[1]);
    View to = new_value(node.outputs[0]);
    int half_dims = node.inputs[1].shape(0);
    add_row_operation(
        to, {positions}, {},
        [=, scale = rotations.scale()](const Bases& bases, int64_t begin, int64_t end) {
          for (int64_t i = begin; i < end; i++) {
            rotate(
                *positions.row<int32_t>(bases, i), scale, inv_freqs, half_dims, to.row(bases, i));
          }
        });
  }

  void read_rope(const Node& node, const Rope& rope) {
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

  void read_silu_mul(const Node& node) {
    View gate = with_dense_rows(view(node.inputs[0]));
    View x = with_dense_rows(view(node.inputs[1]));
    View to = new_value(node.outputs[0]);
    add_row_operation(to, {gate, x}, {}, [=](const Bases& bases, int64_t begin, int64_t end) {
      for (int64_t i = begin; i < end; i++) {
        SiluMulArgs args{DType::float32, gate.row(bases, i), x.row(bases, i), to.row(bases, i)};
        kernels().layer.silu_mul(args, 0, to.row_size());
      }
    });
  }

  // Of a row: as many numbers, or one for all.
  template <typename F>
  void read_elementwise(const Node& node, F combine) {
    View to = new_value(node.outputs[0]);
    auto operand = [&](const mx::array& a) {
      require(a.dtype() == mx::float32, "arithmetic on other than float32");
      View v = view(a);
      bool is_one = true;
      for (size_t i = 1; i < v.shape.size(); i++) {
        is_one &= v.strides[i] == 0 || v.shape[i] == 1;
      }
      if (!is_one) {
        v = with_dense_rows(v);
      }
      return std::pair{v, is_one && v.row_size() > 1};
    };
    auto [a, one_a] = operand(node.inputs[0]);
    auto [b, one_b] = operand(node.inputs[1]);
    require(a.shape == to.shape && b.shape == to.shape, "arithmetic on arrays of different shapes");
    int64_t size = to.row_size();
    add_row_operation(
        to, {a, b}, {},
        [=, a = a, b = b, one_a = one_a, one_b = one_b](
            const Bases& bases, int64_t begin, int64_t end) {
          for (int64_t i = begin; i < end; i++) {
            const float* x = a.row(bases, i);
            const float* y = b.row(bases, i);
            float* out = to.row(bases, i);
            if (one_a || one_b) {
              for (int64_t j = 0; j < size; j++) {
                out[j] = combine(one_a ? *x : x[j], one_b ? *y : y[j]);
              }
            } else {
              for (int64_t j = 0; j < size; j++) {
                out[j] = combine(x[j], y[j]);
              }
            }
          }
        });
  }

  void read_write_kv(const Node& node) {
    View slots = view(node.inputs[4]);
    Operation op;
    op.kind = Operation::Kind::rows;
    op.gathers = {slots.buffer};
    struct Part {
      View rows, pool;
      int64_t bytes;    // of a row
      PoolArgs format;  // (its data is not known before the run)
    };
    std::vector<Part> parts;
    for (int i = 0; i < 2; i++) {
      const auto& pool_array = node.inputs[i];
      View pool = view(pool_array);
      require(buffer(pool).kind == Buffer::Kind::input, "a pool that is not an input");
      auto layout = layout_of(pool_array);
      require(
          layout.format != PoolFormat::plain || pool_array.dtype() == mx::float32,
          "pools of 16 bits");
      require(node.inputs[2 + i].dtype() == mx::float32, "keys of other than float32");
      View rows = with_dense_rows(view(node.inputs[2 + i]));
      (is_aligned(rows) ? op.reads : op.gathers).push_back(rows.buffer);
      bool rotated = i == 0 && rotates_keys(layout.format);
      parts.push_back(
          {rows,
           pool,
           rows.row_size() * int64_t(sizeof(float)),
           {{layout, nullptr}, DType::float32, rotated}});
      views_[node.outputs[i].id()] = pool;
    }
    op.rows = slots.rows();
    op.writes = {parts[0].pool.buffer, parts[1].pool.buffer};
    op.task = [=](const Bases& bases, int64_t begin, int64_t end) {
      for (int64_t i = begin; i < end; i++) {
        const int32_t* slot = slots.row<int32_t>(bases, i);
        if (*slot < 0) {
          continue;
        }
        for (const Part& part : parts) {
          char* pool = bases[part.pool.buffer];
          if (part.format.pool.format == PoolFormat::plain) {
            std::memcpy(pool + *slot * part.bytes, part.rows.row(bases, i), part.bytes);
            continue;
          }
          PoolArgs args = part.format;
          args.pool.data = pool;
          kernels().pool.quantise(args, part.rows.row(bases, i), slot, 0, 1);
        }
      }
    };
    operations_.push_back(std::move(op));
  }

  void read_attention(const Node& node, const PagedAttention& attention) {
    const auto& in = node.inputs;
    using A = PagedAttention;
    require(in[A::kPositions].ndim() == 1, "rows with bounds");
    require(in[A::kQueries].dtype() == mx::float32, "attention of other than float32");
    View queries = view(in[A::kQueries]);
    if (!queries.is_dense()) {
      queries = copied(queries);
    }
    View keys = view(in[A::kKeyPool]);
    View values = view(in[A::kValuePool]);
    AttentionPhase p{};
    p.queries = queries;
    p.out = new_value(node.outputs[0]);
    p.key_pool = keys.buffer;
    p.value_pool = values.buffer;
    p.positions = input_of(in[A::kPositions]);
    p.tables = any_length(in[A::kTables]);
    p.work_items = any_length(in[A::kWork]);
    p.merge_items = any_length(in[A::kMerge]);
    p.sinks = in.size() > A::kSinks ? constant(in[A::kSinks]) : nullptr;
    p.options = attention.options();
    p.dtype = DType::float32;
    p.num_q_heads = queries.shape[1];
    p.keys = layout_of(in[A::kKeyPool]);
    p.values = layout_of(in[A::kValuePool]);
    Operation op;
    op.kind = Operation::Kind::attention;
    op.rows = queries.rows();
    op.gathers = {queries.buffer, keys.buffer, values.buffer};
    op.writes = {p.out.buffer};
    op.attention = p;
    operations_.push_back(std::move(op));
  }

  // A constant's handle with its data.
  mx::array evaluated(const mx::array& a) const {
    auto found = std::find_if(
        program_.constants_.begin(), program_.constants_.end(),
        [&](const mx::array& constant) { return constant.id() == a.id(); });
    return found == program_.constants_.end() ? a : *found;
  }

  // The inputs of a node with their data, but for the first.
  Arrays evaluated(const Node& node) const {
    Arrays in = node.inputs;
    for (size_t i = 1; i < in.size(); i++) {
      require(!depends_.count(in[i].id()), "weights that depend on the inputs");
      in[i] = evaluated(in[i]);
      require(is_dense(in[i]), "weights that are not dense");
    }
    return in;
  }

  Projection projection_of(const Node& node) {
    Arrays in = evaluated(node);
    Projection p{};
    size_t bias = 2;
    if (auto* quantized = dynamic_cast<const QuantizedLinear*>(node.primitive)) {
      p.weight = quantized->weights(in);
      p.activations = quantized->activations();
      bias = p.weight.biases ? 4 : 3;
    } else {
      p.weight = Linear::weights(in[1]);
    }
    p.bias = in.size() > bias ? constant(node.inputs[bias]) : nullptr;
    p.x = with_dense_rows(view(node.inputs[0]));
    require(p.x.row_size() == p.weight.k, "a product of several vectors a row");
    require(p.x.rows() <= kernels().product.most_rows(p.weight), "more rows than it pays for");
    if (p.activations == Activations::int8) {
      if (has_int8_product(p.weight)) {
        p.x = rounded_to_int8(p.x, p.weight);
      } else {
        p.activations = Activations::float32;
      }
    }
    return p;
  }

  // The rows of x as the products of int8 activations read them; once for all that read them.
  View rounded_to_int8(const View& x, const WeightView& weight) {
    auto& to = rounded_[{x.buffer, x.offset, x.strides[0], x.rows(), weight.k, weight.bits}];
    if (to) {
      return *to;
    }
    int floats = num_int8_chunks(weight.k) * int(sizeof(Int8Chunk) / sizeof(float));
    int buffer = add_buffer({.kind = Buffer::Kind::temporary});
    program_.buffers_[buffer].bytes = x.rows() * floats * int64_t(sizeof(float));
    program_.buffers_[buffer].row_size = floats;
    to = View{buffer, 0, {int(x.rows()), floats}, {floats, 1}};
    add_row_operation(
        *to, {x}, {},
        [x, to = *to, k = weight.k, bits = weight.bits](
            const Bases& bases, int64_t begin, int64_t end) {
          kernels().rounded.int8.quantise(
              x.row(bases, begin), x.strides[0], int(end - begin), k, bits,
              reinterpret_cast<Int8Chunk*>(to.row(bases, begin)));
        });
    return *to;
  }

  void read_product(const Linears& linears, const mx::array& out) {
    Product p{};
    p.out = new_value(out);
    p.main = projection_of(nodes_[linears.gate]);
    Operation op;
    op.kind = Operation::Kind::product;
    op.rows = p.out.rows();
    op.gathers = {p.main.x.buffer};
    if (linears.up) {
      p.up = projection_of(nodes_[*linears.up]);
      op.gathers.push_back(p.up->x.buffer);
      require(
          p.up->weight.n == p.main.weight.n && p.up->weight.k == p.main.weight.k,
          "a gate of another size");
    }
    if (linears.added) {
      p.added = with_dense_rows(view(*linears.added));
      op.gathers.push_back(p.added->buffer);
    }
    op.writes = {p.out.buffer};
    op.product = p;
    operations_.push_back(std::move(op));
  }

  // --- Values ---

  const View& view(const mx::array& a) {
    auto found = views_.find(a.id());
    if (found == views_.end()) {
      require(!depends_.count(a.id()), "an operation whose input is not known");
      int buffer = add_buffer({.kind = Buffer::Kind::constant});
      program_.buffers_[buffer].data = const_cast<char*>(a.data<char>());
      found = views_.emplace(a.id(), View{buffer, 0, a.shape(), a.strides()}).first;
      for (const auto& constant : program_.constants_) {
        if (constant.id() == a.id()) {  // (a handle of it that is evaluated)
          program_.buffers_[buffer].data = const_cast<char*>(constant.data<char>());
          found->second.strides = constant.strides();
          break;
        }
      }
    }
    return found->second;
  }

  // The dense numbers of an array that does not depend on the inputs.
  const float* constant(const mx::array& a) {
    require(!depends_.count(a.id()), "weights that depend on the inputs");
    require(a.dtype() == mx::float32, "weights of other than float32");
    View v = view(a);
    require(v.is_dense(), "weights that are not dense");
    return reinterpret_cast<const float*>(program_.buffers_[v.buffer].data) + v.offset;
  }

  int input_of(const mx::array& a) {
    View v = view(a);
    const Buffer& b = buffer(v);
    require(
        b.kind == Buffer::Kind::input && v.offset == 0 && v.is_dense(),
        "a plan that is not an input");
    return b.index;
  }

  int any_length(const mx::array& a) {
    int i = input_of(a);
    program_.any_length_[i] = true;
    return i;
  }

  View new_value(const mx::array& a) {
    require(a.dtype() == mx::float32, "a value of other than float32");
    require(a.ndim() > 0 && a.size() > 0, "a value without rows");
    int buffer = add_buffer({.kind = Buffer::Kind::temporary});
    program_.buffers_[buffer].bytes = int64_t(a.nbytes());
    program_.buffers_[buffer].row_size = int64_t(a.size()) / a.shape(0);
    View v{buffer, 0, a.shape(), dense_strides(a.shape())};
    views_[a.id()] = v;
    return v;
  }

  View with_dense_rows(const View& v) { return v.has_dense_rows() ? v : copied(v); }

  View copied(const View& from) {
    int buffer = add_buffer({.kind = Buffer::Kind::temporary});
    View to{buffer, 0, from.shape, dense_strides(from.shape)};
    program_.buffers_[buffer].bytes = from.rows() * from.row_size() * int64_t(sizeof(float));
    program_.buffers_[buffer].row_size = from.row_size();
    require(from.shape.size() <= 4, "a copy of more than four axes");
    std::array<int64_t, 4> size{1, 1, 1, 1}, step{};
    size_t missing = 4 - from.shape.size();
    for (size_t i = 1; i < from.shape.size(); i++) {
      size[missing + i] = from.shape[i];
      step[missing + i] = from.strides[i];
    }
    require(from.shape.size() > 0, "a copy of a scalar");
    add_row_operation(to, {from}, {}, [=](const Bases& bases, int64_t begin, int64_t end) {
      for (int64_t i = begin; i < end; i++) {
        const float* src = from.row(bases, i);
        float* dst = to.row(bases, i);
        for (int64_t a = 0; a < size[1]; a++) {
          for (int64_t b = 0; b < size[2]; b++) {
            for (int64_t c = 0; c < size[3]; c++) {
              *dst++ = src[a * step[1] + b * step[2] + c * step[3]];
            }
          }
        }
      }
    });
    return to;
  }

  int add_buffer(Buffer buffer) {
    program_.buffers_.push_back(buffer);
    return int(program_.buffers_.size()) - 1;
  }

  const Buffer& buffer(const View& v) const { return program_.buffers_[v.buffer]; }

  // Whether row i of a view is part of row i of what was written.
  bool is_aligned(const View& v) const {
    int64_t size = buffer(v).row_size;
    int64_t end = v.offset + 1;
    for (size_t i = 1; i < v.shape.size(); i++) {
      end += (v.shape[i] - 1) * v.strides[i];
    }
    return end <= size && (v.rows() == 1 || v.strides[0] == size);
  }

  void add_row_operation(
      const View& to, const std::vector<View>& reads, std::vector<int> gathers, RowTask task) {
    Operation op;
    op.kind = Operation::Kind::rows;
    op.rows = to.rows();
    op.task = std::move(task);
    op.gathers = std::move(gathers);
    for (const View& v : reads) {
      (is_aligned(v) ? op.reads : op.gathers).push_back(v.buffer);
    }
    op.writes = {to.buffer};
    operations_.push_back(std::move(op));
  }

  void add_outputs() {
    require(outputs_[0].dtype() == mx::float32, "a result of other than float32");
    View result = view(outputs_[0]);
    bool is_shown = std::any_of(operations_.begin(), operations_.end(), [&](const Operation& op) {
      return op.kind == Operation::Kind::node &&
             std::count(op.gathers.begin(), op.gathers.end(), result.buffer);
    });
    if (is_shown || !result.is_dense() || buffer(result).kind != Buffer::Kind::temporary ||
        result.offset || buffer(result).bytes != int64_t(outputs_[0].nbytes())) {
      result = copied(result);
    }
    program_.buffers_[result.buffer].kind = Buffer::Kind::output;
    program_.result_shape_ = outputs_[0].shape();
    for (size_t i = 1; i < outputs_.size(); i++) {
      const View& pool = view(outputs_[i]);
      require(
          buffer(pool).kind == Buffer::Kind::input && pool.offset == 0,
          "an output that is no pool of the inputs");
      program_.pools_.push_back(buffer(pool).index);
    }
  }

  // A plan's work may be of another length in the next step, and a pool is written once in a step.
  void check_inputs() const {
    std::vector<int> writes(program_.buffers_.size());
    for (const auto& op : operations_) {
      for (auto* buffers : {&op.reads, &op.gathers}) {
        for (int b : *buffers) {
          const Buffer& from = program_.buffers_[b];
          require(
              from.kind != Buffer::Kind::input || !program_.any_length_[from.index],
              "a plan that is used for more than attention");
        }
      }
      for (int b : op.writes) {
        require(++writes[b] == 1, "a pool that is written twice");
      }
    }
  }

  Program& program_;
  const Arrays& inputs_;
  const Arrays& outputs_;
  std::vector<Node> nodes_;
  std::unordered_map<Id, View> views_;
  std::unordered_set<Id> depends_;  // arrays that depend on the inputs
  std::unordered_map<Id, size_t> producers_;
  std::unordered_map<Id, int> uses_;
  std::map<size_t, Linears> linears_;
  std::vector<Operation> operations_;
  // What was rounded: its buffer, offset, stride and rows, and for what k and bits.
  std::map<std::array<int64_t, 6>, std::optional<View>> rounded_;
};

Program::Program(const Arrays& inputs, const Arrays& outputs) {
  ProgramReader(*this, inputs, outputs).read();
}

}  // namespace mlx_paged::cpu
