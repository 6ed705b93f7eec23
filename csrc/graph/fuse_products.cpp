// Copyright © 2026 the mlx_paged authors. Apache-2.0.
//
// Passes that fuse products with the operations after them.

#include <algorithm>
#include <utility>

#include "passes.h"

namespace mlx_paged {

namespace {

// The product that makes `a`, if nothing else reads it or a reshape between them.
std::optional<size_t> own_product(const StepGraph& graph, const mx::array& a, IsProduct is_one) {
  std::vector<const GraphNode*> passed;
  const auto* node = graph.source_of(a, passed);
  if (!node || node->is_absorbed || !is_one(graph, *node) || graph.uses_of(a) != 1) {
    return std::nullopt;
  }
  passed.push_back(node);
  for (const auto* one : passed) {
    if (graph.uses_of(one->outputs[0]) != 1 || one->outputs[0].shape(0) != a.shape(0)) {
      return std::nullopt;
    }
  }
  return graph.index_of(*node);
}

bool is_expert(const StepGraph&, const GraphNode& node) {
  return node.op == Op::expert_linear;
}

// True if both multiply the same values by weights of one kind.
bool are_alike(const StepGraph& graph, size_t a, size_t b) {
  const auto& first = graph.nodes()[a];
  const auto& second = graph.nodes()[b];
  if (first.outputs[0].shape() != second.outputs[0].shape()) {
    return false;
  }
  if (first.op == Op::expert_linear) {
    return first.inputs[0].id() == second.inputs[0].id() &&
           first.inputs[1].id() == second.inputs[1].id();
  }
  auto one = linear_of(graph, first), other = linear_of(graph, second);
  return value_of(one->x) == value_of(other->x) && one->codes == other->codes;
}

bool fuse_gate_up_at(StepGraph& graph, GraphNode& node, IsProduct is_one) {
  auto gate = own_product(graph, node.inputs[0], is_one);
  auto up = own_product(graph, node.inputs[1], is_one);
  if (!gate || !up || !are_alike(graph, *gate, *up)) {
    return false;
  }
  graph.nodes()[*gate].is_absorbed = graph.nodes()[*up].is_absorbed = true;
  node.fusion = GateUp{*gate, *up};
  return true;
}

std::optional<size_t> norm_of_sum(const StepGraph& graph, const mx::array& sum) {
  for (int user : graph.users_of(sum)) {
    if (user < 0) {
      continue;
    }
    const auto& node = graph.nodes()[user];
    if (node.op == Op::rms_norm && !node.is_absorbed && node.inputs[0].id() == sum.id()) {
      return user;
    }
  }
  return std::nullopt;
}

bool adds_rows(const GraphNode& node) {
  return node.op == Op::add && node.inputs[0].shape() == node.inputs[1].shape();
}

}  // namespace

void fuse_gate_up(StepGraph& graph, IsProduct is_product) {
  for (auto& node : graph.nodes()) {
    if (node.op == Op::silu_mul && !node.is_absorbed) {
      fuse_gate_up_at(graph, node, is_product) || fuse_gate_up_at(graph, node, is_expert);
    }
  }
}

void fuse_residual(StepGraph& graph, IsProduct is_product) {
  for (auto& node : graph.nodes()) {
    if (!adds_rows(node)) {
      continue;
    }
    for (int side : {1, 0}) {
      if (auto product = own_product(graph, node.inputs[side], is_product)) {
        graph.nodes()[*product].is_absorbed = true;
        node.fusion = AddedProduct{*product, node.inputs[1 - side]};
        break;
      }
    }
  }
}

std::optional<size_t> adapted_product(const StepGraph& graph, const GraphNode& node) {
  if (node.op != Op::lora) {
    return std::nullopt;
  }
  const auto& base = node.inputs[Lora::kBase];
  std::vector<const GraphNode*> passed;
  const auto* product = graph.source_of(base, passed);
  bool is_reordered = std::any_of(
      passed.begin(), passed.end(), [](const GraphNode* one) { return !is_reshape(one->op); });
  if (!product || product->is_absorbed || is_reordered) {
    return std::nullopt;
  }
  passed.push_back(product);
  if (std::any_of(passed.begin(), passed.end(), [&](const GraphNode* one) {
        return graph.uses_of(one->outputs[0]) != 1;
      })) {
    return std::nullopt;
  }
  auto linear = linear_of(graph, *product);
  if (!linear || value_of(linear->x) != value_of(node.inputs[Lora::kX]) ||
      linear->x.shape(-1) != node.inputs[Lora::kX].shape(-1) ||
      product->outputs[0].shape(-1) != base.shape(-1)) {
    return std::nullopt;
  }
  return graph.index_of(*product);
}

bool can_share_launch(const GraphNode& a, const GraphNode& b) {
  return value_of(a.inputs[Lora::kX]) == value_of(b.inputs[Lora::kX]) &&
         a.inputs[Lora::kAdapters].id() == b.inputs[Lora::kAdapters].id() &&
         a.inputs[Lora::kA].shape() == b.inputs[Lora::kA].shape();
}

namespace {

void absorb(StepGraph& graph, const std::vector<size_t>& nodes) {
  for (size_t i : nodes) {
    graph.nodes()[i].is_absorbed = true;
  }
}

bool is_adapted(const StepGraph& graph, const GraphNode& node) {
  return adapted_product(graph, node).has_value();
}

// The loras that make these arrays and their products, if nothing else reads either.
std::optional<AdaptedProducts> own_adapted(
    const StepGraph& graph, const Arrays& made, IsProduct is_product) {
  AdaptedProducts found;
  for (const auto& a : made) {
    auto lora = own_product(graph, a, is_adapted);
    if (!lora) {
      return std::nullopt;
    }
    const auto& node = graph.nodes()[*lora];
    auto product = own_product(graph, node.inputs[Lora::kBase], is_product);
    if (!product ||
        (!found.loras.empty() && !(are_alike(graph, found.products[0], *product) &&
                                   can_share_launch(graph.nodes()[found.loras[0]], node)))) {
      return std::nullopt;
    }
    found.products.push_back(*product);
    found.loras.push_back(*lora);
  }
  return found;
}

}  // namespace

void fuse_adapters(StepGraph& graph, IsProduct is_product, bool in_products) {
  for (auto& node : graph.nodes()) {
    std::optional<AdaptedProducts> found;
    if (node.is_absorbed || !std::holds_alternative<std::monostate>(node.fusion)) {
      continue;
    }
    if (node.op == Op::silu_mul) {
      found = own_adapted(graph, node.inputs, is_product);
    } else if (in_products && adds_rows(node)) {
      for (int side : {1, 0}) {
        if (!found && (found = own_adapted(graph, {node.inputs[side]}, is_product))) {
          found->addend = node.inputs[1 - side];
        }
      }
    }
    if (!found) {
      continue;
    }
    absorb(graph, found->products);
    absorb(graph, found->loras);
    node.fusion = std::move(*found);
  }
}

void fuse_lone_adapters(StepGraph& graph, IsProduct is_product) {
  for (auto& node : graph.nodes()) {
    if (node.is_absorbed || !is_adapted(graph, node)) {
      continue;
    }
    if (auto product = own_product(graph, node.inputs[Lora::kBase], is_product)) {
      graph.nodes()[*product].is_absorbed = true;
      node.fusion = AdaptedProducts{{*product}, {graph.index_of(node)}, std::nullopt};
    }
  }
}

void fuse_add_norm(StepGraph& graph) {
  for (auto& node : graph.nodes()) {
    if (!adds_rows(node) || !std::holds_alternative<std::monostate>(node.fusion)) {
      continue;
    }
    if (auto norm = norm_of_sum(graph, node.outputs[0])) {
      graph.nodes()[*norm].is_absorbed = true;
      node.fusion = AddNorm{*norm};
    }
  }
}

namespace {

Heads heads_of(const StepGraph& graph, const mx::array& a) {
  Heads heads{a, std::nullopt, std::nullopt};
  std::vector<const GraphNode*> passed;
  const auto* node = graph.source_of(heads.from, passed);
  if (node && node->op == Op::rope) {
    heads.rope = graph.index_of(*node);
    heads.from = node->inputs[0];
    node = graph.source_of(heads.from, passed);
  }
  if (node && node->op == Op::rms_norm && node->inputs.size() > 1 &&
      node->outputs[0].shape(-1) == a.shape(-1)) {
    heads.norm = graph.index_of(*node);
    heads.from = node->inputs[0];
  }
  return heads;
}

std::optional<size_t> attention_after(const StepGraph& graph, const GraphNode& write) {
  for (int user : graph.users_of(write.outputs[0])) {
    if (user >= 0 && graph.nodes()[user].op == Op::paged_attention) {
      return user;
    }
  }
  return std::nullopt;
}

// Products that rotate and write need blocks of whole heads or of equal parts of one.
bool product_can_write(const StepGraph& graph, const GraphNode& write, const QkvWrite& found) {
  const auto& queries = graph.nodes()[found.attention].inputs[PagedAttention::kQueries];
  int head_dim = queries.shape(-1);
  if (format_of(write.inputs[0].dtype()) != PoolFormat::plain || queries.dtype() == mx::float32 ||
      write.inputs[1].shape(3) != head_dim ||
      (head_dim != 64 && head_dim != 128 && head_dim != 256)) {
    return false;
  }
  for (const Heads* heads : {&found.queries, &found.keys}) {
    if (!heads->rope || heads->norm) {
      return false;
    }
    const auto& rope = graph.nodes()[*heads->rope];
    if (rope.as<Rope>().traditional() || rope.inputs[1].shape(2) * 2 != head_dim) {
      return false;
    }
  }
  return true;
}

// The products of queries, keys and values and their loras, if they fit one launch and nothing else
// reads them; otherwise no products.
AdaptedProducts products_of(const StepGraph& graph, const GraphNode& write, const QkvWrite& found) {
  if (!product_can_write(graph, write, found)) {
    return {};
  }
  const auto& nodes = graph.nodes();
  AdaptedProducts made;
  for (const auto& from : {found.queries.from, found.keys.from, write.inputs[3]}) {
    auto lora = own_product(graph, from, is_adapted);
    auto product = own_product(graph, lora ? nodes[*lora].inputs[Lora::kBase] : from, is_linear);
    if (!product) {
      return {};
    }
    if (lora) {
      made.loras.push_back(*lora);
    }
    made.products.push_back(*product);
    auto linear = linear_of(graph, nodes[*product]);
    auto first = linear_of(graph, nodes[made.products[0]]);
    if (value_of(linear->x) != value_of(first->x) || linear->codes != first->codes ||
        (lora && !can_share_launch(nodes[made.loras[0]], nodes[*lora]))) {
      return {};
    }
  }
  return made;
}

}  // namespace

void fuse_qkv_write(StepGraph& graph, bool in_products) {
  for (auto& node : graph.nodes()) {
    if (node.op != Op::write_kv) {
      continue;
    }
    auto attention = attention_after(graph, node);
    require(attention.has_value(), "a write that no attention follows");
    const auto& queries = graph.nodes()[*attention].inputs[PagedAttention::kQueries];
    QkvWrite found{*attention, heads_of(graph, queries), heads_of(graph, node.inputs[2]), {}, {}};
    if (in_products) {
      auto made = products_of(graph, node, found);
      found.products = std::move(made.products);
      found.loras = std::move(made.loras);
    }
    absorb(graph, found.products);
    absorb(graph, found.loras);
    for (const Heads* heads : {&found.queries, &found.keys}) {
      for (auto part : {heads->rope, heads->norm}) {
        if (part) {
          require(graph.uses_of(graph.nodes()[*part].outputs[0]) == 1, "heads that are used twice");
          graph.nodes()[*part].is_absorbed = true;
        }
      }
    }
    node.fusion = std::move(found);
  }
}

}  // namespace mlx_paged
