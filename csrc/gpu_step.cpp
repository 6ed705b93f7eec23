// Copyright © 2026 the mlx_paged authors. Apache-2.0.
//
// eval_gpu of a device program's step: allocate the results, alias the pools, make the inputs
// readable, run.

#include <stdexcept>

#include "dense.h"
#include "device_program.h"
#include "gpu.h"
#include "host_copies.h"
#include "step_runner.h"

namespace mlx_paged {

void DeviceStep::eval_gpu(const Arrays& inputs, Arrays& out) {
  const auto& pools = program_->pools();
  size_t num_results = program_->results().size();
  for (size_t i = 0; i < num_results; i++) {
    if (program_->results()[i].is_for_host) {
      gpu::allocate_for_host(out[i], stream());
    } else {
      gpu::allocate(out[i], stream());
    }
  }
  for (size_t i = 0; i < pools.size(); i++) {
    if (!can_alias_pool_on_gpu(inputs[pools[i]])) {
      throw std::runtime_error("[device_step] a pool must be dense");
    }
    if (out.size() > num_results) {
      out[num_results + i].copy_shared_buffer(inputs[pools[i]]);
    }
  }
  Arrays in = inputs;
  for (int i = 0; i < int(in.size()); i++) {
    if (program_->is_used(i) && !program_->is_pool(i)) {
      in[i] = gpu::readable(inputs[i], stream());
    }
  }
  // Inputs that the host reads came from the host, which kept a copy.
  for (int i : program_->read_by_host()) {
    bool copied = in[i].data_shared_ptr() != inputs[i].data_shared_ptr();
    if (!find_host_copy(in[i]) && (copied || !is_on_host(inputs[i]))) {
      mx::synchronize(stream());
    }
  }
  auto device = gpu::step_device(stream());
  program_->runner(stream().index)->run(in, {out.begin(), out.begin() + num_results}, *device);
  device->keep(program_);  // (its constants)
}

}  // namespace mlx_paged
