// Copyright © 2026 the mlx_paged authors. Apache-2.0.
//
// Element-wise operations of steps that run as separate primitives (long prompts), not as a
// program.

#include "../dense.h"
#include "../gpu.h"
#include "../primitives.h"
#include "mlx/backend/cuda/device.h"
#include "rope_shape.h"

namespace mlx_paged {

namespace {

constexpr int kChunkSize = 16;  // bytes

// Makes the inputs readable by the kernel and allocates the output, reusing the first input's
// buffer if nothing else needs it.
Arrays begin(const Arrays& in, Arrays& out, bool in_place, mx::Stream stream) {
  if (in_place && can_donate(in[0]) && can_read_on_gpu(in[0])) {
    out[0].copy_shared_buffer(in[0]);
  } else {
    gpu::allocate(out[0], stream);
  }
  Arrays inputs;
  for (const auto& a : in) {
    inputs.push_back(gpu::readable(a, stream));
  }
  return inputs;
}

void run(Launch launch, const Arrays& in, Arrays& out, mx::Stream stream) {
  for (int i = 0; i < int(in.size()); i++) {
    launch.buffers.push_back({i, Access::read, in[i].nbytes()});
  }
  launch.buffers.push_back({int(in.size()), Access::write, out[0].nbytes()});
  gpu::encode({{launch}, {}}, in, out, {}, stream);
}

}  // namespace

void RopeRotations::eval_gpu(const Arrays& in, Arrays& out) {
  Arrays inputs = begin(in, out, false, stream());
  if (out[0].size() > 0) {
    run(rotations_launch({out[0].shape(0), out[0].shape(2), scale_}), inputs, out, stream());
  }
}

bool Rope::served_on_gpu(const mx::array& x, const mx::array& rotations, bool traditional) {
  int dims = 2 * rotations.shape(2);
  return !traditional && x.dtype() != mx::float32 && x.shape(3) == dims &&
         dims / 2 * int(x.itemsize()) % kChunkSize == 0;
}

void Rope::eval_gpu(const Arrays& in, Arrays& out) {
  if (!served_on_gpu(in[0], in[1], traditional_)) {
    return Node::eval_gpu(in, out);
  }
  Arrays inputs = begin(in, out, true, stream());
  if (out[0].size() == 0) {
    return;
  }
  int half_chunks = in[0].shape(3) / 2 * int(in[0].itemsize()) / kChunkSize;
  int64_t num_chunks = int64_t(in[0].shape(0)) * in[0].shape(1) * half_chunks;
  cuda::RopeRowsParams params{num_chunks, in[0].shape(1), half_chunks};
  Launch launch;
  launch.kernel = {std::string("rope_rows_") + name_of(dtype_of(in[0].dtype())), "", ""};
  launch.constants = bytes_of(params);
  launch.grid = {div_up(num_chunks, paged::DATA_THREADS), 1, 1};
  launch.threadgroup = {paged::DATA_THREADS, 1, 1};
  run(launch, inputs, out, stream());
}

bool SiluMul::served_on_gpu(const mx::array& gate) {
  return gate.ndim() > 0 && gate.dtype() != mx::float32 &&
         gate.shape(-1) * int(gate.itemsize()) % kChunkSize == 0;
}

void SiluMul::eval_gpu(const Arrays& in, Arrays& out) {
  if (!served_on_gpu(in[0])) {
    return Node::eval_gpu(in, out);
  }
  Arrays inputs = begin(in, out, true, stream());
  if (out[0].size() > 0) {
    int chunks = in[0].shape(-1) * int(in[0].itemsize()) / kChunkSize;
    int64_t num_rows = in[0].size() / in[0].shape(-1);
    auto launch = silu_mul_launch(num_rows, {chunks, chunks, chunks}, dtype_of(in[0].dtype()));
    run(launch, inputs, out, stream());
  }
}

}  // namespace mlx_paged
