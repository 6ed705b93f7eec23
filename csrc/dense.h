// Copyright © 2026 the mlx_paged authors. Apache-2.0.

#pragma once

#include "mlx/ops.h"

namespace mlx_paged {

// True if `a` is known to have dense rows while the graph is built.
inline bool is_dense(const mlx::core::array& a) {
  return a.status() != mlx::core::array::Status::unscheduled && a.flags().row_contiguous;
}

// True if `a` is a node of a graph that can still be changed: nothing of it has been evaluated, and
// nobody traces it.
inline bool is_pending(const mlx::core::array& a) {
  return a.status() == mlx::core::array::Status::unscheduled && a.has_primitive() && !a.is_tracer();
}

// True if the numbers of `a` are known now. array::is_available is also true for results of the
// current evaluation: they have no event yet.
inline bool is_on_host(const mlx::core::array& a) {
  using Status = mlx::core::array::Status;
  return a.status() == Status::available ||
         (a.status() == Status::evaluated && a.event().valid() && a.is_available());
}

// Kernels read dense rows. On the CPU eval_cpu makes them (cpu/dense.h), with CUDA eval_gpu. With
// Metal arrays known to be dense cost nothing here, others a graph node, and a copy only if they
// turn out not to be.
inline mlx::core::array dense(const mlx::core::array& a, [[maybe_unused]] mlx::core::Stream s) {
#ifdef MLX_PAGED_CUDA
  return a;
#else
  if (is_dense(a) || s.device == mlx::core::Device::cpu) {
    return a;
  }
  return mlx::core::contiguous(a, /* allow_col_major = */ false, s);
#endif
}

}  // namespace mlx_paged
