// Copyright © 2026 the mlx_paged authors. Apache-2.0.
//
// Fusions: nodes of a graph that become one launch.

#pragma once

#include <cstddef>
#include <map>
#include <unordered_map>
#include <utility>
#include <vector>

#include "device_graph.h"
#include "device_mixtures.h"

namespace mlx_paged {

// Nodes by their places in the graph.
struct DeviceFusions {
  // A SiluMul -> the products of its gate and up.
  std::map<size_t, std::pair<size_t, size_t>> gated;
  // An addition -> the product that it becomes part of, and what is added.
  std::map<size_t, std::pair<size_t, mx::array>> added;
  // A WriteKV -> the products of the queries, keys and values that it and its attention need.
  std::map<size_t, std::vector<size_t>> written_products;
  // An addition -> the norm that takes it in.
  std::map<size_t, size_t> norm_of_sum;
  // A sum -> the mixture of experts that it ends.
  std::map<size_t, Mixture> mixtures;
  // Products by the value that they multiply.
  std::unordered_map<DeviceGraph::Id, std::vector<size_t>> linears_of;
  // [nodes]: those that another takes in, norms and rotations of written heads among them.
  std::vector<bool> taken;

  DeviceFusions(const DeviceGraph& graph, bool adds_in_products);

 private:
  // Whose results nothing but a write and its attention needs, and which can do the write.
  std::vector<size_t> products_of_write(const DeviceGraph& graph, const GraphNode& write) const;
};

}  // namespace mlx_paged
