// Copyright © 2026 the mlx_paged authors. Apache-2.0.
//
// Fusions that passes find: a node that absorbs earlier ones, identified by index in the graph.

#pragma once

#include <cstddef>
#include <optional>
#include <variant>
#include <vector>

#include "../../metal/kernel_table.h"
#include "mlx/array.h"

namespace mlx_paged {

namespace mx = mlx::core;

// silu_mul(gate, up) of two products of one input: linear layers or experts.
struct GateUp {
  size_t gate;
  size_t up;
};

// An addition to the result of a product.
struct AddedProduct {
  size_t product;
  mx::array addend;
};

// silu_mul of two products with low-rank adapters, an addition to one, or one alone.
struct AdaptedProducts {
  std::vector<size_t> products;
  std::vector<size_t> loras;  // of each product
  std::optional<mx::array> addend;
};

// An addition whose sum is normalized.
struct AddNorm {
  size_t norm;
};

// Origin of the queries or keys of a layer.
struct Heads {
  mx::array from;              // [rows, heads, 1, dim] or [rows, heads, dim], before norm and RoPE
  std::optional<size_t> rope;  // nodes
  std::optional<size_t> norm;
};

// A write of keys and values, with the norm and RoPE of its keys and of the queries that then
// attend to them.
struct QkvWrite {
  size_t attention;
  Heads queries;
  Heads keys;
  std::vector<size_t> products;  // of queries, keys and values; empty: separate steps
  std::vector<size_t> loras;     // of those of the products that adapters change
};

// A weighted sum over experts, with the routing and the experts themselves.
struct Experts {
  paged::RouteParams route{};
  mx::array logits;
  size_t gate = 0;  // expert_linear nodes
  size_t up = 0;
  size_t down = 0;
};

using Fusion =
    std::variant<std::monostate, GateUp, AddedProduct, AdaptedProducts, AddNorm, QkvWrite, Experts>;

}  // namespace mlx_paged
