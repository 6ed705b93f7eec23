// Copyright © 2026 the mlx_paged authors. Apache-2.0.
//
// From the graph that model code builds to a Program.

#include <algorithm>
#include <cstring>
#include <map>
#include <optional>
#include <unordered_map>
#include <unordered_set>

#include "kernels.h"
#include "mlx/transforms.h"
#include "program.h"
#include "program_phases.h"
#include "program_rows.h"

namespace mlx_paged::cpu {

class ProgramReader : public RowReader {
 public:
  ProgramReader(Program& program, const Arrays& inputs, const Arrays& outputs)
      : RowReader(program), inputs_(inputs), outputs_(outputs) {}

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

  static bool is_expert(const Node& node) {
    return dynamic_cast<const ExpertLinear*>(node.primitive) != nullptr;
  }

  // The node that makes `a` for one other, if it is one of these.
  std::optional<size_t> own(const mx::array& a, bool (*is_one)(const Node&)) const {
    auto found = producers_.find(a.id());
    if (found == producers_.end() || uses_.at(a.id()) != 1) {
      return std::nullopt;
    }
    const Node& node = nodes_[found->second];
    return is_one(node) && !node.fused ? std::optional(found->second) : std::nullopt;
  }

  // Makes node i, which multiplies a gate with something, one with the products of the two. The
  // first `shared` of their inputs are the same.
  bool fuse_gated(size_t i, bool (*is_one)(const Node&), size_t shared) {
    auto gate = own(nodes_[i].inputs[0], is_one);
    auto up = own(nodes_[i].inputs[1], is_one);
    if (!gate || !up || gate == up) {
      return false;
    }
    for (size_t in = 0; in < shared; in++) {
      if (nodes_[*gate].inputs[in].id() != nodes_[*up].inputs[in].id()) {
        return false;
      }
    }
    nodes_[*gate].fused = nodes_[*up].fused = true;
    linears_[i] = {*gate, up, std::nullopt};
    return true;
  }

  void fuse() {
    for (size_t i = 0; i < nodes_.size(); i++) {
      const Node& node = nodes_[i];
      if (dynamic_cast<const SiluMul*>(node.primitive)) {
        if (!fuse_gated(i, is_linear, 1)) {
          fuse_gated(i, is_expert, 2);
        }
      } else if (is(node, "Add") && node.inputs[0].shape() == node.inputs[1].shape()) {
        for (int side : {1, 0}) {
          if (auto linear = own(node.inputs[side], is_linear)) {
            nodes_[*linear].fused = true;
            linears_[i] = {*linear, std::nullopt, node.inputs[1 - side]};
            break;
          }
        }
      }
    }
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
      const auto& linears = found->second;
      return is_expert(nodes_[linears.gate]) ? read_experts(linears, node.outputs[0])
                                             : read_product(linears, node.outputs[0]);
    }
    const auto* p = node.primitive;
    if (is_expert(node)) {
      return read_experts({index, std::nullopt, std::nullopt}, node.outputs[0]);
    }
    if (is_linear(node)) {
      return read_product({index, std::nullopt, std::nullopt}, node.outputs[0]);
    }
    if (dynamic_cast<const WriteKV*>(p)) {
      return read_write_kv(node);
    }
    if (auto* attention = dynamic_cast<const PagedAttention*>(p)) {
      return read_attention(node, *attention);
    }
    read_rows(node);
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
    p.per_head = in.size() > A::kPerHead ? constant(in[A::kPerHead]) : nullptr;
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

  Projection projection_of(const Node& node) {
    Arrays in = evaluated(node);
    Projection p{};
    size_t bias = 2;
    if (auto* quantized = dynamic_cast<const QuantizedLinear*>(node.primitive)) {
      p.weight = quantized->weights(in);
      p.integers = integer_kernels(quantized->activations(), p.weight);
      bias = p.weight.biases ? 4 : 3;
    } else {
      p.weight = Linear::weights(in[1]);
    }
    p.bias = in.size() > bias ? constant(node.inputs[bias]) : nullptr;
    p.x = with_dense_rows(view(node.inputs[0]));
    require(p.x.row_size() == p.weight.k, "a product of several vectors a row");
    require(p.x.rows() <= kernels().product.most_rows(p.weight), "more rows than it pays for");
    if (p.integers) {
      p.rounded = as_integers(p.x, p.weight, *p.integers);
    }
    return p;
  }

