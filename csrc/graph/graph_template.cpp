// Copyright © 2026 the mlx_paged authors. Apache-2.0.

#include "graph_template.h"

#include <algorithm>
#include <cstring>
#include <map>
#include <stdexcept>
#include <typeinfo>

#include "../dense.h"
#include "mlx/transforms.h"
#include "step_graph.h"

namespace mlx_paged {

namespace {

// Constants that are computed from weights stay in memory. Views of weights cost nothing.
constexpr size_t kMaxConstantBytes = 1 << 20;
// Numbers that model code converts to arrays are compared, up to this size.
constexpr size_t kMaxComparedBytes = 4096;

bool has_equal_contents(const mx::array& a, const mx::array& b) {
  return a.shape() == b.shape() && a.dtype() == b.dtype() && a.nbytes() <= kMaxComparedBytes &&
         a.status() == mx::array::Status::available && b.status() == a.status() &&
         a.flags().row_contiguous && b.flags().row_contiguous &&
         std::memcmp(a.data<char>(), b.data<char>(), a.nbytes()) == 0;
}

}  // namespace

// Removes nodes that only change shapes.
class GraphTemplate::Simplifier {
 public:
  explicit Simplifier(GraphTemplate& made) : made_(made) {
    for (const auto& shape : made.input_shapes_) {
      add_value(shape);
    }
    for (const auto& constant : made.constants_) {
      Extents shape;
      for (int extent : constant.shape()) {
        shape.push_back({-1, extent});
      }
      add_value(std::move(shape));
    }
    for (size_t i = 0; i < shapes_.size(); i++) {
      views_.push_back({int(i), shapes_[i], nullptr});
    }
  }

  void simplify(
      const std::vector<Node>& nodes, const std::vector<Op>& ops, std::vector<int> outputs) {
    for (size_t i = 0; i < nodes.size(); i++) {
      add(nodes[i], ops[i]);
    }
    for (int output : outputs) {
      made_.outputs_.push_back(value_of(views_[output]));
    }
  }

 private:
  // A value of the given graph: one of the new graph in another shape, its elements in order.
  struct View {
    int base;
    Extents shape;
    const Node* last;     // that made it from the base; null: it is the base
    bool is_only = true;  // it alone did
  };

  int add_value(Extents shape) {
    shapes_.push_back(std::move(shape));
    return int(shapes_.size()) - 1;
  }

  bool keeps_order(const Node& node, Op op) const {
    if (op != Op::transpose) {
      return is_reshape(op);
    }
    // Axes of size 1 may go anywhere.
    const auto axes = static_cast<mx::Transpose&>(*node.primitive).state();
    const auto& shape = views_[node.inputs[0]].shape;
    int last = -1;
    for (int axis : axes) {
      if (shape[axis] == Extent{-1, 1}) {
        continue;
      }
      if (axis < last) {
        return false;
      }
      last = axis;
    }
    return true;
  }

  void add(const Node& node, Op op) {
    if (keeps_order(node, op)) {
      const auto& from = views_[node.inputs[0]];
      views_.push_back({from.base, node.shapes[0], &node, from.last == nullptr});
      return;
    }
    Node made = node;
    if (takes_bases(node, op)) {
      for (auto& input : made.inputs) {
        input = views_[input].base;
      }
      made.shapes = {shapes_[made.inputs[0]]};
    } else {
      for (auto& input : made.inputs) {
        input = value_of(views_[input]);
      }
    }
    for (size_t i = 0; i < node.shapes.size(); i++) {
      const int value = add_value(made.shapes[i]);
      const bool is_same = made.shapes[i] == node.shapes[i];
      views_.push_back({value, node.shapes[i], is_same ? nullptr : &node, false});
    }
    made_.nodes_.push_back(std::move(made));
  }

  // True for operations on each row or element that compute the same from the bases of their
  // inputs.
  bool takes_bases(const Node& node, Op op) const {
    const auto& x = shapes_[views_[node.inputs[0]].base];
    switch (op) {
      case Op::rms_norm:
      case Op::mlx_rms_norm:
        return !x.empty() && x.back() == node.shapes[0].back() &&
               std::all_of(node.inputs.begin() + 1, node.inputs.end(), [&](int input) {
                 return views_[input].last == nullptr;
               });
      case Op::add:
      case Op::silu_mul:
        return std::all_of(node.inputs.begin(), node.inputs.end(), [&](int input) {
          return shapes_[views_[input].base] == x && views_[input].shape == node.shapes[0];
        });
      default:
        return false;
    }
  }

