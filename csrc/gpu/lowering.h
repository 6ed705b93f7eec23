// Copyright © 2026 the mlx_paged authors. Apache-2.0.
//
// GpuLowering: turns the nodes of a step's graph into the steps of a GpuExecutable.

#pragma once

#include <limits>
#include <map>
#include <optional>
#include <string>
#include <unordered_map>
#include <unordered_set>
#include <vector>

#include "../graph/passes.h"
#include "../graph/view.h"
#include "executable.h"

namespace mlx_paged {

class GpuLowering {
 public:
  GpuLowering(
      GpuExecutable& executable, const Arrays& inputs, const Arrays& outputs,
      GpuExecutable::Residual residual);
  void run();

 private:
  using Id = StepGraph::Id;

  struct Buffer {
    StepOperand::Kind kind;
    int index = 0;
    uint64_t bytes = 0;
    mx::Dtype dtype = mx::float32;
    int first_use = std::numeric_limits<int>::max();  // steps
    int last_use = -1;
    bool is_written = false;
    // For results of norms and gated products: the step that makes them, in rows of `row_size`
    // elements, and the steps that multiply whole rows: products and lora_down.
    std::optional<size_t> made_by = {};
    int64_t row_size = 0;
    std::vector<size_t> read_by = {};
    size_t num_operands = 0;
  };

  // --- Products and experts (lower_products.cpp). All throw UnsupportedGraph.
  void lower_linears(size_t index);
  void lower_gated(const GraphNode& node);
  void lower_experts(const GraphNode& node);
  ProductStep products_of(
      const std::vector<size_t>& products, const mx::array& result, bool is_gated,
      const mx::array* residual = nullptr);
  ProductStep product_of(const View& x, const LinearNode& first, int num_rows);
  ProductStep::Part part_of(const LinearNode& linear, mx::Dtype dtype);
  ProductStep expert_products(
      const std::vector<size_t>& products, const View& x, int num_pairs, View& result);

  // --- Adapters (lower_adapters.cpp)
  void lower_lora(const GraphNode& node);
  void lower_adapted(const GraphNode& node);
  std::vector<size_t> loras_after(const std::vector<size_t>& products);
  struct Adapters {  // loras that share launches
    std::vector<size_t> loras;
    paged::LoraParams params;
    View hidden;
    Launch down;
  };
  Adapters down_launch(const View& x, const std::vector<size_t>& loras);
  Launch up_launch(const Adapters& made, const std::vector<View>& bases, const GraphNode* finish);
  View finished_count();
  size_t base_of(size_t lora) const;
  ProductStep adapted_products(
      const std::vector<size_t>& products, const std::vector<size_t>& loras,
      const GraphNode* finish);

  // --- Heads and attention (lower_attention.cpp)
  void lower_write_kv(const GraphNode& node);
  void lower_attention(const GraphNode& node);
  void check_pools(const View& key_pool, const View& value_pool) const;
  View heads_of(const mx::array& a, int heads, int dim, const char* what);
  void add_quantizing_write(const GraphNode& node, const std::vector<View>& in);
  View row_numbers(int count);

  // --- Other nodes (lowering.cpp)
  void lower(const GraphNode& node);
  void lower_norm(const GraphNode& node, const GraphNode* sum);
  void lower_rotations(const GraphNode& node);
  void lower_silu_mul(const GraphNode& node);
  void lower_gather(const GraphNode& node);
  void lower_dequantize(const GraphNode& node);
  void lower_lookup(const GraphNode& node);
  void lower_greedy(const GraphNode& node);
  void lower_collective(const GraphNode& node);
  void lower_peer_sum(const GraphNode& node);
  void lower_view(const GraphNode& node);
  void resolve_views();

  // --- Values
  View view(const mx::array& a);
  View dense_view(const mx::array& a, const char* reason);
  View dense_constant(const mx::array& a);
  bool begins_at_chunk(const View& v) const;
  View new_value(const mx::array& a);
  View new_buffer(const mx::Shape& shape, mx::Dtype dtype);
  int add_buffer(Buffer buffer);
  Buffer& buffer(const View& v) { return buffers_[v.buffer]; }
  const Buffer& buffer(const View& v) const { return buffers_[v.buffer]; }
  void made_now(const View& v, int64_t row_size);
  void read_now(const View& v);

  // --- Steps
  int operand(const View& v);
  void read(Launch& launch, const View& v);
  void write(Launch& launch, const View& v, Access access = Access::write);
  Launch layer_kernel(const char* function, mx::Dtype dtype) const;
  void add_rows_copy(const View& from, const View& rows, const View& to, mx::Dtype dtype);
  void add_launches(
      const LaunchList& list, const std::vector<View>& in, const std::vector<View>& out);
  template <typename S>
  void add_step(S step) {
    executable_.steps_.emplace_back(std::in_place_type<S>, std::move(step));
  }
  int num_steps() const { return int(executable_.steps_.size()); }

  void add_inputs();
  void add_outputs();
  void find_any_size();
  void add_result(const mx::array& output);
  bool is_tap(const Buffer& b) const;
  void find_multiplied();
  void place_temporaries();

  GpuExecutable& executable_;
  StepGraph graph_;
  std::vector<bool> is_lowered_;                            // nodes
  std::unordered_map<Id, std::vector<size_t>> linears_of_;  // by the value they multiply
  std::unordered_map<size_t, size_t> lora_of_;              // by the product it changes
  std::vector<Buffer> buffers_;
  std::vector<int> buffer_of_operand_;
  std::vector<const GraphNode*> unresolved_;  // views of values that another step computes
  std::unordered_map<Id, View> views_;
  std::unordered_set<Id> for_host_;  // results
  std::map<int, mx::array> row_numbers_;
  std::optional<mx::array> finished_count_;
};

}  // namespace mlx_paged
