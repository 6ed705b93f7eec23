// Copyright © 2026 the mlx_paged authors. Apache-2.0.
//
// Operations between the products of steps that are no programs, which are those of long prompts.

#include "../dense.h"
#include "../gpu.h"
#include "../kernel_names.h"
#include "../primitives.h"
#include "mlx/backend/cuda/device.h"
#include "rope_shape.h"

namespace mlx_paged {

namespace {

constexpr int kChunk = 16;  // bytes

uint32_t ceil_div(int64_t n, int64_t m) {
  return uint32_t((n + m - 1) / m);
}

// Inputs that the kernel can read, and an output that takes the first one's buffer where nothing
// else needs it.
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

std::string of_dtype(const char* name, mx::Dtype dtype) {
  return std::string(name) + "_" + name_of(dtype_of(dtype));
}

}  // namespace

void RopeRotations::eval_gpu(const Arrays& in, Arrays& out) {
  Arrays inputs = begin(in, out, false, stream());
  paged::RotationParams params{out[0].shape(0), out[0].shape(2), scale_};
  if (out[0].size() == 0) {
    return;
  }
  Launch launch;
  launch.kernel = kernel_named("rope_rotations");
  launch.constants = bytes_of(params);
  launch.grid = {ceil_div(out[0].size() / 2, paged::DATA_THREADS), 1, 1};
  launch.threadgroup = {paged::DATA_THREADS, 1, 1};
  run(launch, inputs, out, stream());
}

bool Rope::served_on_gpu(const mx::array& x, const mx::array& rotations, bool traditional) {
  int dims = 2 * rotations.shape(2);
  return !traditional && x.dtype() != mx::float32 && x.shape(3) == dims &&
         dims / 2 * int(x.itemsize()) % kChunk == 0;
}

void Rope::eval_gpu(const Arrays& in, Arrays& out) {
  if (!served_on_gpu(in[0], in[1], traditional_)) {
    return Node::eval_gpu(in, out);
  }
  Arrays inputs = begin(in, out, true, stream());
  if (out[0].size() == 0) {
    return;
  }
  int half_chunks = in[0].shape(3) / 2 * int(in[0].itemsize()) / kChunk;
  int64_t num_chunks = int64_t(in[0].shape(0)) * in[0].shape(1) * half_chunks;
  cuda::RopeRowsParams params{num_chunks, in[0].shape(1), half_chunks};
  Launch launch;
  launch.kernel = {of_dtype("rope_rows", in[0].dtype()), "", ""};
  launch.constants = bytes_of(params);
  launch.grid = {ceil_div(num_chunks, paged::DATA_THREADS), 1, 1};
  launch.threadgroup = {paged::DATA_THREADS, 1, 1};
  run(launch, inputs, out, stream());
}

bool SiluMul::served_on_gpu(const mx::array& gate) {
  return gate.ndim() > 0 && gate.dtype() != mx::float32 &&
         gate.shape(-1) * int(gate.itemsize()) % kChunk == 0;
}

void SiluMul::eval_gpu(const Arrays& in, Arrays& out) {
  if (!served_on_gpu(in[0])) {
    return Node::eval_gpu(in, out);
  }
  Arrays inputs = begin(in, out, true, stream());
  if (out[0].size() == 0) {
    return;
  }
  int row_chunks = in[0].shape(-1) * int(in[0].itemsize()) / kChunk;
  paged::SiluParams params{row_chunks, row_chunks, row_chunks};
  Launch launch;
  launch.kernel = kernel_named(of_dtype("silu_mul", in[0].dtype()));
  launch.constants = bytes_of(params);
  launch.grid = {
      uint32_t(in[0].size() / in[0].shape(-1)), ceil_div(row_chunks, paged::DATA_THREADS), 1};
  launch.threadgroup = {paged::DATA_THREADS, 1, 1};
  run(launch, inputs, out, stream());
}

}  // namespace mlx_paged
