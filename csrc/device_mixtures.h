// Copyright © 2026 the mlx_paged authors. Apache-2.0.
//
// Mixtures of experts among a graph's nodes. Models write routers by hand:
//   a softmax of all logits, the largest of them, whose weights may be divided by their sum; or
//   the largest logits, and a softmax of these
// and then y * weights, summed over the experts, where y are gated products of experts.

#pragma once

#include <cstddef>
#include <optional>
#include <vector>

#include "device_graph.h"

namespace mlx_paged {

struct Mixture {
  paged::RouteParams route{};
  mx::array logits;
  // Nodes by their places in the graph: ExpertLinear.
  size_t gate;
  size_t up;
  size_t down;
  std::vector<size_t> nodes;  // all that the mixture takes in, but for the sum
};

// The mixture whose result is this node's; none: it is another node.
std::optional<Mixture> mixture_of(const DeviceGraph& graph, const GraphNode& sum);

}  // namespace mlx_paged
