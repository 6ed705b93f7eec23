// Copyright © 2026 the mlx_paged authors. Apache-2.0.
//
// Launches of a mixture of experts: routing, gate and up products, down products, the sum.

#include <algorithm>
#include <optional>
#include <string>
#include <vector>

#include "../../metal/kernel_table.h"
#include "../cuda/products.h"
#include "executable.h"
#include "portable_products.h"

namespace mlx_paged {

namespace {

class Launches {
 public:
  Launches(
      const MixtureStep& step, const std::vector<StepOperand>& operands, Gpu gpu,
      cuda::TmaKernels tma)
      : step_(step), operands_(operands), dtype_(step.down.dtype) {
    bool by_stream = gpu == Gpu::nvidia && cuda::serves_experts(step.gated, tma) &&
                     cuda::serves_experts(step.down, tma);
    for (const auto* products : {&step.gated, &step.down}) {
      auto reason = unsupported_weight(products->codes, products->k);
      if (!by_stream && reason) {
        throw UnsupportedGraph(*reason);
      }
      if (!by_stream && gpu == Gpu::nvidia && products->codes) {
        throw UnsupportedGraph("experts with quantized weights");
      }
    }
    route_ = step.route;
    if (by_stream && step.gathered >= 0) {
      auto gated = sorted_product(step.gated);
      auto down = sorted_product(step.down);
      if (cuda::serves_sorted(gated, tma) && cuda::serves_sorted(down, tma) &&
          item_rows_of(gated) == item_rows_of(down)) {
        sorted_ = {std::move(gated), std::move(down)};
      }
    }
    if (by_stream) {
      tiles_ = cuda::expert_tiles(route_.num_rows, route_.top_k, route_.num_experts);
      if (step.down.codes) {
        tiles_ = cuda::quantized_expert_tiles(*tiles_);
      }
    }
    route_.item_rows = sorted_  ? item_rows_of(sorted_->gated)
                       : tiles_ ? 8 * *tiles_
                                : product_rows_of(route_.num_rows);
    // Each chosen expert has at most one item that is not full.
    int max_experts = std::min(step.num_pairs(), route_.num_experts);
    route_.max_items =
        std::min(step.num_pairs(), max_experts + step.num_pairs() / route_.item_rows);
  }

  std::vector<Launch> all() {
    add_route();
    if (sorted_) {
      add_sorted();
    } else {
      add_products(step_.gated, true);
      add_products(step_.down, false);
    }
    add_sum();
    return std::move(all_);
  }

 private:
  // Products of gathered rows.
  struct Sorted {
    cuda::SortedProduct gated;
    cuda::SortedProduct down;
  };

  cuda::SortedProduct sorted_product(const ProductStep& products) const {
    cuda::SortedProduct sorted{};
    sorted.num_rows = step_.num_pairs();
    sorted.num_experts = step_.route.num_experts;
    sorted.n = products.parts[0].n;
    sorted.k = products.k;
    sorted.dtype = products.dtype;
    sorted.codes = *products.codes;
    for (const auto& part : products.parts) {
      sorted.parts.push_back(
          {part.weight, part.scales, part.biases >= 0 ? part.biases : part.scales, part.bias});
    }
    sorted.out = products.parts[0].out;
    sorted.items = step_.items;
    sorted.x_is_ordered = true;
    return sorted;
  }

  static int item_rows_of(const cuda::SortedProduct& product) {
    return cuda::SortedItems::of(product).item_rows;
  }

  void add_sorted() {
    auto& [gated, down] = *sorted_;
    gated.x = step_.gathered;
    gated.out_order = cuda::order_of_sorted(down.codes);
    down.x = gated.out;
    down.pairs = step_.sorted_pairs;
    all_.push_back(
        cuda::sorted_rows_launch(
            {step_.num_pairs(), route_.top_k, gated.k, step_.gated.x_stride},
            cuda::order_of_sorted(gated.codes), step_.gated.x, step_.sorted_pairs, step_.gathered));
    all_.push_back(cuda::sorted_launch(gated));
    all_.push_back(cuda::sorted_launch(down));
  }

