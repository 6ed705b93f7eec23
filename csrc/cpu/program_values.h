// Copyright © 2026 the mlx_paged authors. Apache-2.0.
//
// Values of a Program that is being read: what each array of the graph became, and the operations
// so far.

#pragma once

#include <optional>
#include <unordered_map>
#include <unordered_set>
#include <vector>

#include "program.h"
#include "program_phases.h"

namespace mlx_paged::cpu {

mx::Strides dense_strides(const mx::Shape& shape);

// The axes of a row, of views of one shape: without those of 1, and with those that lie one after
// the other in each view as one.
struct InnerAxes {
  std::vector<int64_t> sizes;
  std::vector<std::vector<int64_t>> steps;  // of each view
};
InnerAxes inner_axes(const std::vector<const View*>& views);

class ProgramValues {
 protected:
  using Id = std::uintptr_t;

  // A node of the graph: all the outputs of one primitive.
  struct Node {
    const mx::Primitive* primitive;
    Arrays inputs;
    Arrays outputs;
    bool fused = false;  // part of another node's product
  };

  explicit ProgramValues(Program& program) : program_(program) {}

  static bool is(const Node& node, const char* name);

  const View& view(const mx::array& a);
  bool depends(const mx::array& a) const { return depends_.count(a.id()) > 0; }

  // The dense numbers of an array that does not depend on the inputs.
  const float* constant(const mx::array& a);
  // A constant's handle with its data.
  mx::array evaluated(const mx::array& a) const;
  // The inputs of a node with their data, from `first` on: weights.
  Arrays evaluated(const Node& node, size_t first = 1) const;

  // A value that is written: float32, or the numbers of rows.
  View new_value(const mx::array& a);
  View new_ids(const mx::array& a);

  View with_dense_rows(const View& v) { return v.has_dense_rows() ? v : copied(v); }
  View copied(const View& from);

  int add_buffer(Buffer buffer);
  const Buffer& buffer(const View& v) const { return program_.buffers_[v.buffer]; }

  // True if row i of a view is part of row i of what was written.
  bool is_aligned(const View& v) const;

  // `gathers`: buffers of which a row reads other rows.
  void add_row_operation(
      const View& to, const std::vector<View>& reads, std::vector<int> gathers, RowTask task);

  Program& program_;
  std::unordered_map<Id, View> views_;
  std::unordered_set<Id> depends_;  // arrays that depend on the inputs
  std::vector<Operation> operations_;

 private:
  View new_temporary(const mx::array& a);
};

}  // namespace mlx_paged::cpu