  // The rows of x as products of integers read them; once for all that read them.
  View as_integers(const View& x, const WeightView& weight, const IntegerKernels& integers) {
    auto& to = rounded_[{
        x.buffer, x.offset, x.strides[0], x.rows(), weight.k, weight.bits, integers.chunk_bytes}];
    if (to) {
      return *to;
    }
    int floats = int(integers.row_bytes(weight.k) / sizeof(float));
    int buffer = add_buffer({.kind = Buffer::Kind::temporary});
    program_.buffers_[buffer].bytes = x.rows() * floats * int64_t(sizeof(float));
    program_.buffers_[buffer].row_size = floats;
    to = View{buffer, 0, {int(x.rows()), floats}, {floats, 1}};
    add_row_operation(
        *to, {x}, {},
        [x, to = *to, k = weight.k, bits = weight.bits, round = integers.round](
            const Bases& bases, int64_t begin, int64_t end) {
          round(x.row(bases, begin), x.strides[0], int(end - begin), k, bits, to.row(bases, begin));
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
    auto reads = [&op](const Projection& projection) {
      op.gathers.push_back(projection.x.buffer);
      if (projection.rounded) {
        op.gathers.push_back(projection.rounded->buffer);
      }
    };
    reads(p.main);
    if (linears.up) {
      p.up = projection_of(nodes_[*linears.up]);
      reads(*p.up);
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

  void read_experts(const Linears& linears, const mx::array& out) {
    const Node& node = nodes_[linears.gate];
    auto weights_of = [this](const Node& n) {
      return static_cast<const ExpertLinear*>(n.primitive)->weights(evaluated(n, 2));
    };
    ExpertProduct p{};
    p.args.weights = weights_of(node);
    if (linears.up) {
      p.args.up = weights_of(nodes_[*linears.up]);
      require(
          p.args.up->n() == p.args.weights.n() &&
              p.args.up->num_experts == p.args.weights.num_experts,
          "a gate of another size");
    }
    p.x = with_dense_rows(view(node.inputs[0]));
    p.indices = with_dense_rows(view(node.inputs[1]));
    p.args.num_rows = int(p.x.rows());
    p.args.per_row = int(p.indices.row_size());
    int64_t k = p.args.weights.all.k;
    bool shares_rows = p.x.row_size() == k;
    require(
        p.x.rows() == p.indices.rows() && (shares_rows || p.x.row_size() == p.args.per_row * k),
        "experts of several vectors a row");
    p.args.x_row_stride = p.x.strides[0];
    p.args.x_pair_stride = shares_rows ? 0 : k;
    p.args.index_row_stride = p.indices.strides[0];
    p.out = new_value(out);
    Operation op;
    op.kind = Operation::Kind::experts;
    op.rows = p.x.rows();
    op.gathers = {p.x.buffer, p.indices.buffer};
    op.writes = {p.out.buffer};
    op.experts = p;
    operations_.push_back(std::move(op));
  }

  // --- Values ---

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

  const Arrays& inputs_;
  const Arrays& outputs_;
  std::vector<Node> nodes_;
  std::unordered_map<Id, size_t> producers_;
  std::unordered_map<Id, int> uses_;
  std::map<size_t, Linears> linears_;
  // Rounded activations, by buffer, offset, stride, rows, k, bits and size.
  std::map<std::array<int64_t, 7>, std::optional<View>> rounded_;
};

Program::Program(const Arrays& inputs, const Arrays& outputs) {
  ProgramReader(*this, inputs, outputs).read();
}

}  // namespace mlx_paged::cpu
