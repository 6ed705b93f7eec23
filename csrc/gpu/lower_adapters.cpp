// Copyright © 2026 the mlx_paged authors. Apache-2.0.
//
// Lowers adapters: lora_down for all targets of one x, the products that they change, then lora_up;
// or products that do all of it. In this order, a GPU that can start kernels early (NVIDIA) loads
// the products' weights while lora_down runs.

#include <algorithm>
#include <utility>

#include "../cuda/linear_shape.h"
#include "lowering.h"
#include "mlx/ops.h"

namespace mlx_paged {

namespace {

// Binds the last operand again, for targets that do not exist.
void bind_missing(Launch& launch, size_t num_targets) {
  const Binding last = launch.buffers.back();
  launch.buffers.insert(launch.buffers.end(), paged::LORA_TARGETS - num_targets, last);
}

}  // namespace

// Lowers a lora whose base is not a product of the same x.
void GpuLowering::lower_lora(const GraphNode& node) {
  std::vector<size_t> loras{graph_.index_of(node)};
  View base = dense_view(node.inputs[Lora::kBase], "a base that is not dense");
  require(begins_at_chunk(base), "a base that does not begin at 16 bytes");
  auto made = down_launch(view(node.inputs[Lora::kX]), loras);
  add_step(made.down);
  add_step(up_launch(made, {base}, nullptr));
}

// Lowers products with adapters and what follows: silu_mul of two, or an addition to one.
void GpuLowering::lower_adapted(const GraphNode& node) {
  const auto& [products, loras, unused] = std::get<AdaptedProducts>(node.fusion);
  add_step(adapted_products(products, loras, &node));
}

// `finish`: the node that the products compute instead of the loras' results, or null.
ProductStep GpuLowering::adapted_products(
    const std::vector<size_t>& products, const std::vector<size_t>& loras,
    const GraphNode* finish) {
  const auto& nodes = graph_.nodes();
  auto made = down_launch(view(linear_of(graph_, nodes[products[0]])->x), loras);
  ProductStep step = products_of(products, nodes[products[0]].outputs[0], false);
  std::vector<View> bases;
  for (size_t i = 0; i < loras.size(); i++) {
    size_t base = base_of(loras[i]);
    bases.push_back(view(nodes[base].outputs[0]));
    size_t part = std::find(products.begin(), products.end(), base) - products.begin();
    step.parts[part].target = int(i);
  }
  step.adapters = {made.down, up_launch(made, bases, finish), operand(finished_count())};
  return step;
}

// Returns the counter of finished blocks, which all products share, one after another.
View GpuLowering::finished_count() {
  constexpr int kSize = 64;  // MLX puts smaller arrays in host-visible memory
  if (!finished_count_) {
    finished_count_ = mx::zeros({kSize}, mx::uint32);
  }
  return dense_constant(*finished_count_);
}

// Returns the loras that can follow these products in one launch, now lowered.
std::vector<size_t> GpuLowering::loras_after(const std::vector<size_t>& products) {
  const auto& nodes = graph_.nodes();
  std::vector<size_t> loras;
  for (size_t product : products) {
    auto found = lora_of_.find(product);
    if (found == lora_of_.end()) {
      continue;
    }
    const auto& node = nodes[found->second];
    bool is_ready = true;
    for (int i : {Lora::kAdapters, Lora::kA, Lora::kB}) {
      is_ready = is_ready && (!graph_.depends(node.inputs[i]) || views_.count(node.inputs[i].id()));
    }
    if (is_ready && (loras.empty() || can_share_launch(nodes[loras[0]], node))) {
      loras.push_back(found->second);
      is_lowered_[found->second] = true;
    }
  }
  return loras;
}

// Returns lora_down, for the next step.
GpuLowering::Adapters GpuLowering::down_launch(const View& x, const std::vector<size_t>& loras) {
  const auto& nodes = graph_.nodes();
  const auto& first = nodes[loras[0]].inputs;
  std::vector<View> a;
  std::vector<int> columns;
  for (size_t i : loras) {
    a.push_back(dense_view(nodes[i].inputs[Lora::kA], "adapters that are not dense"));
    require(begins_at_chunk(a.back()), "adapters that do not begin at 16 bytes");
    columns.push_back(nodes[i].inputs[Lora::kB].shape(2));
  }
  require(x.is_dense() && begins_at_chunk(x), "adapters of rows that are not dense");
  View adapters = dense_view(first[Lora::kAdapters], "numbers of adapters that are not dense");
  auto params = lora_params(first[Lora::kA], int(first[Lora::kAdapters].size()), columns);
  int num_targets = int(loras.size());
  auto largest = params;  // Products that replace lora_down may have more parts.
  largest.num_parts = std::max(params.num_parts, cuda::kAdapterMaxParts);
  View hidden = new_buffer({lora_hidden_size(largest, num_targets)}, mx::float32);
  Launch down = lora_down_launch(params, num_targets, first[Lora::kA].dtype());
  read(down, x);
  read_now(x);
  read(down, adapters);
  for (const View& v : a) {
    read(down, v);
  }
  bind_missing(down, a.size());
  write(down, hidden);
  return {loras, params, hidden, std::move(down)};
}

// The product that a lora changes.
size_t GpuLowering::base_of(size_t lora) const {
  std::vector<const GraphNode*> passed;
  return graph_.index_of(*graph_.source_of(graph_.nodes()[lora].inputs[Lora::kBase], passed));
}

// Returns lora_up, for the next step. `finish`: the node that it computes instead of the results of
// the loras, or null.
Launch GpuLowering::up_launch(
    const Adapters& made, const std::vector<View>& bases, const GraphNode* finish) {
  const auto& nodes = graph_.nodes();
  const auto& first = nodes[made.loras[0]].inputs;
  auto params = made.params;
  std::vector<View> b;
  for (size_t i : made.loras) {
    b.push_back(dense_view(nodes[i].inputs[Lora::kB], "adapters that are not dense"));
    require(begins_at_chunk(b.back()), "adapters that do not begin at 16 bytes");
  }
  View residual = bases[0];  // a placeholder
  if (finish) {
    const auto& addend = std::get<AdaptedProducts>(finish->fusion).addend;
    params.is_gated = finish->op == Op::silu_mul;
    params.has_residual = addend.has_value();
    if (addend) {
      residual = dense_view(*addend, "an addend that is not dense");
      require(begins_at_chunk(residual), "an addend that does not begin at 16 bytes");
    }
  }
  Launch up = lora_up_launch(params, int(made.loras.size()), first[Lora::kA].dtype());
  for (const View& v : bases) {
    read(up, v);
  }
  bind_missing(up, bases.size());
  read(up, made.hidden);
  read(up, view(first[Lora::kAdapters]));
  for (const View& v : b) {
    read(up, v);
  }
  bind_missing(up, b.size());
  read(up, residual);
  std::vector<View> results;
  for (size_t i : made.loras) {
    if (results.empty() || !finish) {
      results.push_back(new_value((finish ? *finish : nodes[i]).outputs[0]));
    }
  }
  for (const View& v : results) {
    write(up, v);
  }
  bind_missing(up, results.size());
  if (params.is_gated) {
    made_now(results[0], params.n_0);
  }
  return up;
}

}  // namespace mlx_paged