  // The value in its shape.
  int value_of(const View& view) {
    if (shapes_[view.base] == view.shape) {
      return view.base;
    }
    const auto [found, is_new] = reshaped_.try_emplace({view.base, view.shape}, 0);
    if (is_new) {
      Node node;
      if (view.is_only) {
        node = *view.last;
      } else {
        node.primitive = view.last->primitive;  // for its stream
        node.changing = Reshaped{};
        node.shapes = {view.shape};
        node.dtypes = {view.last->dtypes[0]};
      }
      node.inputs = {view.base};
      made_.nodes_.push_back(std::move(node));
      found->second = add_value(view.shape);
    }
    return found->second;
  }

  GraphTemplate& made_;
  std::vector<Extents> shapes_;  // of the new graph's values
  std::vector<View> views_;      // of the given graph's values
  std::map<std::pair<int, Extents>, int> reshaped_;
};

// Reads both graphs side by side.
class GraphTemplate::Builder {
 public:
  Builder(GraphTemplate& made, const Arrays& first, const Arrays& second) : made_(made) {
    require(first.size() == second.size(), "the graphs have different inputs");
    for (size_t i = 0; i < first.size(); i++) {
      require(
          first[i].ndim() == second[i].ndim() && first[i].dtype() == second[i].dtype(),
          "an input has two kinds");
      for (size_t axis = 0; axis < first[i].ndim(); axis++) {
        const Pair pair{first[i].shape(int(axis)), second[i].shape(int(axis))};
        if (pair.first != pair.second &&
            std::find(sizes_.begin(), sizes_.end(), pair) == sizes_.end()) {
          sizes_.push_back(pair);
        }
      }
    }
    made_.num_sizes_ = sizes_.size();
    for (size_t i = 0; i < first.size(); i++) {
      made_.input_shapes_.push_back(extents(first[i].shape(), second[i].shape(), "an input"));
      made_.input_dtypes_.push_back(first[i].dtype());
      known_.emplace(first[i].id(), Known{int(i), second[i].id(), true});
    }
  }

  void read(const Arrays& first, const Arrays& second) {
    require(first.size() == second.size(), "the graphs have different outputs");
    for (size_t i = 0; i < first.size(); i++) {
      visit_all(first[i], second[i]);
    }
    const int num_inputs = int(made_.input_shapes_.size());
    const int num_constants = int(made_.constants_.size());
    // Outputs of nodes were numbered from -1 downwards, because constants were still to come.
    auto final = [&](int value) {
      return value < 0 ? num_inputs + num_constants - 1 - value : value;
    };
    for (auto& node : nodes_) {
      for (auto& input : node.inputs) {
        input = final(input);
      }
    }
    std::vector<int> outputs;
    for (const auto& output : first) {
      outputs.push_back(final(known_.at(output.id()).value));
    }
    Simplifier(made_).simplify(nodes_, ops_, outputs);
    mx::eval(made_.constants_);
  }

 private:
  using Pair = std::pair<int64_t, int64_t>;

  struct Known {
    int value;
    uintptr_t second;  // its counterpart
    bool depends;      // on the inputs
  };

  struct Visit {
    mx::array first;
    mx::array second;
    size_t next = 0;  // next input
  };

  Extent extent(int64_t first, int64_t second, const char* what) const {
    if (first == second) {
      return {-1, first};
    }
    for (size_t i = 0; i < sizes_.size(); i++) {
      const auto& [a, b] = sizes_[i];
      if (a > 0 && b > 0 && first % a == 0 && second % b == 0 && first / a == second / b) {
        return {int(i), first / a};
      }
    }
    throw UnsupportedGraph(std::string("an extent of ") + what + " that is no multiple of a size");
  }

  Extents extents(const mx::Shape& first, const mx::Shape& second, const char* what) const {
    require(first.size() == second.size(), std::string(what) + " of another rank");
    Extents found;
    for (size_t i = 0; i < first.size(); i++) {
      found.push_back(extent(first[i], second[i], what));
    }
    return found;
  }

