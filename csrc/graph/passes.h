// Copyright © 2026 the mlx_paged authors. Apache-2.0.
//
// Passes over a step's graph. The first group marks nodes that a compiler lowers together
// (fusion.h); each backend runs those it has kernels for. The second group rewrites an unevaluated
// MLX graph, whether it is compiled afterwards or not.

#pragma once

#include <optional>
#include <utility>
#include <vector>

#include "step_graph.h"

namespace mlx_paged {

// True for nodes that a backend runs as products.
using IsProduct = bool (*)(const StepGraph& graph, const GraphNode& node);

// GateUp: silu_mul of two products, or of two products of the same experts.
void fuse_gate_up(StepGraph& graph, IsProduct is_product);

// AddedProduct: a product that only an addition reads adds the residual itself.
void fuse_residual(StepGraph& graph, IsProduct is_product);

// AdaptedProducts: silu_mul of two products with adapters, and with `in_products` additions to one.
void fuse_adapters(StepGraph& graph, IsProduct is_product, bool in_products);
// AdaptedProducts: a lora that nothing took in, and its product, if nothing else reads that.
void fuse_lone_adapters(StepGraph& graph, IsProduct is_product);
// The product that makes the base of a lora from the same x, if nothing else reads that; nothing
// for other nodes.
std::optional<size_t> adapted_product(const StepGraph& graph, const GraphNode& node);
// True if one launch can serve both loras: they have one x, and matrices of one rank.
bool can_share_launch(const GraphNode& a, const GraphNode& b);

// AddNorm: an addition followed by a norm, for additions that no product took in.
void fuse_add_norm(StepGraph& graph);

// QkvWrite: norm, RoPE and write of a layer's heads. With `in_products`, also the products that
// make them, if their kernels can rotate and write the results.
void fuse_qkv_write(StepGraph& graph, bool in_products);

// Experts: router, experts and weighted sum. Models write routers by hand:
//   a softmax of all logits and the largest of them, possibly divided by their sum, or
//   the largest logits and a softmax of these,
// then y * weights, summed over experts, where y are gated products of experts.
void fuse_experts(StepGraph& graph);

// An array of all rows, and its selected rows.
using SelectedRows = std::pair<mx::array, mx::array>;

// Returns `a[rows]`, where the first axis of `a` is a step's rows: rebuilds the operations that
// lead to `a` for the selected rows, as far back as each row depends on itself alone. Takes the
// rows where the graph has been evaluated or `kept` needs it. Once K and V are written, only the
// sampled rows of the last layer matter. rows: [num_selected] int32. known: pairs (array, its
// selected rows) to reuse.
mx::array select_rows(
    const mx::array& a, const mx::array& rows, const Arrays& kept,
    const std::vector<SelectedRows>& known);

// Returns x + product as one product that adds x before it rounds, for an unevaluated `sum` with as
// many rows as the product; nothing for other arrays.
std::optional<mx::array> add_in_product(const mx::array& sum);

}  // namespace mlx_paged
