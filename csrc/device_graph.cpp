// Copyright © 2026 the mlx_paged authors. Apache-2.0.

#include "device_graph.h"

#include <algorithm>
#include <set>

namespace mlx_paged {

void refuse_graph(const std::string& reason) {
  throw NoProgram(reason);
}

namespace {

// The single row that was broadcast to all rows of `a`; `a` itself if there is none.
mx::array without_broadcast(const mx::array& a) {
  bool is_broadcast = a.has_primitive() && a.status() == mx::array::Status::unscheduled &&
                      std::strcmp(a.primitive().name(), "Broadcast") == 0;
  return is_broadcast && a.inputs()[0].ndim() == 1 ? a.inputs()[0] : a;
}

}  // namespace

DeviceGraph::DeviceGraph(const Arrays& inputs, const Arrays& outputs) {
  for (const auto& in : inputs) {
    inputs_.insert(in.id());
    depends_.insert(in.id());
  }
  find_nodes(outputs);
}

void DeviceGraph::find_nodes(const Arrays& outputs) {
  struct Pair {
    mx::array array;
    size_t next = 0;
  };
  std::unordered_set<Id> seen;
  for (const auto& output : outputs) {
    std::vector<Pair> stack{{output}};
    while (!stack.empty()) {
      auto& [array, next] = stack.back();
      if (inputs_.count(array.id()) || (next == 0 && !seen.insert(array.id()).second)) {
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
  for (const auto& node : nodes_) {
    for (const auto& in : node.inputs) {
      if (!depends(in) && kept.insert(in.id()).second) {
        constants_.push_back(in);
      }
      users_[in.id()].push_back(int(&node - nodes_.data()));
    }
  }
  for (const auto& output : outputs) {
    require(depends(output), "an output does not depend on the inputs");
    users_[output.id()].push_back(-1);
  }
}

void DeviceGraph::add_node(const mx::array& array) {
  const auto& inputs = array.inputs();
  bool depends = std::any_of(inputs.begin(), inputs.end(), [&](const mx::array& in) {
    return depends_.count(in.id()) > 0;
  });
  if (!depends) {
    return;
  }
  GraphNode node{&array.primitive(), inputs, mx::array(array).outputs()};
  if (node.is("AddMM")) {
    node.inputs[2] = without_broadcast(node.inputs[2]);
  }
  for (const auto& out : node.outputs) {
    depends_.insert(out.id());
    producers_[out.id()] = nodes_.size();
  }
  nodes_.push_back(std::move(node));
}

const std::vector<int>& DeviceGraph::users_of(const mx::array& a) const {
  static const std::vector<int> none;
  auto found = users_.find(a.id());
  return found == users_.end() ? none : found->second;
}

const GraphNode* DeviceGraph::producer_of(const mx::array& a) const {
  auto found = producers_.find(a.id());
  return found == producers_.end() ? nullptr : &nodes_[found->second];
}

// Behind operations that only change how a value is seen.
const GraphNode* DeviceGraph::source_of(
    const mx::array& a, std::vector<const GraphNode*>* passed) const {
  const auto* node = producer_of(a);
  while (node && is_view(*node) && !node->is("Split") && !node->is("Slice")) {
    passed->push_back(node);
    node = producer_of(node->inputs[0]);
  }
  return node;
}

bool DeviceGraph::is_view(const GraphNode& node) {
  static const std::set<std::string> names{"Reshape",    "Flatten",   "Unflatten", "Squeeze",
                                           "ExpandDims", "Transpose", "Slice",     "Split"};
  return names.count(node.primitive->name()) > 0;
}

DeviceGraph::Id DeviceGraph::value_of(const mx::array& a) {
  static const std::set<std::string> names{
      "Reshape", "Flatten", "Unflatten", "Squeeze", "ExpandDims"};
  auto at = a;
  while (at.has_primitive() && at.status() == mx::array::Status::unscheduled &&
         names.count(at.primitive().name())) {
    at = mx::array(at.inputs()[0]);
  }
  return at.id();
}

namespace {

// `at`: of the weight among the inputs; behind it are its scales and biases, then a bias.
LinearNode with_weights(const Arrays& inputs, size_t at, std::optional<WeightCodes> codes) {
  LinearNode linear{inputs[0], inputs[at++], std::nullopt, false, codes, {}, {}};
  if (codes) {
    linear.scales = inputs[at++];
    if (codes->format == cpu::WeightFormat::affine) {
      linear.biases = inputs[at++];
    }
  }
  if (at < inputs.size()) {
    linear.bias = inputs[at];
  }
  return linear;
}

}  // namespace

LinearNode DeviceGraph::expert_of(const GraphNode& node) {
  constexpr size_t kWeight = 2;  // behind x and the experts
  const auto& expert = *node.as<ExpertLinear>();
  auto linear = with_weights(node.inputs, kWeight, expert.codes());
  size_t count = kWeight + 1 + bool(linear.scales) + bool(linear.biases) + expert.has_bias();
  require(node.inputs.size() == count, "experts with a factor each");
  return linear;
}

std::optional<LinearNode> DeviceGraph::linear_of(const GraphNode& node) const {
  if (node.as<Linear>()) {
    return with_weights(node.inputs, 1, {});
  }
  if (const auto* quantized = node.as<QuantizedLinear>()) {
    return with_weights(node.inputs, 1, quantized->codes());
  }
  if (node.inputs.size() < 2 || node.inputs[1].ndim() != 2 || depends(node.inputs[1])) {
    return std::nullopt;
  }
  if (node.is("Matmul")) {
    return LinearNode{node.inputs[0], node.inputs[1], std::nullopt, true, {}, {}, {}};
  }
  if (node.is("AddMM")) {
    auto [alpha, beta] = static_cast<const mx::AddMM&>(*node.primitive).state();
    const auto& bias = node.inputs[2];
    if (alpha == 1 && beta == 1 && bias.ndim() == 1 && !depends(bias)) {
      return LinearNode{node.inputs[0], node.inputs[1], bias, true, {}, {}, {}};
    }
  }
  return std::nullopt;
}

std::optional<size_t> DeviceGraph::own_linear(const mx::array& a) const {
  std::vector<const GraphNode*> passed;
  const auto* node = source_of(a, &passed);
  if (!node || !linear_of(*node) || uses_of(a) != 1 || uses_of(node->outputs[0]) != 1) {
    return std::nullopt;
  }
  for (const auto* view : passed) {
    if (uses_of(view->outputs[0]) != 1) {
      return std::nullopt;
    }
  }
  return node - nodes_.data();
}

Heads DeviceGraph::heads_of(const mx::array& a) const {
  Heads heads{a};
  std::vector<const GraphNode*> passed;
  const auto* node = source_of(heads.from, &passed);
  if (node && node->as<Rope>()) {
    heads.rope = node;
    heads.from = node->inputs[0];
    node = source_of(heads.from, &passed);
  }
  if (node && node->as<RmsNorm>() && node->inputs.size() > 1 &&
      node->outputs[0].shape(-1) == a.shape(-1)) {
    heads.norm = node;
    heads.from = node->inputs[0];
  }
  return heads;
}

const GraphNode* DeviceGraph::attention_after(const GraphNode& write) const {
  for (int user : users_of(write.outputs[0])) {
    if (user >= 0 && nodes_[user].as<PagedAttention>()) {
      return &nodes_[user];
    }
  }
  return nullptr;
}

}  // namespace mlx_paged