  // True if `first` needs a visit.
  bool is_new(const mx::array& first, const mx::array& second) {
    auto found = known_.find(first.id());
    if (found != known_.end()) {
      require(found->second.second == second.id(), "the graphs differ");
      return false;
    }
    require(is_pending(first) == is_pending(second), "the graphs differ");
    if (is_pending(first)) {
      return true;
    }
    require(first.status() != mx::array::Status::unscheduled, "an array without a value");
    require(
        first.id() == second.id() || has_equal_contents(first, second), "an array that changes");
    add_constant(first, second);
    return false;
  }

  void add_constant(const mx::array& first, const mx::array& second) {
    const int value = int(made_.input_shapes_.size() + made_.constants_.size());
    known_.emplace(first.id(), Known{value, second.id(), false});
    made_.constants_.push_back(first);
  }

  void visit_all(const mx::array& first, const mx::array& second) {
    std::vector<Visit> stack;
    if (is_new(first, second)) {
      stack.push_back({first, second});
    }
    while (!stack.empty()) {
      auto& at = stack.back();
      require(at.first.inputs().size() == at.second.inputs().size(), "the graphs differ");
      if (at.next < at.first.inputs().size()) {
        mx::array a = at.first.inputs()[at.next], b = at.second.inputs()[at.next];
        at.next++;
        if (is_new(a, b)) {
          stack.push_back({std::move(a), std::move(b)});
        }
        continue;
      }
      add_node(at.first, at.second);
      stack.pop_back();
    }
  }

  void add_node(const mx::array& first, const mx::array& second) {
    if (known_.count(first.id())) {
      return;  // with a sibling
    }
    auto& primitive = first.primitive();
    auto& other = second.primitive();
    const std::string name = primitive.name();
    require(
        typeid(primitive) == typeid(other) && primitive.stream() == other.stream(),
        "the graphs differ");
    const auto& inputs = first.inputs();
    // A weight that is broadcast to all rows depends on their number.
    const bool is_equal = primitive.is_equivalent(other);
    const bool depends = !is_equal || first.shape() != second.shape() ||
                         std::any_of(inputs.begin(), inputs.end(), [&](const auto& in) {
                           return known_.at(in.id()).depends;
                         });
    const Arrays outputs = mx::array(first).outputs(), others = mx::array(second).outputs();
    require(outputs.size() == others.size(), "the graphs differ");
    if (!depends) {
      require(
          is_view(op_of(first)) || first.nbytes() <= kMaxConstantBytes,
          "a large constant (" + name + ")");
      for (size_t i = 0; i < outputs.size(); i++) {
        add_constant(outputs[i], others[i]);
      }
      return;
    }
    Node node;
    node.primitive = first.primitive_ptr();
    for (size_t i = 0; i < outputs.size(); i++) {
      require(outputs[i].dtype() == others[i].dtype(), "the graphs differ");
      node.shapes.push_back(extents(outputs[i].shape(), others[i].shape(), name.c_str()));
      node.dtypes.push_back(outputs[i].dtype());
    }
    if (!is_equal) {
      node.changing = changing(first, second, name);
    }
    for (const auto& in : inputs) {
      node.inputs.push_back(known_.at(in.id()).value);
    }
    for (size_t i = 0; i < outputs.size(); i++) {
      known_.emplace(outputs[i].id(), Known{next_output_--, others[i].id(), true});
    }
    nodes_.push_back(std::move(node));
    ops_.push_back(op_of(first));
  }

  Changing changing(const mx::array& first, const mx::array& second, const std::string& name) {
    switch (op_of(first)) {
      case Op::reshape:
        return Reshaped{};
      case Op::broadcast:
        return Broadcasted{};
      case Op::slice: {
        const auto [begin, end, strides] = static_cast<mx::Slice&>(first.primitive()).state();
        const auto [begin2, end2, strides2] = static_cast<mx::Slice&>(second.primitive()).state();
        require(strides == strides2, "strides that change");
        return Sliced{extents(begin, begin2, "a slice"), extents(end, end2, "a slice"), strides};
      }
      case Op::unflatten: {
        const auto [axis, shape] = static_cast<mx::Unflatten&>(first.primitive()).state();
        const auto [axis2, shape2] = static_cast<mx::Unflatten&>(second.primitive()).state();
        require(axis == axis2, "an axis that changes");
        return Unflattened{axis, extents(shape, shape2, "an axis")};
      }
      default:
        throw UnsupportedGraph("parameters that change (" + name + ")");
    }
  }

