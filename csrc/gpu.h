// Copyright © 2026 the mlx_paged authors. Apache-2.0.
//
// Interface of a GPU backend (metal/, cuda/). All decisions are made in launch.h, none here.

#pragma once

#include <memory>
#include <vector>

#include "launch.h"
#include "mlx/array.h"
#include "mlx/stream.h"
#include "gpu/execution.h"

namespace mlx_paged::gpu {

// Whose GPU this backend is for.
Gpu kind();

// Compiles or loads a pipeline, unless that has been done.
void prepare(const Pipeline& pipeline);

// Gives `a` memory of the GPU, in the order of the stream. Only within eval_gpu, before arrays are
// registered with the encoder.
void allocate(mx::array& a, mx::Stream stream);

// The same of memory that the host reads once kernels have written it.
void allocate_for_host(mx::array& a, mx::Stream stream);

// Keeps `a` alive until the GPU has done what is encoded so far.
void keep(const mx::array& a, mx::Stream stream);

// Hands the launches of one operation, whose outputs have their memory already, to MLX's encoder.
// Every array is registered with it, so that MLX orders launches that share a buffer. `pools` are
// the operands that are pools and only read.
void encode(
    const LaunchList& list, const Arrays& in, Arrays& out, const std::vector<int>& pools,
    mx::Stream stream);

// Runs the steps of executables on a stream. Only within eval_gpu.
std::unique_ptr<StepDevice> step_device(mx::Stream stream);

// Rows of a step up to which a GpuExecutable serves; 0: none does.
int max_step_rows();

// The array itself where kernels can read it (can_read_on_gpu), else a dense copy (gpu_eval.cpp).
mx::array readable(const mx::array& a, mx::Stream stream);

}  // namespace mlx_paged::gpu
