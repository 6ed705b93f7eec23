// Copyright © 2026 the mlx_paged authors. Apache-2.0.
//
// Nodes of a graph that work on each row by itself, or only show a value in another way.

#pragma once

#include <vector>

#include "program_values.h"

namespace mlx_paged::cpu {

class RowReader : public ProgramValues {
 protected:
  using ProgramValues::ProgramValues;

  // Throws Unsupported for any other.
  void read_rows(const Node& node);

 private:
  void read_view(const Node& node);
  void read_gather(const Node& node, const mx::Gather& gather);
  void read_gather_axis(const Node& node, int axis);
  void read_lookup(const Node& node, const Lookup& lookup);
  void read_rms_norm(const Node& node, const RmsNorm& norm);
  void read_layer_norm(const Node& node, const LayerNorm& norm);
  void read_rope_rotations(const Node& node, const RopeRotations& rotations);
  void read_rope(const Node& node, const Rope& rope);
  void read_argpartition(const Node& node, int kth, int axis);
  void read_sum(const Node& node, const std::vector<int>& axes);
  template <typename F>
  void read_by_element(const Node& node, F f);
  template <typename F>
  void read_gated(const Node& node, F f);
  template <typename F>
  void read_elementwise(const Node& node, F combine);
};

}  // namespace mlx_paged::cpu
