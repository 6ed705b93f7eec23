// Copyright © 2026 the mlx_paged authors. Apache-2.0.

#include <algorithm>
#include <utility>

#include "mlx/primitives.h"
#include "passes.h"

namespace mlx_paged {

namespace {

// Follows a graph backwards and records the nodes it passes.
class Trail {
 public:
  explicit Trail(const StepGraph& graph) : graph_(graph) {}

  // The node that computes `a`, looking through nodes that change no element.
  const GraphNode* source(const mx::array& a) {
    const auto* node = graph_.producer_of(a);
    while (node &&
           (is_reshape(node->op) || node->op == Op::broadcast || node->op == Op::stop_gradient)) {
      note(*node);
      node = graph_.producer_of(node->inputs[0]);
    }
    return node;
  }

  // The same if it is operation `op`, also recorded; null otherwise.
  const GraphNode* source(const mx::array& a, Op op) {
    const auto* node = source(a);
    if (!node || node->op != op) {
      return nullptr;
    }
    note(*node);
    return node;
  }

  void note(const GraphNode& node) { nodes_.push_back(graph_.index_of(node)); }
  const std::vector<size_t>& nodes() const { return nodes_; }

 private:
  const StepGraph& graph_;
  std::vector<size_t> nodes_;
};

bool sums_axis(const GraphNode* node, int axis) {
  if (!node || node->op != Op::sum) {
    return false;
  }
  const auto& axes = node->as<mx::Reduce>().state().second;
  return axes == std::vector<int>{int(node->inputs[0].ndim()) + axis};
}

// Reads the top-k selection from `values` that makes `indices`: the first or last part of a
// partition.
bool read_choice(Trail& trail, const mx::array& indices, const mx::array& values, Experts& found) {
  const auto* chosen = trail.source(indices);
  if (!chosen) {
    return false;
  }
  const auto* slice = chosen->op == Op::slice ? chosen : nullptr;  // null: all experts are chosen
  if (slice) {
    trail.note(*slice);
  }
  const auto* partition = trail.source(slice ? slice->inputs[0] : indices, Op::arg_partition);
  if (!partition) {
    return false;
  }
  const auto* negative = trail.source(partition->inputs[0]);
  bool takes_last = !negative || negative->op != Op::negative;
  if (!takes_last) {
    trail.note(*negative);
  }
  const auto& sorted = takes_last ? partition->inputs[0] : negative->inputs[0];
  auto& route = found.route;
  route.num_experts = sorted.shape(-1);
  route.top_k = chosen->outputs[0].shape(-1);
  route.takes_last = takes_last;
  if (slice) {
    auto [begin, end, steps] = slice->as<mx::Slice>().state();
    if (steps.back() != 1 || begin.back() != (takes_last ? route.num_experts - route.top_k : 0)) {
      return false;
    }
  }
  return partition->as<mx::ArgPartition>().state().second == int(sorted.ndim()) - 1 &&
         value_of(sorted) == value_of(values);
}

// Reads how the weights of the chosen experts are computed.
bool read_weights(Trail& trail, const mx::array& weights, Experts& found) {
  const auto* node = trail.source(weights);
  if (!node) {
    return false;
  }
  trail.note(*node);
  const GraphNode* chosen = node;
  bool of_chosen = node->op == Op::softmax;
  if (of_chosen) {
    chosen = trail.source(node->inputs[0], Op::gather_axis);
  } else if (node->op == Op::divide) {
    found.route.normalizes = true;
    chosen = trail.source(node->inputs[0], Op::gather_axis);
    const auto* total = trail.source(node->inputs[1], Op::sum);
    if (!sums_axis(total, -1) || trail.source(total->inputs[0]) != chosen) {
      return false;
    }
  }
  if (!chosen || chosen->op != Op::gather_axis ||
      chosen->as<mx::GatherAxis>().state() != int(chosen->inputs[0].ndim()) - 1) {
    return false;
  }
  const auto& values = chosen->inputs[0];
  found.logits = values;
  if (!of_chosen) {
    const auto* softmax = trail.source(values, Op::softmax);
    if (!softmax) {
      return false;
    }
    found.route.softmax_first = true;
    found.logits = softmax->inputs[0];
  }
  return read_choice(trail, chosen->inputs[1], values, found);
}

// True if there is one weight per pair of a token and one of its experts.
bool is_per_pair(const StepGraph& graph, const mx::array& weights, int top_k) {
  const auto* spread = graph.producer_of(weights);
  const auto& shape =
      spread && spread->op == Op::broadcast ? spread->inputs[0].shape() : weights.shape();
  return shape.size() >= 2 && shape.back() == 1 && shape[shape.size() - 2] == top_k;
}

// Reads the experts of `products`, weighted by `weights`. Adds the nodes they absorb to the trail.
std::optional<Experts> experts_of(
    const StepGraph& graph, Trail& trail, const mx::array& products, const mx::array& weights) {
  Experts found{{}, weights};
  const auto* down = trail.source(products, Op::expert_linear);
  const auto* gated = down ? trail.source(down->inputs[0], Op::silu_mul) : nullptr;
  const auto* gate = gated ? trail.source(gated->inputs[0], Op::expert_linear) : nullptr;
  const auto* up = gated ? trail.source(gated->inputs[1], Op::expert_linear) : nullptr;
  if (!gate || !up || gate == up || !read_weights(trail, weights, found) ||
      !is_per_pair(graph, weights, found.route.top_k)) {
    return std::nullopt;
  }
  // All three must use the same pairs, and gate and up the same rows.
  const auto* pairs = trail.source(down->inputs[1]);
  if (!pairs || trail.source(gate->inputs[1]) != pairs || trail.source(up->inputs[1]) != pairs ||
      value_of(gate->inputs[0]) != value_of(up->inputs[0])) {
    return std::nullopt;
  }
  found.gate = graph.index_of(*gate);
  found.up = graph.index_of(*up);
  found.down = graph.index_of(*down);
  found.route.num_rows = int(found.logits.size() / found.route.num_experts);
  return found;
}

}  // namespace

void fuse_experts(StepGraph& graph) {
  for (auto& node : graph.nodes()) {
    if (!sums_axis(&node, -2)) {
      continue;
    }
    Trail trail(graph);
    const auto* product = trail.source(node.inputs[0], Op::multiply);
    for (int side = 0; product && side < 2; side++) {
      Trail of_side = trail;
      auto found = experts_of(graph, of_side, product->inputs[side], product->inputs[1 - side]);
      if (found) {
        for (size_t part : of_side.nodes()) {
          graph.nodes()[part].is_absorbed = true;
        }
        node.fusion = std::move(*found);
        break;
      }
    }
  }
}

}  // namespace mlx_paged
