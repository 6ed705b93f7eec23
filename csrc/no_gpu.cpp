// Copyright © 2026 the mlx_paged authors. Apache-2.0.
//
// Stubs for builds without a GPU backend.

#include <stdexcept>
#include <string>

#include "gpu.h"
#include "gpu/executable.h"
#include "primitives.h"

namespace mlx_paged {

Gpu gpu::kind() {
  return Gpu::apple;
}

void gpu::prepare(const Pipeline&) {}

int gpu::max_step_rows() {
  return 0;
}

void KernelNode::eval_gpu(const Arrays&, Arrays&) {
  throw std::runtime_error(
      std::string("[") + name() +
      "] must run on the CPU: this build of mlx_paged has no GPU backend. Pass stream=mx.cpu, or "
      "call mx.set_default_device(mx.cpu) first.");
}

void GpuStep::eval_gpu(const Arrays&, Arrays&) {
  throw std::runtime_error("[gpu_step] this build of mlx_paged has no GPU backend");
}

}  // namespace mlx_paged
