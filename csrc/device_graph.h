// Copyright © 2026 the mlx_paged authors. Apache-2.0.
//
// The graph that a device program is read from: its nodes in order, who uses which value, and the
// shapes in which model code writes what becomes one kernel.

#pragma once

#include <cstdint>
#include <cstring>
#include <optional>
#include <string>
#include <unordered_map>
#include <unordered_set>
#include <vector>

#include "device_program.h"

namespace mlx_paged {

// Throws NoProgram.
[[noreturn]] void refuse_graph(const std::string& reason);

inline void require(bool ok, const std::string& reason) {
  if (!ok) {
    refuse_graph(reason);
  }
}

// All the outputs of one primitive.
struct GraphNode {
  const mx::Primitive* primitive;
  Arrays inputs;
  Arrays outputs;

  bool is(const char* name) const { return std::strcmp(primitive->name(), name) == 0; }
  template <typename P>
  const P* as() const {
    return dynamic_cast<const P*>(primitive);
  }
};

// x @ weight.T of one row a row: our own node, or MLX's.
struct LinearNode {
  mx::array x;
  mx::array weight;  // [n, k]
  std::optional<mx::array> bias;
  bool is_transposed;                // `weight` is [k, n], a view
  std::optional<WeightCodes> codes;  // how `weight` is quantised
  std::optional<mx::array> scales;
  std::optional<mx::array> biases;
};

// Where queries or keys come from, before they are normed and rotated.
struct Heads {
  mx::array from;  // [rows, heads, 1, dim] or [rows, heads, dim]
  const GraphNode* rope = nullptr;
  const GraphNode* norm = nullptr;
};

class DeviceGraph {
 public:
  using Id = std::uintptr_t;

  // Throws NoProgram where an output does not depend on the inputs.
  DeviceGraph(const Arrays& inputs, const Arrays& outputs);

  // Every one after those that it needs.
  const std::vector<GraphNode>& nodes() const { return nodes_; }
  // Inputs of nodes that do not depend on the inputs of the graph.
  const Arrays& constants() const { return constants_; }

  bool depends(const mx::array& a) const { return depends_.count(a.id()) > 0; }
  size_t uses_of(const mx::array& a) const { return users_of(a).size(); }
  // Nodes; -1: it is an output.
  const std::vector<int>& users_of(const mx::array& a) const;
  const GraphNode* producer_of(const mx::array& a) const;

  // True if a node changes only how a value is seen.
  static bool is_view(const GraphNode& node);
  // Identity of a value, the same for all shapes in which it is seen.
  static Id value_of(const mx::array& a);

  std::optional<LinearNode> linear_of(const GraphNode& node) const;
  // Reads an ExpertLinear, whose weight is [num_experts, n, k]; its x and result have axes of
  // pairs.
  static LinearNode expert_of(const GraphNode& node);
  // The product that makes `a`, if nothing else needs it.
  std::optional<size_t> own_linear(const mx::array& a) const;
  Heads heads_of(const mx::array& a) const;
  // The attention that reads what a node has written.
  const GraphNode* attention_after(const GraphNode& write) const;

 private:
  void find_nodes(const Arrays& outputs);
  void add_node(const mx::array& array);
  const GraphNode* source_of(const mx::array& a, std::vector<const GraphNode*>* passed) const;

  std::vector<GraphNode> nodes_;
  Arrays constants_;
  std::unordered_set<Id> inputs_;
  std::unordered_set<Id> depends_;  // arrays that depend on the inputs
  std::unordered_map<Id, size_t> producers_;
  std::unordered_map<Id, std::vector<int>> users_;
};

}  // namespace mlx_paged
