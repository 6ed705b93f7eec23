// Copyright © 2026 the mlx_paged authors. Apache-2.0.
//
// CpuLowering: turns the nodes of a step's graph into the operations of a CpuExecutable.

#pragma once

#include <array>
#include <map>
#include <optional>
#include <unordered_map>
#include <vector>

#include "../graph/passes.h"
#include "executable.h"
#include "phases.h"

namespace mlx_paged::cpu {

// Axes of a row without those of 1, with contiguous axes joined, for views of one shape.
struct InnerAxes {
  std::vector<int64_t> sizes;
  std::vector<std::vector<int64_t>> steps;  // of each view
};
InnerAxes inner_axes(const std::vector<const View*>& views);

class CpuLowering {
 public:
  CpuLowering(CpuExecutable& executable, const Arrays& inputs, const Arrays& outputs);
  void run();

 private:
  using Id = StepGraph::Id;

  // --- Nodes (lowering.cpp). All throw UnsupportedGraph.
  void lower(const GraphNode& node);  // natively, or left to MLX
  void lower_natively(const GraphNode& node);
  void lower_foreign(const GraphNode& node);
  void lower_write_kv(const GraphNode& node);
  void lower_attention(const GraphNode& node);
  void lower_product(const GraphNode& node);
  void lower_experts(const GraphNode& node);
  void lower_expert_lora(const GraphNode& node);
  Projection projection_of(const GraphNode& node, const GraphNode* lora);
  Adapters adapters_of(const GraphNode& lora, const View& x);
  View as_integers(const View& x, const WeightView& weight, const IntegerKernels& integers);

  // --- Nodes that work on each row by itself, and views (lower_rows.cpp)
  void lower_rows(const GraphNode& node);
  void lower_view(const GraphNode& node);
  void lower_gather(const GraphNode& node);
  void lower_gather_axis(const GraphNode& node);
  void lower_lookup(const GraphNode& node);
  void lower_rms_norm(const GraphNode& node);
  void lower_layer_norm(const GraphNode& node);
  void lower_rope_rotations(const GraphNode& node);
  void lower_rope(const GraphNode& node);
  void lower_lora(const GraphNode& node);
  void lower_argpartition(const GraphNode& node);
  void lower_sum(const GraphNode& node);
  template <typename F>
  void lower_by_element(const GraphNode& node, F f);
  template <typename F>
  void lower_gated(const GraphNode& node, F f);
  template <typename F>
  void lower_elementwise(const GraphNode& node, F combine);

  // --- Values
  const View& view(const mx::array& a);
  const float* constant(const mx::array& a);  // dense
  // A node's inputs; those from `first` on are weights, made dense and evaluated.
  Arrays with_weights(const GraphNode& node, size_t first = 1);
  View new_value(const mx::array& a);  // float32
  View new_ids(const mx::array& a);    // uint32
  View new_temporary(const mx::array& a);
  View dense_rows(const View& v) { return v.has_dense_rows() ? v : copied(v); }
  View copied(const View& from);
  int add_buffer(Buffer buffer);
  const Buffer& buffer(const View& v) const { return executable_.buffers_[v.buffer]; }
  // True if row i of a view is part of row i of its value.
  bool is_aligned(const View& v) const;
  int input_of(const mx::array& a) const;
  int input_of_any_length(const mx::array& a);

  void add(Operation::Work work, int64_t rows, std::vector<int> gathers, std::vector<int> writes);
  void add_row_task(
      const View& to, const std::vector<View>& reads, std::vector<int> gathers, RowTask task);
  void add_inputs();
  void add_results();
  bool is_read_by_mlx(const View& v) const;
  void check_inputs() const;

  CpuExecutable& executable_;
  StepGraph graph_;
  std::unordered_map<Id, View> views_;
  std::vector<Operation> operations_;
  // Rounded activations, by buffer, offset, stride, rows, k, bits and size.
  std::map<std::array<int64_t, 7>, View> rounded_;
};

}  // namespace mlx_paged::cpu
