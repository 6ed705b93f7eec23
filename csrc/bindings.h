// Copyright © 2026 the mlx_paged authors. Apache-2.0.
//
// The Python interface of the extension. mlx_paged.ops wraps and documents it for users.

#pragma once

#include <nanobind/nanobind.h>
#include <nanobind/ndarray.h>
#include <nanobind/stl/optional.h>
#include <nanobind/stl/pair.h>
#include <nanobind/stl/string.h>
#include <nanobind/stl/tuple.h>
#include <nanobind/stl/variant.h>
#include <nanobind/stl/vector.h>

namespace mlx_paged {

namespace nb = nanobind;
using namespace nb::literals;

void bind_kernel_ops(nb::module_& m);      // ops.cpp
void bind_layer_ops(nb::module_& m);       // layer_ops.cpp
void bind_cpu_executable(nb::module_& m);  // cpu/step.cpp
void bind_gpu_executable(nb::module_& m);  // gpu/step.cpp
void bind_graph_template(nb::module_& m);  // graph/graph_template_binding.cpp
void bind_allocation(nb::module_& m);      // allocation.cpp
void bind_distributed(nb::module_& m);     // distributed.cpp
void bind_extension(nb::module_& m);       // all of these, and the rest of mlx_paged._ext

}  // namespace mlx_paged
