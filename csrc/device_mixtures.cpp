// Copyright © 2026 the mlx_paged authors. Apache-2.0.

#include "device_mixtures.h"

#include <algorithm>
#include <utility>

namespace mlx_paged {

namespace {

// Follows a graph backwards, and notes what it passes.
class Trail {
 public:
  explicit Trail(const DeviceGraph& graph) : graph_(graph) {}

  // The node that computes `a`, behind views and nodes that change no number.
  const GraphNode* source(const mx::array& a) {
    const auto* node = graph_.producer_of(a);
    while (node && passes(*node)) {
      note(*node);
      node = graph_.producer_of(node->inputs[0]);
    }
    return node;
  }

  const GraphNode* source(const mx::array& a, const char* name) {
    const auto* node = source(a);
    if (!node || !node->is(name)) {
      return nullptr;
    }
    note(*node);
    return node;
  }

  const GraphNode* expert(const mx::array& a) {
    const auto* node = source(a);
    if (!node || !node->as<ExpertLinear>()) {
      return nullptr;
    }
    note(*node);
    return node;
  }

  void note(const GraphNode& node) { nodes_.push_back(place_of(node)); }
  size_t place_of(const GraphNode& node) const { return &node - graph_.nodes().data(); }

  std::vector<size_t> nodes() const {
    auto all = nodes_;
    std::sort(all.begin(), all.end());
    all.erase(std::unique(all.begin(), all.end()), all.end());
    return all;
  }

 private:
  static bool passes(const GraphNode& node) {
    bool is_part = node.is("Split") || node.is("Slice") || node.is("Transpose");
    return (DeviceGraph::is_view(node) && !is_part) || node.is("Broadcast") ||
           node.is("StopGradient");
  }

  const DeviceGraph& graph_;
  std::vector<size_t> nodes_;
};

bool sums_axis(const GraphNode* node, int axis) {
  if (!node || !node->is("Sum")) {
    return false;
  }
  const auto& axes = static_cast<const mx::Reduce&>(*node->primitive).state().second;
  return axes == std::vector<int>{int(node->inputs[0].ndim()) + axis};
}

// Fills in what is chosen of the values behind `indices`: the first or the last of a partition.
bool read_choice(Trail& trail, const mx::array& indices, const mx::array& values, Mixture& found) {
  const auto* chosen = trail.source(indices);
  if (!chosen) {
    return false;
  }
  const auto* slice = chosen->is("Slice") ? chosen : nullptr;  // none: all are chosen
  if (slice) {
    trail.note(*slice);
  }
  const auto* partition = trail.source(slice ? slice->inputs[0] : indices, "ArgPartition");
  if (!partition) {
    return false;
  }
  const auto* negative = trail.source(partition->inputs[0]);
  bool takes_last = !negative || !negative->is("Negative");
  if (!takes_last) {
    trail.note(*negative);
  }
  const auto& sorted = takes_last ? partition->inputs[0] : negative->inputs[0];
  auto& route = found.route;
  route.num_experts = sorted.shape(-1);
  route.top_k = chosen->outputs[0].shape(-1);
  route.takes_last = takes_last;
  if (slice) {
    auto [begin, end, steps] = static_cast<const mx::Slice&>(*slice->primitive).state();
    if (steps.back() != 1 || begin.back() != (takes_last ? route.num_experts - route.top_k : 0)) {
      return false;
    }
  }
  return static_cast<const mx::ArgPartition&>(*partition->primitive).state().second ==
             int(sorted.ndim()) - 1 &&
         DeviceGraph::value_of(sorted) == DeviceGraph::value_of(values);
}

// Fills in how the weights of pairs are made.
bool read_weights(Trail& trail, const mx::array& weights, Mixture& found) {
  const auto* node = trail.source(weights);
  if (!node) {
    return false;
  }
  trail.note(*node);
  const GraphNode* chosen = node;
  bool of_chosen = node->is("Softmax");
  if (of_chosen) {
    chosen = trail.source(node->inputs[0], "GatherAxis");
  } else if (node->is("Divide")) {
    found.route.normalises = true;
    chosen = trail.source(node->inputs[0], "GatherAxis");
    const auto* total = trail.source(node->inputs[1], "Sum");
    if (!sums_axis(total, -1) || trail.source(total->inputs[0]) != chosen) {
      return false;
    }
  }
  if (!chosen || !chosen->is("GatherAxis") ||
      static_cast<const mx::GatherAxis&>(*chosen->primitive).state() !=
          int(chosen->inputs[0].ndim()) - 1) {
    return false;
  }
  const auto& values = chosen->inputs[0];
  found.logits = values;
  if (!of_chosen) {
    const auto* softmax = trail.source(values, "Softmax");
    if (!softmax) {
      return false;
    }
    found.route.softmax_first = true;
    found.logits = softmax->inputs[0];
  }
  return read_choice(trail, chosen->inputs[1], values, found);
}

}  // namespace

std::optional<Mixture> mixture_of(const DeviceGraph& graph, const GraphNode& sum) {
  if (!sums_axis(&sum, -2)) {
    return std::nullopt;
  }
  Trail trail(graph);
  const auto* product = trail.source(sum.inputs[0], "Multiply");
  if (!product) {
    return std::nullopt;
  }
  for (int side = 0; side < 2; side++) {
    Trail of_side = trail;
    const auto& weights = product->inputs[1 - side];
    Mixture found{{}, weights, 0, 0, 0, {}};
    const auto* down = of_side.expert(product->inputs[side]);
    const auto* gated = down ? of_side.source(down->inputs[0]) : nullptr;
    if (!gated || !gated->as<SiluMul>()) {
      continue;
    }
    of_side.note(*gated);
    const auto* gate = of_side.expert(gated->inputs[0]);
    const auto* up = of_side.expert(gated->inputs[1]);
    if (!gate || !up || gate == up || !read_weights(of_side, weights, found)) {
      continue;
    }
    // (One number for each pair.)
    const auto* spread = graph.producer_of(weights);
    const auto& shape =
        spread && spread->is("Broadcast") ? spread->inputs[0].shape() : weights.shape();
    if (shape.size() < 2 || shape.back() != 1 || shape[shape.size() - 2] != found.route.top_k) {
      continue;
    }
    // All of them are of the same pairs, and gate and up of the same rows.
    const auto* pairs = of_side.source(down->inputs[1]);
    if (of_side.source(gate->inputs[1]) != pairs || of_side.source(up->inputs[1]) != pairs ||
        !pairs || DeviceGraph::value_of(gate->inputs[0]) != DeviceGraph::value_of(up->inputs[0])) {
      continue;
    }
    found.gate = of_side.place_of(*gate);
    found.up = of_side.place_of(*up);
    found.down = of_side.place_of(*down);
    found.route.num_rows = int(found.logits.size() / found.route.num_experts);
    found.nodes = of_side.nodes();
    return found;
  }
  return std::nullopt;
}

}  // namespace mlx_paged
