// Copyright © 2026 the mlx_paged authors. Apache-2.0.
//
// Python interface of GraphTemplate.

#include <stdexcept>
#include <string>

#include "../bindings.h"
#include "graph_template.h"
#include "step_graph.h"

namespace mlx_paged {

namespace {

GraphTemplate* learn(
    const Arrays& first_inputs, const Arrays& first_outputs, const Arrays& second_inputs,
    const Arrays& second_outputs) {
  try {
    return new GraphTemplate(first_inputs, first_outputs, second_inputs, second_outputs);
  } catch (const UnsupportedGraph& error) {
    throw std::invalid_argument(
        std::string("[graph_template] cannot make this graph again: ") + error.what());
  }
}

}  // namespace

void bind_graph_template(nb::module_& m) {
  if (nb::type<GraphTemplate>().is_valid()) {
    return;  // this is the simulator, loaded beside the extension
  }
  nb::class_<GraphTemplate>(m, "GraphTemplate", "A graph that is made again for other sizes.")
      .def(
          nb::new_(&learn), "first_inputs"_a, "first_outputs"_a, "second_inputs"_a,
          "second_outputs"_a)
      .def("__call__", &GraphTemplate::operator(), "inputs"_a)
      .def_prop_ro("num_nodes", &GraphTemplate::num_nodes);
}

}  // namespace mlx_paged
