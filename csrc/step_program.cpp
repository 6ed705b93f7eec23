// Copyright © 2026 the mlx_paged authors. Apache-2.0.
//
// A step as one operation (cpu/program.h), as Python makes and calls it.

#include <memory>
#include <stdexcept>
#include <string>

#include "allocation.h"
#include "bindings.h"
#include "cpu/dense.h"
#include "cpu/kernels.h"
#include "cpu/program.h"
#include "mlx/backend/cpu/encoder.h"
#include "primitives.h"

namespace mlx_paged {

namespace {

// in: the inputs that were read. out: the result, and the pools in place.
class StepProgram : public Node {
 public:
  StepProgram(mx::Stream stream, std::shared_ptr<const cpu::Program> program)
      : Node(stream), program_(std::move(program)) {}

  const char* name() const override { return "step_program"; }
  bool is_equivalent(const mx::Primitive& other) const override {
    return program_ == static_cast<const StepProgram&>(other).program_;
  }

  void eval_cpu(const Arrays& inputs, Arrays& out) override {
    auto& encoder = mx::cpu::get_command_encoder(stream());
    Arrays in;
    for (size_t i = 0; i < inputs.size(); i++) {
      in.push_back(program_->is_pool(i) ? inputs[i] : cpu::dense(inputs[i], encoder));
    }
    allocate(out[0]);
    const auto& pools = program_->pools();
    for (size_t i = 0; i < pools.size(); i++) {
      cpu::alias_or_copy_pool(inputs[pools[i]], out[1 + i], encoder);
      in[pools[i]] = mx::array::unsafe_weak_copy(out[1 + i]);
    }
    program_->queue(in, out[0].data<char>(), stream());
  }

 private:
  std::shared_ptr<const cpu::Program> program_;
};

Arrays placeholders(const Arrays& arrays) {
  Arrays made;
  for (const auto& a : arrays) {
    made.emplace_back(a.shape(), a.dtype(), nullptr, Arrays{});
  }
  return made;
}

Arrays call(
    const std::shared_ptr<const cpu::Program>& program, const Arrays& inputs,
    mx::StreamOrDevice s) {
  program->check(inputs);
  std::vector<mx::Shape> shapes{program->result_shape()};
  std::vector<mx::Dtype> dtypes{mx::float32};
  for (int i : program->pools()) {
    shapes.push_back(inputs[i].shape());
    dtypes.push_back(inputs[i].dtype());
  }
  auto stream = program->stream().value_or(mx::to_stream(s));
  return mx::array::make_arrays(
      std::move(shapes), dtypes, std::make_shared<StepProgram>(stream, program), inputs);
}

struct Program {
  std::shared_ptr<const cpu::Program> program;
};

}  // namespace

void bind_step_program(nb::module_& m) {
  m.def(
      "placeholders", &placeholders, "arrays"_a,
      "Arrays of the same shapes and dtypes that have no values: evaluating one is an error.");
  m.def(
      "most_program_rows",
      [] { return check_enabled() ? 0 : cpu::kernels().product.most_rows_float32; },
      "Rows of a step up to which a StepProgram serves; 0: none does.");
  if (nb::type<Program>().is_valid()) {
    return;  // this is the simulator, beside the extension: all it runs is to be launches
  }
  nb::class_<Program>(m, "StepProgram", "A graph that runs as one operation on the CPU.")
      .def(
          "__init__",
          [](Program* self, const Arrays& inputs, const Arrays& outputs) {
            try {
              new (self) Program{std::make_shared<const cpu::Program>(inputs, outputs)};
            } catch (const cpu::Unsupported& error) {
              throw std::invalid_argument(
                  std::string("[step_program] the graph must be one that a program can run but: ") +
                  error.what());
            }
          },
          "inputs"_a, "outputs"_a)
      .def(
          "__call__",
          [](const Program& self, const Arrays& inputs, mx::StreamOrDevice s) {
            return call(self.program, inputs, s);
          },
          "inputs"_a, nb::kw_only(), "stream"_a = nb::none())
      .def_prop_ro("num_phases", [](const Program& self) { return self.program->num_phases(); })
      .def_prop_ro(
          "num_nodes", [](const Program& self) { return self.program->num_nodes(); },
          "Phases that are operations of MLX's own.");
}

}  // namespace mlx_paged