  GraphTemplate& made_;
  std::vector<Pair> sizes_;
  std::unordered_map<uintptr_t, Known> known_;
  std::vector<Node> nodes_;
  std::vector<Op> ops_;  // of the nodes
  int next_output_ = -1;
};

GraphTemplate::GraphTemplate(
    const Arrays& first_inputs, const Arrays& first_outputs, const Arrays& second_inputs,
    const Arrays& second_outputs) {
  Builder(*this, first_inputs, second_inputs).read(first_outputs, second_outputs);
}

mx::Shape GraphTemplate::shape_of(const Extents& extents, const std::vector<int64_t>& sizes) const {
  mx::Shape shape;
  for (const auto& [size, factor] : extents) {
    shape.push_back(mx::ShapeElem(size < 0 ? factor : factor * sizes[size]));
  }
  return shape;
}

std::vector<int64_t> GraphTemplate::sizes_of(const Arrays& inputs) const {
  auto fit = [](bool holds) {
    if (!holds) {
      throw std::invalid_argument("[graph_template] the inputs do not fit");
    }
  };
  fit(inputs.size() == input_shapes_.size());
  std::vector<int64_t> sizes(num_sizes_, -1);
  for (size_t i = 0; i < inputs.size(); i++) {
    const auto& extents = input_shapes_[i];
    fit(inputs[i].ndim() == extents.size() && inputs[i].dtype() == input_dtypes_[i]);
    for (size_t axis = 0; axis < extents.size(); axis++) {
      const auto& [size, factor] = extents[axis];
      const int64_t actual = inputs[i].shape(int(axis));
      if (size < 0) {
        fit(actual == factor);
        continue;
      }
      fit(actual % factor == 0 && (sizes[size] < 0 || sizes[size] == actual / factor));
      sizes[size] = actual / factor;
    }
  }
  return sizes;
}

mx::array GraphTemplate::changed(
    const Node& node, const mx::array& in, mx::Shape shape,
    const std::vector<int64_t>& sizes) const {
  const auto stream = node.primitive->stream();
  if (const auto* sliced = std::get_if<Sliced>(&node.changing)) {
    return mx::slice(
        in, shape_of(sliced->begin, sizes), shape_of(sliced->end, sizes), sliced->strides, stream);
  }
  if (const auto* unflattened = std::get_if<Unflattened>(&node.changing)) {
    return mx::unflatten(in, unflattened->axis, shape_of(unflattened->shape, sizes), stream);
  }
  if (std::holds_alternative<Broadcasted>(node.changing)) {
    return mx::broadcast_to(in, shape, stream);
  }
  return mx::reshape(in, std::move(shape), stream);
}

Arrays GraphTemplate::operator()(const Arrays& inputs) const {
  const auto sizes = sizes_of(inputs);
  Arrays values;
  values.reserve(inputs.size() + constants_.size() + 2 * nodes_.size());
  values.insert(values.end(), inputs.begin(), inputs.end());
  values.insert(values.end(), constants_.begin(), constants_.end());
  for (const auto& node : nodes_) {
    Arrays in;
    in.reserve(node.inputs.size());
    for (int value : node.inputs) {
      in.push_back(values[value]);
    }
    if (node.shapes.size() == 1) {
      auto shape = shape_of(node.shapes[0], sizes);
      if (!std::holds_alternative<std::monostate>(node.changing)) {
        values.push_back(changed(node, in[0], std::move(shape), sizes));
        continue;
      }
      values.emplace_back(std::move(shape), node.dtypes[0], node.primitive, std::move(in));
      continue;
    }
    std::vector<mx::Shape> shapes;
    for (const auto& extents : node.shapes) {
      shapes.push_back(shape_of(extents, sizes));
    }
    for (auto& made :
         mx::array::make_arrays(std::move(shapes), node.dtypes, node.primitive, std::move(in))) {
      values.push_back(std::move(made));
    }
  }
  Arrays outputs;
  for (int value : outputs_) {
    outputs.push_back(values[value]);
  }
  return outputs;
}

}  // namespace mlx_paged
