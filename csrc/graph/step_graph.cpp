// Copyright © 2026 the mlx_paged authors. Apache-2.0.

#include "step_graph.h"

#include <algorithm>

#include "../dense.h"
#include "mlx/primitives.h"
#include "mlx/transforms.h"

namespace mlx_paged {

StepGraph::StepGraph(const Arrays& inputs, const Arrays& outputs)
    : inputs_(inputs), outputs_(outputs) {
  require(!outputs.empty(), "it has no outputs");
  for (const auto& in : inputs) {
    depends_.insert(in.id());
  }
  find_nodes();
  count_uses();
  mx::eval(constants_);
}

void StepGraph::find_nodes() {
  struct Visit {
    mx::array array;
    size_t next = 0;  // next input
  };
  std::unordered_set<Id> seen = depends_;
  for (const auto& output : outputs_) {
    std::vector<Visit> stack;
    auto visit = [&](const mx::array& a) {
      bool is_pending = a.has_primitive() && a.status() == mx::array::Status::unscheduled;
      if (seen.insert(a.id()).second && is_pending) {
        stack.push_back({a});
      }
    };
    visit(output);
    while (!stack.empty()) {
      auto& [array, next] = stack.back();
      if (next < array.inputs().size()) {
        auto input = array.inputs()[next++];
        visit(input);
        continue;
      }
      add_node(array);
      for (const auto& sibling : array.siblings()) {
        seen.insert(sibling.id());
      }
      stack.pop_back();
    }
  }
}

void StepGraph::add_node(const mx::array& array) {
  const auto& inputs = array.inputs();
  bool is_dependent =
      std::any_of(inputs.begin(), inputs.end(), [&](const mx::array& in) { return depends(in); });
  if (!is_dependent) {
    return;
  }
  GraphNode node{op_of(array), array.primitive_ptr(), inputs, mx::array(array).outputs(), {},
                 false};
  for (const auto& in : inputs) {
    bool is_pending = in.has_primitive() && in.status() == mx::array::Status::unscheduled;
    if (is_pending && op_of(in) == Op::broadcast && in.inputs()[0].ndim() == 1) {
      rows_.insert({in.id(), in.inputs()[0]});
    }
  }
  for (const auto& out : node.outputs) {
    depends_.insert(out.id());
    producers_[out.id()] = nodes_.size();
  }
  nodes_.push_back(std::move(node));
}

void StepGraph::count_uses() {
  for (const auto& node : nodes_) {
    for (const auto& in : node.inputs) {
      if (!depends(in) && constant_indices_.emplace(in.id(), constants_.size()).second) {
        constants_.push_back(in);
      }
      users_[in.id()].push_back(int(index_of(node)));
    }
  }
  for (const auto& output : outputs_) {
    require(depends(output), "an output does not depend on the inputs");
    users_[output.id()].push_back(-1);
  }
}

size_t StepGraph::index_of_constant(const mx::array& a) {
  require(!depends(a), "weights that depend on the inputs");
  auto [found, is_new] = constant_indices_.emplace(a.id(), constants_.size());
  if (is_new) {
    constants_.push_back(a);
    constants_.back().eval();
  }
  return found->second;
}

const mx::array& StepGraph::row_of(const mx::array& a) const {
  auto found = rows_.find(a.id());
  return found == rows_.end() ? a : found->second;
}

const std::vector<int>& StepGraph::users_of(const mx::array& a) const {
  static const std::vector<int> none;
  auto found = users_.find(a.id());
  return found == users_.end() ? none : found->second;
}

const GraphNode* StepGraph::producer_of(const mx::array& a) const {
  auto found = producers_.find(a.id());
  return found == producers_.end() ? nullptr : &nodes_[found->second];
}

const GraphNode* StepGraph::source_of(
    const mx::array& a, std::vector<const GraphNode*>& passed) const {
  const auto* node = producer_of(a);
  while (node && (is_reshape(node->op) || node->op == Op::transpose)) {
    passed.push_back(node);
    node = producer_of(node->inputs[0]);
  }
  return node;
}

StepGraph::Id value_of(const mx::array& a) {
  auto at = a;
  while (at.has_primitive() && at.status() == mx::array::Status::unscheduled &&
         is_reshape(op_of(at))) {
    at = mx::array(at.inputs()[0]);
  }
  return at.id();
}

namespace {

// `at`: index of the weight among the inputs, followed by its scales and biases, then a bias.
LinearNode with_weights(const Arrays& inputs, size_t at, std::optional<WeightCodes> codes) {
  LinearNode linear{inputs[0], inputs[at++], std::nullopt, false, codes};
  if (codes) {
    linear.scales = inputs[at++];
    if (codes->format == WeightFormat::affine) {
      linear.biases = inputs[at++];
    }
  }
  if (at < inputs.size()) {
    linear.bias = inputs[at];
  }
  return linear;
}

}  // namespace

std::optional<LinearNode> linear_of(const StepGraph& graph, const GraphNode& node) {
  if (node.op == Op::linear) {
    return with_weights(node.inputs, 1, {});
  }
  if (node.op == Op::quantized_linear) {
    return with_weights(node.inputs, 1, node.as<QuantizedLinear>().codes());
  }
  if ((node.op != Op::matmul && node.op != Op::add_mm) || node.inputs[1].ndim() != 2 ||
      graph.depends(node.inputs[1])) {
    return std::nullopt;
  }
  LinearNode linear{node.inputs[0], node.inputs[1], std::nullopt, true};
  if (node.op == Op::add_mm) {
    auto [alpha, beta] = node.as<mx::AddMM>().state();
    linear.bias = graph.row_of(node.inputs[2]);
    if (alpha != 1 || beta != 1 || linear.bias->ndim() != 1 || graph.depends(*linear.bias)) {
      return std::nullopt;
    }
  }
  return linear;
}

LinearNode expert_of(const GraphNode& node) {
  constexpr size_t kWeight = 2;  // after x and the indices
  const auto& expert = node.as<ExpertLinear>();
  auto linear = with_weights(node.inputs, kWeight, expert.codes());
  size_t count = kWeight + 1 + bool(linear.scales) + bool(linear.biases) + expert.has_bias();
  require(node.inputs.size() == count, "experts with a factor each");
  return linear;
}

}  // namespace mlx_paged
