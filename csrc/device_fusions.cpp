// Copyright © 2026 the mlx_paged authors. Apache-2.0.

#include "device_fusions.h"

#include <optional>

namespace mlx_paged {

DeviceFusions::DeviceFusions(const DeviceGraph& graph, bool adds_in_products)
    : taken(graph.nodes().size(), false) {
  const auto& nodes = graph.nodes();
  auto value_multiplied = [&](size_t product) {
    return DeviceGraph::value_of(graph.linear_of(nodes[product])->x);
  };
  auto take_heads = [&](const Heads& heads) {
    for (const auto* part : {heads.rope, heads.norm}) {
      if (part) {
        taken[part - nodes.data()] = true;
      }
    }
  };
  auto norm_of = [&](const GraphNode& sum) -> std::optional<size_t> {
    for (int user : graph.users_of(sum.outputs[0])) {
      if (user >= 0 && nodes[user].as<RmsNorm>() && !taken[user] &&
          nodes[user].inputs[0].id() == sum.outputs[0].id()) {
        return user;
      }
    }
    return std::nullopt;
  };
  for (size_t i = 0; i < nodes.size(); i++) {
    if (graph.linear_of(nodes[i])) {
      linears_of[value_multiplied(i)].push_back(i);
    }
    if (auto mixture = mixture_of(graph, nodes[i])) {
      for (size_t part : mixture->nodes) {
        taken[part] = true;
      }
      mixtures.emplace(i, std::move(*mixture));
    }
  }
  for (size_t i = 0; i < nodes.size(); i++) {
    const auto& node = nodes[i];
    if (node.as<SiluMul>()) {
      auto gate = graph.own_linear(node.inputs[0]);
      auto up = graph.own_linear(node.inputs[1]);
      if (gate && up && gate != up && value_multiplied(*gate) == value_multiplied(*up) &&
          graph.linear_of(nodes[*gate])->codes == graph.linear_of(nodes[*up])->codes &&
          nodes[*gate].outputs[0].shape() == nodes[*up].outputs[0].shape()) {
        taken[*gate] = taken[*up] = true;
        gated[i] = {*gate, *up};
      }
    } else if (node.is("Add") && node.inputs[0].shape() == node.inputs[1].shape()) {
      std::optional<size_t> linear;
      int side = 1;
      for (; side >= 0 && !linear; side--) {
        linear = graph.own_linear(node.inputs[side]);
      }
      side++;
      if (adds_in_products && linear && !taken[*linear]) {
        taken[*linear] = true;
        added.emplace(i, std::pair(*linear, node.inputs[1 - side]));
      } else if (auto norm = norm_of(node)) {
        taken[*norm] = true;
        norm_of_sum[i] = *norm;
      }
    } else if (node.as<WriteKV>()) {
      auto products = products_of_write(graph, node);
      if (adds_in_products && !products.empty()) {
        for (size_t product : products) {
          taken[product] = true;
        }
        written_products[i] = std::move(products);
      }
      take_heads(graph.heads_of(node.inputs[2]));
      if (const auto* attention = graph.attention_after(node)) {
        take_heads(graph.heads_of(attention->inputs[PagedAttention::kQueries]));
      }
    }
  }
}

std::vector<size_t> DeviceFusions::products_of_write(
    const DeviceGraph& graph, const GraphNode& write) const {
  const auto* attention = graph.attention_after(write);
  if (!attention) {
    return {};
  }
  const auto& queries = attention->inputs[PagedAttention::kQueries];
  Heads of_queries = graph.heads_of(queries);
  Heads of_keys = graph.heads_of(write.inputs[2]);
  if (format_of(write.inputs[0].dtype()) != PoolFormat::plain) {
    return {};
  }
  int head_dim = queries.shape(-1);
  // (Of these, blocks of products have whole heads or parts of one.)
  bool is_served = head_dim == 64 || head_dim == 128 || head_dim == 256;
  for (const Heads* heads : {&of_queries, &of_keys}) {
    is_served = is_served && heads->rope && !heads->norm &&
                !heads->rope->as<Rope>()->traditional() &&
                heads->rope->inputs[1].shape(2) * 2 == head_dim;
  }
  if (!is_served || queries.dtype() == mx::float32 || write.inputs[1].shape(3) != head_dim) {
    return {};
  }
  std::vector<size_t> products;
  for (const auto& from : {of_queries.from, of_keys.from, write.inputs[3]}) {
    auto linear = graph.own_linear(from);
    if (!linear || taken[*linear]) {
      return {};
    }
    products.push_back(*linear);
  }
  auto x = [&](size_t product) {
    return DeviceGraph::value_of(graph.linear_of(graph.nodes()[product])->x);
  };
  auto codes = [&](size_t product) { return graph.linear_of(graph.nodes()[product])->codes; };
  bool are_alike = true;
  for (size_t other : {products[1], products[2]}) {
    are_alike = are_alike && x(other) == x(products[0]) && codes(other) == codes(products[0]);
  }
  return are_alike ? products : std::vector<size_t>{};
}

}  // namespace mlx_paged
