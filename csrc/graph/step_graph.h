// Copyright © 2026 the mlx_paged authors. Apache-2.0.
//
// StepGraph: the MLX graph of a step, read once for all compilers. Passes (passes.h) mark nodes
// that are lowered together; CpuExecutable lowers the rest to phases, GpuExecutable to launches.

#pragma once

#include <cstdint>
#include <stdexcept>
#include <string>
#include <unordered_map>
#include <unordered_set>
#include <variant>
#include <vector>

#include "../primitives.h"
#include "fusion.h"
#include "op.h"

namespace mlx_paged {

// The reason why a graph cannot be compiled.
class UnsupportedGraph : public std::runtime_error {
 public:
  using std::runtime_error::runtime_error;
};

inline void require(bool ok, const std::string& reason) {
  if (!ok) {
    throw UnsupportedGraph(reason);
  }
}

// One primitive with all its outputs.
struct GraphNode {
  Op op;
  std::shared_ptr<mx::Primitive> primitive;
  Arrays inputs;
  Arrays outputs;
  Fusion fusion;             // with earlier nodes, set by a pass
  bool is_absorbed = false;  // part of another node's fusion

  template <typename P>
  const P& as() const {
    return static_cast<const P&>(*primitive);
  }
};

class StepGraph {
 public:
  using Id = std::uintptr_t;

  // Reads the graph from `inputs`, which have no values, to `outputs`. Throws UnsupportedGraph if
  // an output does not depend on the inputs.
  StepGraph(const Arrays& inputs, const Arrays& outputs);

  const Arrays& inputs() const { return inputs_; }
  const Arrays& outputs() const { return outputs_; }

  // In topological order.
  std::vector<GraphNode>& nodes() { return nodes_; }
  const std::vector<GraphNode>& nodes() const { return nodes_; }
  size_t index_of(const GraphNode& node) const { return &node - nodes_.data(); }

  bool depends(const mx::array& a) const { return depends_.count(a.id()) > 0; }
  // Nodes that read `a`, by index; -1: `a` is an output.
  const std::vector<int>& users_of(const mx::array& a) const;
  size_t uses_of(const mx::array& a) const { return users_of(a).size(); }
  // The node that makes `a`; null for inputs and constants.
  const GraphNode* producer_of(const mx::array& a) const;
  // The same, looking through reshapes and transposes, which it adds to `passed`.
  const GraphNode* source_of(const mx::array& a, std::vector<const GraphNode*>& passed) const;

  // The vector that was broadcast to all rows of `a`, or `a` itself.
  const mx::array& row_of(const mx::array& a) const;

  // Inputs of nodes that do not depend on the graph's inputs, and arrays that a compiler adds. All
  // are evaluated.
  const Arrays& constants() const { return constants_; }
  size_t index_of_constant(const mx::array& a);
  const mx::array& constant(const mx::array& a) { return constants_[index_of_constant(a)]; }

 private:
  void find_nodes();
  void add_node(const mx::array& array);
  void count_uses();

  Arrays inputs_;
  Arrays outputs_;
  std::vector<GraphNode> nodes_;
  Arrays constants_;
  std::unordered_map<Id, size_t> constant_indices_;
  std::unordered_map<Id, mx::array> rows_;  // by the arrays that they were broadcast to
  std::unordered_set<Id> depends_;          // arrays that depend on the inputs, and the inputs
  std::unordered_map<Id, size_t> producers_;
  std::unordered_map<Id, std::vector<int>> users_;
};

// Identifies a value independently of its shape.
StepGraph::Id value_of(const mx::array& a);

// x @ weight.T + bias, for every kind of product, ours and MLX's.
struct LinearNode {
  mx::array x;
  mx::array weight;  // [n, k], or [num_experts, n, k]
  std::optional<mx::array> bias;
  bool is_transposed = false;             // `weight` is [k, n], a view
  std::optional<WeightCodes> codes = {};  // quantization of `weight`
  std::optional<mx::array> scales = {};
  std::optional<mx::array> biases = {};
};

// Describes a product with constant weights; nothing for other nodes.
std::optional<LinearNode> linear_of(const StepGraph& graph, const GraphNode& node);
// Describes an expert_linear. Throws UnsupportedGraph if its weights have a global scale.
LinearNode expert_of(const GraphNode& node);

// True for a product with constant weights.
inline bool is_linear(const StepGraph& graph, const GraphNode& node) {
  return linear_of(graph, node).has_value();
}

}  // namespace mlx_paged
