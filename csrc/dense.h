// Copyright © 2026 the mlx_paged authors. Apache-2.0.

#pragma once

#include "mlx/ops.h"

namespace mlx_paged {

// True if `a` is known to have dense rows at graph-build time.
inline bool is_dense(const mlx::core::array& a) {
  return a.status() != mlx::core::array::Status::unscheduled && a.flags().row_contiguous;
}

// True if `a` is a graph node that can still be changed: nothing has evaluated or traced it.
inline bool is_pending(const mlx::core::array& a) {
  return a.status() == mlx::core::array::Status::unscheduled && a.has_primitive() && !a.is_tracer();
}

// True if the contents of `a` are available now. array::is_available is also true for results of
// the current evaluation, which have no event yet.
inline bool is_on_host(const mlx::core::array& a) {
  using Status = mlx::core::array::Status;
  return a.status() == Status::available ||
         (a.status() == Status::evaluated && a.event().valid() && a.is_available());
}

// Makes rows dense, as kernels require. On the CPU and with CUDA this happens at evaluation
// (cpu/dense.h, gpu_eval.cpp). With Metal it costs nothing for arrays known to be dense; others get
// a graph node, which copies only if the rows turn out not to be dense.
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
