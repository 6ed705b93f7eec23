// Copyright © 2026 the mlx_paged authors. Apache-2.0.

#include <algorithm>
#include <tuple>
#include <utility>

#include "../cuda/quantized_shape.h"
#include "lowering.h"

namespace mlx_paged {

// Lowers up to three ready products of one input as one step, with their adapters.
void GpuLowering::lower_linears(size_t index) {
  auto linear = linear_of(graph_, graph_.nodes()[index]);
  std::vector<size_t> together{index};
  for (size_t other : linears_of_[value_of(linear->x)]) {
    if (together.size() < 3 && other != index && !is_lowered_[other] &&
        linear_of(graph_, graph_.nodes()[other])->codes == linear->codes) {
      together.push_back(other);
    }
  }
  for (size_t i : together) {
    is_lowered_[i] = true;
  }
  auto loras = loras_after(together);
  if (loras.empty()) {
    return add_step(products_of(together, graph_.nodes()[index].outputs[0], false));
  }
  add_step(adapted_products(together, loras, nullptr));
}

void GpuLowering::lower_gated(const GraphNode& node) {
  const auto& [gate, up] = std::get<GateUp>(node.fusion);
  const auto& product = graph_.nodes()[gate];
  require(product.op != Op::expert_linear, "experts whose sum is not one of weighted experts");
  add_step(products_of({gate, up}, node.outputs[0], true));
}

// `result`: the value of the first product, if it is gated or a residual is added.
ProductStep GpuLowering::products_of(
    const std::vector<size_t>& products, const mx::array& result, bool is_gated,
    const mx::array* residual) {
  const auto& nodes = graph_.nodes();
  auto first = *linear_of(graph_, nodes[products[0]]);
  View x = view(first.x);
  ProductStep step = product_of(x, first, int(x.rows()));
  step.is_gated = is_gated;
  read_now(x);
  for (size_t i : products) {
    auto part = part_of(*linear_of(graph_, nodes[i]), first.x.dtype());
    bool makes_result = (is_gated || residual) && i == products[0];
    View out = new_value(makes_result ? result : nodes[i].outputs[0]);
    part.out = operand(out);
    step.parts.push_back(part);
    if (is_gated && i == products[0]) {
      made_now(out, part.n);
    }
  }
  if (residual) {
    step.residual = operand(dense_view(*residual, "an addend that is not dense"));
  }
  return step;
}

// Returns the step without its parts.
ProductStep GpuLowering::product_of(const View& x, const LinearNode& first, int num_rows) {
  int64_t k = first.x.shape(-1);
  int64_t item_size = int64_t(first.x.itemsize());
  require(x.row_size() == k && x.has_dense_rows(), "a product of several vectors a row");
  require(
      k * item_size % kChunkBytes == 0 && x.row_stride() * item_size % kChunkBytes == 0 &&
          x.offset * item_size % kChunkBytes == 0,
      "a product of rows that are not multiples of 16 bytes");
  ProductStep step{};
  step.x = operand(x);
  step.num_rows = num_rows;
  step.k = int(k);
  step.x_stride = int(x.row_stride());
  step.dtype = dtype_of(first.x.dtype());
  step.codes = first.codes;
  return step;
}

// Returns the part without a place for its result.
ProductStep::Part GpuLowering::part_of(const LinearNode& linear, mx::Dtype dtype) {
  View weight = view(linear.weight);
  if (linear.is_transposed) {
    std::swap(weight.shape[0], weight.shape[1]);
    std::swap(weight.strides[0], weight.strides[1]);
  }
  require(linear.codes || linear.weight.dtype() == dtype, "weights of another dtype");
  require(weight.is_dense(), "weights that are not dense");
  require(begins_at_chunk(weight), "weights that do not begin at 16 bytes");
  ProductStep::Part part{};
  part.weight = operand(weight);
  part.bias = -1;
  part.n = weight.shape[weight.shape.size() - 2];
  for (auto [from, to] :
       {std::pair(&linear.scales, &part.scales), {&linear.biases, &part.biases}}) {
    if (*from) {
      require(
          (*from)->dtype() == dtype || (*from)->dtype() == mx::uint8, "scales of another dtype");
      View scales = dense_constant(**from);
      require(begins_at_chunk(scales), "scales that do not begin at 16 bytes");
      *to = operand(scales);
    }
  }
  if (linear.bias) {
    require(linear.bias->dtype() == dtype, "a bias of another dtype");
    part.bias = operand(dense_constant(*linear.bias));
  }
  return part;
}

void GpuLowering::lower_experts(const GraphNode& node) {
  const auto& experts = std::get<Experts>(node.fusion);
  const auto& out = node.outputs[0];
  auto dtype = out.dtype();
  MixtureStep step{};
  step.route = experts.route;
  auto [rows, num_experts, top_k] =
      std::tuple(step.route.num_rows, step.route.num_experts, step.route.top_k);
  require(
      num_experts <= 32 * paged::ROUTE_CHUNKS && top_k <= 32 &&
          rows * top_k <= paged::ROUTE_MAX_PAIRS,
      "a mixture of too many experts or rows");
  require(experts.logits.dtype() == dtype, "a router of another dtype");
  step.logits = operand(dense_view(experts.logits, "logits of experts that are not dense"));
  step.weights = operand(new_buffer({rows, top_k}, dtype));
  step.sorted_pairs = operand(new_buffer({rows * top_k}, mx::int32));
  step.items = operand(new_buffer({rows * top_k, 3}, mx::int32));
  const auto& given = graph_.nodes()[experts.gate].inputs[0];
  require(given.dtype() == dtype, "experts of another dtype");
  View x = view(given);
  require(x.rows() == rows, "experts of other rows");
  View gated{};
  step.gated = expert_products({experts.gate, experts.up}, x, step.num_pairs(), gated);
  if (step.gated.codes && step.num_pairs() >= cuda::kSortedExpertRows * num_experts) {
    step.gathered = operand(new_buffer({step.num_pairs(), step.gated.k}, dtype));
  }
  View down{};
  step.down = expert_products({experts.down}, gated, step.num_pairs(), down);
  require(
      down.shape[1] * dtype.size() % kChunkBytes == 0 &&
          int64_t(out.size()) == int64_t(rows) * down.shape[1],
      "experts with results of this size");
  step.out = operand(new_value(out));
  add_step(std::move(step));
}

// `result`: receives the first product's result, [num_pairs, n].
ProductStep GpuLowering::expert_products(
    const std::vector<size_t>& products, const View& x, int num_pairs, View& result) {
  auto first = expert_of(graph_.nodes()[products[0]]);
  ProductStep step = product_of(x, first, num_pairs);
  step.is_gated = products.size() == 2;
  for (size_t i : products) {
    auto expert = expert_of(graph_.nodes()[i]);
    require(expert.codes == first.codes, "gates in another format");
    auto part = part_of(expert, first.x.dtype());
    View out = new_buffer({num_pairs, part.n}, first.x.dtype());
    part.out = operand(out);
    if (step.parts.empty()) {
      result = out;
    }
    require(part.n == result.shape[1], "gates of another size");
    step.parts.push_back(part);
  }
  return step;
}

}  // namespace mlx_paged
