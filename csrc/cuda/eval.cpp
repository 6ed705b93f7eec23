// Copyright © 2026 the mlx_paged authors. Apache-2.0.
//
// eval_gpu of every primitive on NVIDIA GPUs: allocate or alias the outputs, then encode.

#include <algorithm>
#include <vector>

#include "../check.h"
#include "../host_copies.h"
#include "../launch.h"
#include "../primitives.h"
#include "binder.h"
#include "linear_launch.h"
#include "memory.h"
#include "mlx/backend/cuda/device.h"
#include "variants.h"

namespace mlx_paged {

namespace {

void copy(const mx::array& from, mx::array& to, mx::Stream stream) {
  std::vector<mx::array> out{to};
  cuda::encode(copy_strided_launches({from}, out), {from}, out, {0, 1}, stream);
}

// With axes of one entry in front: what copy_strided takes.
mx::array of_rank_4(const mx::array& a) {
  mx::Shape shape(4 - a.ndim(), 1);
  mx::Strides strides(4 - a.ndim(), 0);
  shape.insert(shape.end(), a.shape().begin(), a.shape().end());
  strides.insert(strides.end(), a.strides().begin(), a.strides().end());
  mx::array view(shape, a.dtype(), nullptr, {});
  view.copy_shared_buffer(a, strides, a.flags(), a.data_size());
  return view;
}

// The kernels read 16 bytes at a time from dense arrays. Others are copied, pools counted.
mx::array readable(const mx::array& a, mx::Stream stream) {
  if (a.flags().row_contiguous && a.offset() % 16 == 0) {
    return a;
  }
  mx::array dense(a.shape(), a.dtype(), nullptr, {});
  cuda::allocate(dense, stream);
  copy(a.ndim() < 4 ? of_rank_4(a) : a, dense, stream);
  mx::cu::get_command_encoder(stream).add_temporary(dense);
  return dense;
}

mx::array readable_pool(const mx::array& pool, mx::Stream stream) {
  if (can_alias_pool(pool)) {
    return pool;
  }
  count_pool_copy();
  mx::array dense(pool.shape(), pool.dtype(), nullptr, {});
  cuda::allocate(dense, stream);
  copy(pool, dense, stream);
  mx::cu::get_command_encoder(stream).add_temporary(dense);
  return dense;
}

// array::is_available is also true of what this very evaluation computes: it has no event yet.
bool is_on_host(const mx::array& a) {
  return a.status() == mx::array::Status::available || (a.event().valid() && a.is_available());
}

void alias_or_copy_pool(const mx::array& in, mx::array& out, mx::Stream stream) {
  if (can_alias_pool(in)) {
    out.copy_shared_buffer(in);
    return;
  }
  count_pool_copy();
  cuda::allocate(out, stream);
  copy(in, out, stream);
}

}  // namespace

void WriteKV::eval_gpu(const std::vector<mx::array>& in, std::vector<mx::array>& out) {
  check_write_kv(in, stream());
  alias_or_copy_pool(in[0], out[0], stream());
  alias_or_copy_pool(in[1], out[1], stream());
  std::vector<mx::array> inputs{
      in[0], in[1], readable(in[2], stream()), readable(in[3], stream()),
      readable(in[4], stream())};
  cuda::encode(write_kv_launches(inputs, out), inputs, out, {}, stream());
}

void CopyBlocks::eval_gpu(const std::vector<mx::array>& in, std::vector<mx::array>& out) {
  check_copy_blocks(in, stream());
  for (size_t i = 0; i < out.size(); i++) {
    alias_or_copy_pool(in[i], out[i], stream());
  }
  auto inputs = in;
  inputs.back() = readable(in.back(), stream());
  cuda::encode(copy_blocks_launches(inputs, out), inputs, out, {}, stream());
}

void GatherKV::eval_gpu(const std::vector<mx::array>& in, std::vector<mx::array>& out) {
  check_gather_kv(in, max_context_len_, stream());
  for (auto& o : out) {
    cuda::allocate(o, stream());
  }
  std::vector<mx::array> inputs{
      readable_pool(in[0], stream()), readable_pool(in[1], stream()), readable(in[2], stream()),
      readable(in[3], stream())};
  cuda::encode(gather_kv_launches(inputs, out), inputs, out, {0, 1}, stream());
}

void PagedAttention::eval_gpu(const std::vector<mx::array>& in, std::vector<mx::array>& out) {
  check_paged_attention(in, stream());
  auto inputs = in;
  for (size_t i = 0; i < in.size(); i++) {
    inputs[i] = i == 1 || i == 2 ? readable_pool(in[i], stream()) : readable(in[i], stream());
  }
  // The launches follow from the contents of the plan. A plan comes from the host, which knows it
  // still; one that was computed on the GPU is waited for.
  for (int i : {5, 6}) {
    bool copied = inputs[i].data_shared_ptr() != in[i].data_shared_ptr();
    if (!find_host_copy(inputs[i]) && (copied || !is_on_host(in[i]))) {
      mx::synchronize(stream());
    }
  }
  cuda::allocate(out[0], stream());
  auto list = cuda::with_variants(
      paged_attention_launches(inputs, out, {scale_, window_, softcap_}), inputs);
  cuda::encode(list, inputs, out, {1, 2}, stream());
}

void Linear::eval_gpu(const std::vector<mx::array>& in, std::vector<mx::array>& out) {
  cuda::allocate(out[0], stream());
  auto inputs = in;
  inputs[0] = readable(in[0], stream());
  const auto& weight = in[1];
  bool has_bias = in.size() > 2;
  int num_rows = int(in[0].size() / weight.shape(1));
  cuda::LinearParams params{num_rows, weight.shape(0), weight.shape(1), has_bias};
  // A kernel that has no bias reads none; its argument must be some buffer all the same.
  auto launch = cuda::linear_launch(params, in[0].dtype(), has_bias ? 2 : 1, int(in.size()));
  cuda::encode({{launch}, {}}, inputs, out, {}, stream());
}

}  // namespace mlx_paged
