// Copyright © 2026 the mlx_paged authors. Apache-2.0.
//
// GPU evaluation of a step: allocates the results, aliases the pools, makes the inputs readable and
// runs.

#include <stdexcept>

#include "../dense.h"
#include "../gpu.h"
#include "../host_copies.h"
#include "execution.h"

namespace mlx_paged {

void GpuStep::eval_gpu(const Arrays& inputs, Arrays& out) {
  const auto& pools = executable_->pools();
  size_t num_results = executable_->results().size();
  for (size_t i = 0; i < num_results; i++) {
    if (executable_->results()[i].is_for_host) {
      gpu::allocate_for_host(out[i], stream());
    } else {
      gpu::allocate(out[i], stream());
    }
  }
  for (size_t i = 0; i < pools.size(); i++) {
    if (!can_alias_pool_on_gpu(inputs[pools[i]])) {
      throw std::runtime_error("[gpu_step] a pool must be dense");
    }
    if (out.size() > num_results) {
      out[num_results + i].copy_shared_buffer(inputs[pools[i]]);
    }
  }
  Arrays in = inputs;
  for (int i = 0; i < int(in.size()); i++) {
    if (executable_->is_used(i) && !executable_->is_pool(i)) {
      in[i] = gpu::readable(inputs[i], stream());
    }
  }
  // The host keeps a copy of inputs that it reads and that it has sent.
  for (int i : executable_->read_by_host()) {
    bool copied = in[i].data_shared_ptr() != inputs[i].data_shared_ptr();
    if (!find_host_copy(in[i]) && (copied || !is_on_host(inputs[i]))) {
      mx::synchronize(stream());
    }
  }
  auto device = gpu::step_device(stream());
  executable_->execution(stream().index)
      ->run(in, {out.begin(), out.begin() + num_results}, *device);
  device->keep(executable_);  // and its constants
}

}  // namespace mlx_paged
