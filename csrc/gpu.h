// Copyright © 2026 the mlx_paged authors. Apache-2.0.
//
// Interface of a GPU backend (metal/, cuda/). launch.h makes all decisions; backends make none.

#pragma once

#include <memory>
#include <vector>

#include "gpu/execution.h"
#include "launch.h"
#include "mlx/array.h"
#include "mlx/stream.h"

namespace mlx_paged::gpu {

// Vendor of this backend's GPUs.
Gpu kind();

// Compiles or loads a pipeline unless that has been done.
void prepare(const Pipeline& pipeline);

// Allocates GPU memory for `a` in stream order. Call it only within eval_gpu, before arrays are
// registered with the encoder.
void allocate(mx::array& a, mx::Stream stream);

// The same with memory that the host can read after kernels have written it.
void allocate_for_host(mx::array& a, mx::Stream stream);

// Keeps `a` alive until the GPU has finished everything encoded so far.
void keep(const mx::array& a, mx::Stream stream);

// Passes the launches of one operation to MLX's encoder; its outputs must be allocated. Registers
// every array with the encoder, so that MLX orders launches that share a buffer. `pools`: operands
// that are pools and only read.
void encode(
    const LaunchList& list, const Arrays& in, Arrays& out, const std::vector<int>& pools,
    mx::Stream stream);

// Runs steps of executables on a stream. Call it only within eval_gpu.
std::unique_ptr<StepDevice> step_device(mx::Stream stream);

// Maximum rows of a step for a GpuExecutable; 0 if none is supported.
int max_step_rows();

// Returns the array itself if kernels can read it (can_read_on_gpu), else a dense copy
// (gpu_eval.cpp).
mx::array readable(const mx::array& a, mx::Stream stream);

}  // namespace mlx_paged::gpu
