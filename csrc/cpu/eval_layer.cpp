// Copyright © 2026 the mlx_paged authors. Apache-2.0.
//
// CPU evaluation of the operations between a layer's matrix products.

#include <cmath>
#include <vector>

#include "../allocation.h"
#include "../primitives.h"
#include "dense.h"
#include "eval.h"
#include "kernels.h"
#include "mlx/backend/cpu/encoder.h"
#include "rotations.h"

namespace mlx_paged {

namespace {

// Lets `out` take over the buffer of `in`, which has the same size, if nothing else needs it;
// otherwise allocates one.
void allocate_or_reuse(const mx::array& in, mx::array& out) {
  if (can_donate(in)) {
    out.copy_shared_buffer(in);
  } else {
    allocate(out);
  }
}

}  // namespace

void RopeRotations::eval_cpu(const Arrays& inputs, Arrays& out) {
  auto& encoder = mx::cpu::get_command_encoder(stream());
  auto in = cpu::dense_inputs(inputs, 0, encoder);
  allocate(out[0]);
  cpu::dispatch(
      encoder, out,
      [positions = in[0].data<int32_t>(), inv_freqs = in[1].data<float>(),
       rotations = out[0].data<float>(), num_rows = in[0].shape(0), half_dims = in[1].shape(0),
       scale = scale_] {
        constexpr int64_t kBytesLikeOneAngle = 256;  // as slow as one sine and cosine
        cpu::for_ranges(num_rows, half_dims * kBytesLikeOneAngle, [&](int64_t begin, int64_t end) {
          for (int64_t row = begin; row < end; row++) {
            cpu::rotate(
                positions[row], scale, inv_freqs, half_dims, rotations + row * 2 * half_dims);
          }
        });
      });
}

void Rope::eval_cpu(const Arrays& inputs, Arrays& out) {
  allocate_or_reuse(inputs[0], out[0]);
  auto& encoder = mx::cpu::get_command_encoder(stream());
  auto in = cpu::dense_inputs(inputs, 1, encoder);
  cpu::RopeArgs args{};
  args.dtype = dtype_of(in[0].dtype());
  args.x = in[0].data<void>();
  args.row_stride = in[0].strides(0);
  args.head_stride = in[0].strides(1);
  args.dim_stride = in[0].strides(3);
  args.rotations = in[1].data<float>();
  args.out = out[0].data<void>();
  args.num_heads = in[0].shape(1);
  args.head_dim = in[0].shape(3);
  args.half_dims = in[1].shape(2);
  args.traditional = traditional_;
  int64_t num_rows = in[0].shape(0);
  int64_t row_bytes = num_rows ? out[0].nbytes() / num_rows : 0;
  cpu::dispatch_ranges(encoder, out, cpu::kernels().layer.rope, args, num_rows, row_bytes);
}

void RmsNorm::eval_cpu(const Arrays& inputs, Arrays& out) {
  allocate_or_reuse(inputs[0], out[0]);
  auto& encoder = mx::cpu::get_command_encoder(stream());
  auto in = cpu::dense_inputs(inputs, 0, encoder);
  cpu::RmsNormArgs args{};
  args.dtype = dtype_of(in[0].dtype());
  args.x = in[0].data<void>();
  args.weight = in.size() > 1 ? in[1].data<void>() : nullptr;
  args.out = out[0].data<void>();
  args.size = in[0].shape(-1);
  args.eps = eps_;
  int64_t num_rows = args.size ? int64_t(in[0].size()) / args.size : 0;
  int64_t row_bytes = args.size * int64_t(in[0].itemsize());
  cpu::dispatch_ranges(encoder, out, cpu::kernels().layer.rms_norm, args, num_rows, row_bytes);
}

void LayerNorm::eval_cpu(const Arrays& inputs, Arrays& out) {
  allocate_or_reuse(inputs[0], out[0]);
  auto& encoder = mx::cpu::get_command_encoder(stream());
  auto in = cpu::dense_inputs(inputs, 0, encoder);
  size_t bias = has_weight_ ? 2 : 1;
  cpu::LayerNormArgs args{};
  args.dtype = dtype_of(in[0].dtype());
  args.x = in[0].data<void>();
  args.weight = has_weight_ ? in[1].data<void>() : nullptr;
  args.bias = in.size() > bias ? in[bias].data<void>() : nullptr;
  args.out = out[0].data<void>();
  args.size = in[0].shape(-1);
  args.eps = eps_;
  int64_t num_rows = args.size ? int64_t(in[0].size()) / args.size : 0;
  int64_t row_bytes = args.size * int64_t(in[0].itemsize());
  cpu::dispatch_ranges(encoder, out, cpu::kernels().layer.layer_norm, args, num_rows, row_bytes);
}

void Gelu::eval_cpu(const Arrays& inputs, Arrays& out) {
  allocate_or_reuse(inputs[0], out[0]);
  auto& encoder = mx::cpu::get_command_encoder(stream());
  auto in = cpu::dense_inputs(inputs, 0, encoder);
  cpu::GeluArgs args{dtype_of(in[0].dtype()), kind_, in[0].data<void>(), out[0].data<void>()};
  int64_t bytes = 2 * int64_t(in[0].itemsize());
  cpu::dispatch_ranges(encoder, out, cpu::kernels().layer.gelu, args, int64_t(in[0].size()), bytes);
}

void ClippedSwiglu::eval_cpu(const Arrays& inputs, Arrays& out) {
  allocate_or_reuse(inputs[0], out[0]);
  auto& encoder = mx::cpu::get_command_encoder(stream());
  auto in = cpu::dense_inputs(inputs, 0, encoder);
  cpu::ClippedSwigluArgs args{
      dtype_of(in[0].dtype()),
      in[0].data<void>(),
      in[1].data<void>(),
      out[0].data<void>(),
      alpha_,
      limit_};
  int64_t bytes = 2 * int64_t(in[0].itemsize());
  cpu::dispatch_ranges(
      encoder, out, cpu::kernels().layer.clipped_swiglu, args, int64_t(in[0].size()), bytes);
}

void SiluMul::eval_cpu(const Arrays& inputs, Arrays& out) {
  allocate_or_reuse(inputs[0], out[0]);
  auto& encoder = mx::cpu::get_command_encoder(stream());
  auto in = cpu::dense_inputs(inputs, 0, encoder);
  cpu::SiluMulArgs args{};
  args.dtype = dtype_of(in[0].dtype());
  args.gate = in[0].data<void>();
  args.x = in[1].data<void>();
  args.out = out[0].data<void>();
  int64_t size = int64_t(in[0].size());
  int64_t bytes = 2 * int64_t(in[0].itemsize());
  cpu::dispatch_ranges(encoder, out, cpu::kernels().layer.silu_mul, args, size, bytes);
}

}  // namespace mlx_paged
