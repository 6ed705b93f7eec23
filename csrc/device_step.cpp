// Copyright © 2026 the mlx_paged authors. Apache-2.0.
//
// A decode step on a GPU as one operation (device_program.h), as Python makes and calls it.

#include <memory>
#include <stdexcept>
#include <string>
#include <vector>

#include "bindings.h"
#include "device_program.h"
#include "gpu.h"
#include "transfer.h"

namespace mlx_paged {

namespace {

using Shared = std::shared_ptr<const DeviceProgram>;

// (No class: an extension and the one that tests simulate a GPU with share a process, and nanobind
// would take their classes for one.)
nb::capsule make(const Arrays& inputs, const Arrays& outputs, bool residual_in_product) {
  auto residual =
      residual_in_product ? DeviceProgram::Residual::in_product : DeviceProgram::Residual::in_norm;
  auto gpu = has_transfers() ? Gpu::nvidia : Gpu::apple;
  try {
    auto program = std::make_shared<const DeviceProgram>(inputs, outputs, gpu, residual);
    return nb::capsule(new Shared(std::move(program)), "device_program", [](void* p) noexcept {
      delete static_cast<Shared*>(p);
    });
  } catch (const NoProgram& error) {
    throw std::invalid_argument(
        std::string("[device_program] the graph must be one that a program can run but has ") +
        error.what());
  }
}

Arrays run(
    const nb::capsule& made, const Arrays& inputs, bool returns_pools, mx::StreamOrDevice s) {
  auto* program = static_cast<const Shared*>(made.data("device_program"));
  (*program)->check(inputs);
  std::vector<mx::Shape> shapes;
  std::vector<mx::Dtype> dtypes;
  for (const auto& result : (*program)->results()) {
    shapes.push_back(result.shape);
    dtypes.push_back(result.dtype);
  }
  for (int i : returns_pools ? (*program)->pools() : std::vector<int>{}) {
    shapes.push_back(inputs[i].shape());
    dtypes.push_back(inputs[i].dtype());
  }
  return mx::array::make_arrays(
      std::move(shapes), dtypes, std::make_shared<DeviceStep>(mx::to_stream(s), *program), inputs);
}

}  // namespace

void bind_device_program(nb::module_& m) {
  m.def(
      "most_device_program_rows", [] { return check_enabled() ? 0 : gpu::most_program_rows(); },
      "Rows of a step up to which GPU programs serve; 0: none do.");
  m.def(
      "make_device_program", &make, "inputs"_a, "outputs"_a, nb::kw_only(),
      "residual_in_product"_a);
  m.def(
      "run_device_program", &run, "program"_a, "inputs"_a, nb::kw_only(), "returns_pools"_a,
      "stream"_a = nb::none());
}

}  // namespace mlx_paged