  void add_route() {
    Launch launch = kernel("route_experts");
    bind(launch, step_.logits, Access::read);
    bind(launch, step_.weights, Access::write);
    bind(launch, step_.sorted_pairs, Access::write);
    bind(launch, step_.items, Access::write);
    launch.constants = bytes_of(route_);
    launch.grid = {1, 1, 1};
    // One SIMD-group per row, then one thread per expert.
    int num_threads = std::max(32 * route_.num_rows, route_.num_experts);
    launch.threadgroup = {
        std::min<uint32_t>(paged::ROUTE_THREADS, 32 * div_up(num_threads, 32)), 1, 1};
    // Pairs in vectors of four; counts of segments, then two numbers for each expert.
    int segments = std::max(int(launch.threadgroup[0]) / route_.num_experts, 1);
    int numbers = 4 * int(div_up(step_.num_pairs(), 4)) + (segments + 2) * route_.num_experts;
    launch.threadgroup_memory = 16 * div_up(numbers, 4);
    all_.push_back(std::move(launch));
  }

  void add_products(const ProductStep& products, bool is_first) {
    if (tiles_) {
      all_.push_back(cuda::expert_launch(step_, products, is_first, *tiles_, route_.max_items));
      return;
    }
    for (size_t i = 0; i < products.parts.size(); i++) {
      const auto& part = products.parts[i];
      Launch launch;
      launch.kernel = product_kernel("expert_rows", dtype_, products.codes, route_.item_rows);
      bind(launch, products.x, Access::read);
      bind_weight(launch, part, operands_);
      bind(launch, part.bias >= 0 ? part.bias : part.weight, Access::read);
      bind(launch, step_.sorted_pairs, Access::read);
      bind(launch, step_.items, Access::read);
      bind(launch, part.out, Access::write);
      launch.constants = bytes_of(
          paged::ExpertParams{
              part.n, products.k, products.x_stride, route_.top_k, part.bias >= 0, is_first,
              !is_first, group_shift_of(products.codes)});
      launch.grid = {
          div_up(part.n, product_columns_of(route_.item_rows)), uint32_t(route_.max_items), 1};
      launch.threadgroup = {32 * paged::PRODUCT_SIMD_GROUPS, 1, 1};
      launch.beside_previous = i > 0;
      all_.push_back(std::move(launch));
    }
    for (auto& launch : launches_after_products(products, operands_)) {
      all_.push_back(std::move(launch));
    }
  }

  void add_sum() {
    Launch launch = kernel("combine_experts");
    bind(launch, step_.down.parts[0].out, Access::read);
    bind(launch, step_.weights, Access::read);
    bind(launch, step_.out, Access::write);
    int item_size = dtype_ == DType::float32 ? 4 : 2;
    paged::CombineParams params{step_.down.parts[0].n * item_size / kChunkBytes, route_.top_k};
    launch.constants = bytes_of(params);
    launch.grid = {uint32_t(route_.num_rows), div_up(params.row_chunks, paged::DATA_THREADS), 1};
    launch.threadgroup = {paged::DATA_THREADS, 1, 1};
    all_.push_back(std::move(launch));
  }

  Launch kernel(const char* function) const {
    Launch launch;
    launch.kernel = kernel_named(std::string(function) + "_" + name_of(dtype_));
    return launch;
  }

  void bind(Launch& launch, int operand, Access access) const {
    launch.buffers.push_back({operand, access, operands_[operand].bytes});
  }

  const MixtureStep& step_;
  const std::vector<StepOperand>& operands_;
  DType dtype_;
  paged::RouteParams route_;
  std::optional<Sorted> sorted_;
  std::optional<int> tiles_;  // of eight pairs, for NVIDIA's kernels; empty: the portable kernels
  std::vector<Launch> all_;
};

}  // namespace

std::vector<Launch> mixture_launches(
    const MixtureStep& step, const std::vector<StepOperand>& operands, Gpu gpu,
    cuda::TmaKernels tma) {
  return Launches(step, operands, gpu, tma).all();
}

}  // namespace mlx_paged
