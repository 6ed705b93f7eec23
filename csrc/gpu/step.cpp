// Copyright © 2026 the mlx_paged authors. Apache-2.0.
//
// Python interface of GpuExecutable.

#include <algorithm>
#include <memory>
#include <stdexcept>
#include <string>
#include <vector>

#include "../bindings.h"
#include "../gpu.h"
#include "../rejected_kernels.h"
#include "../transfer.h"
#include "executable.h"

namespace mlx_paged {

namespace {

using Shared = std::shared_ptr<const GpuExecutable>;

Gpu vendor() {
  return has_transfers() ? Gpu::nvidia : Gpu::apple;
}

int supported_step_rows() {
  return check_enabled() ? 0 : gpu::max_step_rows();
}

// Returns a capsule rather than a class, because nanobind would confuse the classes of the
// extension with those of the tests' simulator in the same process.
nb::capsule make(const Arrays& inputs, const Arrays& outputs, bool residual_in_product) {
  auto residual =
      residual_in_product ? GpuExecutable::Residual::in_product : GpuExecutable::Residual::in_norm;
  try {
    auto executable = std::make_shared<const GpuExecutable>(inputs, outputs, vendor(), residual);
    return nb::capsule(new Shared(std::move(executable)), "gpu_executable", [](void* p) noexcept {
      delete static_cast<Shared*>(p);
    });
  } catch (const UnsupportedGraph& error) {
    throw std::invalid_argument(
        std::string("[gpu_executable] cannot compile this graph: ") + error.what());
  }
}

Arrays run(
    const nb::capsule& made, const Arrays& inputs, bool returns_pools, mx::StreamOrDevice s) {
  auto* executable = static_cast<const Shared*>(made.data("gpu_executable"));
  (*executable)->check(inputs);
  std::vector<mx::Shape> shapes;
  std::vector<mx::Dtype> dtypes;
  for (const auto& result : (*executable)->results()) {
    shapes.push_back(result.shape);
    dtypes.push_back(result.dtype);
  }
  for (int i : returns_pools ? (*executable)->pools() : std::vector<int>{}) {
    shapes.push_back(inputs[i].shape());
    dtypes.push_back(inputs[i].dtype());
  }
  return mx::array::make_arrays(
      std::move(shapes), dtypes, std::make_shared<GpuStep>(mx::to_stream(s), *executable), inputs);
}

}  // namespace

void bind_gpu_executable(nb::module_& m) {
  m.def(
      "supported_step_rows", &supported_step_rows,
      "Maximum rows of a step for a GpuExecutable; 0 if none is supported.");
  m.def(
      "max_gpu_step_rows",
      [] { return std::min(supported_step_rows(), allowed_step_rows(vendor())); },
      "The same, up to what calibration allows.");
  m.def(
      "allowed_step_rows", [] { return allowed_step_rows(vendor()); },
      "Maximum rows of such a step that calibration allows.");
  m.def("allow_step_rows", &allow_step_rows, "num_rows"_a, "Sets `allowed_step_rows`.");
  m.def(
      "gpu_executable_kernels",
      [](const nb::capsule& made) {
        auto* executable = static_cast<const Shared*>(made.data("gpu_executable"));
        auto names = (*executable)->kernels(vendor());
        nb::list listed;
        for (const auto& name : names) {
          listed.append(name);
        }
        return listed;
      },
      "executable"_a, "Host names of its kernels, without those of attention.");
  m.def(
      "make_gpu_executable", &make, "inputs"_a, "outputs"_a, nb::kw_only(),
      "residual_in_product"_a);
  m.def(
      "run_gpu_executable", &run, "executable"_a, "inputs"_a, nb::kw_only(), "returns_pools"_a,
      "stream"_a = nb::none());
}

}  // namespace mlx_paged
