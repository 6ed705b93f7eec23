// Copyright © 2026 the mlx_paged authors. Apache-2.0.
//
// GraphTemplate: an MLX graph that model code built once, made again for inputs of other sizes.
//
// It learns from two graphs of the same code. Their inputs have the same extents, except for those
// that may change, which differ: (100, 300) of the first and second graph identify one *size*. The
// graphs must be equal node by node. Each extent in them is then a constant, a size, or a multiple
// of one; anything else is refused, and so is a primitive whose parameters change in another way.
// So a graph made again is the graph that the code would have built, for sizes between the two: a
// condition such as `rows > 512` that changes the graph between them makes the two differ.
//
// Two thirds of the nodes of a layer only change shapes, and MLX takes as long for them as for
// others. Chains of those become one reshape or none, and norms and activations take rows in
// whatever shape they come.

#pragma once

#include <compare>
#include <cstdint>
#include <memory>
#include <string>
#include <unordered_map>
#include <utility>
#include <variant>
#include <vector>

#include "../launch.h"
#include "mlx/array.h"
#include "mlx/primitives.h"

namespace mlx_paged {

namespace mx = mlx::core;

class GraphTemplate {
 public:
  // The inputs have no values. Throws UnsupportedGraph.
  GraphTemplate(
      const Arrays& first_inputs, const Arrays& first_outputs, const Arrays& second_inputs,
      const Arrays& second_outputs);

  // Makes the graph for these inputs and returns its outputs. Throws std::invalid_argument if their
  // extents or dtypes do not fit.
  Arrays operator()(const Arrays& inputs) const;

  size_t num_nodes() const { return nodes_.size(); }

 private:
  // `factor` times a size, or `factor` itself.
  struct Extent {
    int size = -1;  // index; -1: a constant
    int64_t factor = 0;
    auto operator<=>(const Extent&) const = default;
  };
  using Extents = std::vector<Extent>;

  // The parameter of these is the shape of the output.
  struct Reshaped {};
  struct Broadcasted {};
  struct Sliced {
    Extents begin;
    Extents end;
    mx::Shape strides;
  };
  struct Unflattened {
    int axis;
    Extents shape;
  };
  using Changing = std::variant<std::monostate, Reshaped, Broadcasted, Sliced, Unflattened>;

  struct Node {
    std::shared_ptr<mx::Primitive> primitive;
    Changing changing;  // how its parameters change
    std::vector<int> inputs;
    std::vector<Extents> shapes;  // of its outputs
    std::vector<mx::Dtype> dtypes;
  };

  class Builder;
  class Simplifier;

  mx::Shape shape_of(const Extents& extents, const std::vector<int64_t>& sizes) const;
  std::vector<int64_t> sizes_of(const Arrays& inputs) const;
  // The output of a node whose parameters change.
  mx::array changed(
      const Node& node, const mx::array& in, mx::Shape shape,
      const std::vector<int64_t>& sizes) const;

  // Values are numbered: inputs, then constants, then the outputs of all nodes.
  std::vector<Extents> input_shapes_;
  std::vector<mx::Dtype> input_dtypes_;
  size_t num_sizes_ = 0;
  Arrays constants_;
  std::vector<Node> nodes_;
  std::vector<int> outputs_;
};

}  // namespace mlx_paged
