// Copyright © 2026 the mlx_paged authors. Apache-2.0.
//
// Python interface of CpuExecutable.

#include <memory>
#include <stdexcept>
#include <string>

#include "../allocation.h"
#include "../bindings.h"
#include "../primitives.h"
#include "dense.h"
#include "executable.h"
#include "kernels.h"
#include "mlx/backend/cpu/encoder.h"

namespace mlx_paged {

namespace {

using cpu::CpuExecutable;

// in: the inputs of the executable. out: its results, then its pools in place, or the last of them.
class CpuStep : public Node {
 public:
  CpuStep(mx::Stream stream, std::shared_ptr<const CpuExecutable> executable)
      : Node(stream), executable_(std::move(executable)) {}

  const char* name() const override { return "cpu_step"; }
  bool is_equivalent(const mx::Primitive& other) const override {
    return executable_ == static_cast<const CpuStep&>(other).executable_;
  }

  void eval_cpu(const Arrays& inputs, Arrays& out) override {
    auto& encoder = mx::cpu::get_command_encoder(stream());
    Arrays in;
    for (size_t i = 0; i < inputs.size(); i++) {
      in.push_back(executable_->is_pool(int(i)) ? inputs[i] : cpu::dense(inputs[i], encoder));
    }
    std::vector<char*> results;
    size_t num_results = executable_->results().size();
    for (size_t i = 0; i < num_results; i++) {
      allocate(out[i]);
      results.push_back(out[i].data<char>());
    }
    const auto& pools = executable_->pools();
    size_t first_returned = pools.size() - (out.size() - num_results);
    for (size_t i = 0; i < pools.size(); i++) {
      const mx::array& pool = inputs[pools[i]];
      if (i >= first_returned) {
        auto& returned = out[num_results + i - first_returned];
        cpu::alias_or_copy_pool(pool, returned, encoder);
        in[pools[i]] = mx::array::unsafe_weak_copy(returned);
      } else if (!can_alias_pool(pool)) {
        throw std::runtime_error("[cpu_executable] pools must be dense");
      }
    }
    executable_->queue(in, results, stream());
  }

 private:
  std::shared_ptr<const CpuExecutable> executable_;
};

Arrays placeholders(const Arrays& arrays) {
  Arrays made;
  for (const auto& a : arrays) {
    made.emplace_back(a.shape(), a.dtype(), nullptr, Arrays{});
  }
  return made;
}

struct Executable {
  std::shared_ptr<const CpuExecutable> executable;
};

Executable* compile(const Arrays& inputs, const Arrays& outputs) {
  try {
    return new Executable{std::make_shared<const CpuExecutable>(inputs, outputs)};
  } catch (const UnsupportedGraph& error) {
    throw std::invalid_argument(
        std::string("[cpu_executable] cannot compile this graph: ") + error.what());
  }
}

Arrays run(const Executable& self, const Arrays& inputs, bool returns_pools, mx::StreamOrDevice s) {
  const auto& executable = self.executable;
  executable->check(inputs);
  std::vector<mx::Shape> shapes = executable->results();
  std::vector<mx::Dtype> dtypes(shapes.size(), mx::float32);
  const auto& pools = executable->pools();
  for (size_t i = returns_pools || pools.empty() ? 0 : pools.size() - 1; i < pools.size(); i++) {
    shapes.push_back(inputs[pools[i]].shape());
    dtypes.push_back(inputs[pools[i]].dtype());
  }
  auto stream = executable->stream().value_or(mx::to_stream(s));
  return mx::array::make_arrays(
      std::move(shapes), dtypes, std::make_shared<CpuStep>(stream, executable), inputs);
}

}  // namespace

void bind_cpu_executable(nb::module_& m) {
  m.def(
      "placeholders", &placeholders, "arrays"_a,
      "Arrays of the same shapes and dtypes that have no values: evaluating one is an error.");
  m.def(
      "max_cpu_step_rows",
      [] { return check_enabled() ? 0 : cpu::kernels().product.max_rows_float32; },
      "Maximum rows of a step for a CpuExecutable; 0 if none is supported.");
  if (nb::type<Executable>().is_valid()) {
    return;  // this is the simulator, loaded beside the extension; it only runs launches
  }
  nb::class_<Executable>(m, "CpuExecutable", "A graph that runs as one operation on the CPU.")
      .def(nb::new_(&compile), "inputs"_a, "outputs"_a)
      .def("__call__", &run, "inputs"_a, nb::kw_only(), "returns_pools"_a, "stream"_a = nb::none())
      .def_prop_ro(
          "num_phases", [](const Executable& self) { return self.executable->num_phases(); })
      .def_prop_ro(
          "foreign", [](const Executable& self) { return self.executable->foreign(); },
          "Primitives that MLX runs between the phases because they have no lowering.");
}

}  // namespace mlx_paged
