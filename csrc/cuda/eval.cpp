// Copyright © 2026 the mlx_paged authors. Apache-2.0.
//
// eval_gpu of every primitive on NVIDIA GPUs: allocate or alias the outputs, then encode.

#include <vector>

#include "../check.h"
#include "../launch.h"
#include "../primitives.h"
#include "binder.h"
#include "memory.h"
#include "mlx/backend/cuda/device.h"
#include "variants.h"

namespace mlx_paged {

namespace {

void copy(const mx::array& from, mx::array& to, mx::Stream stream) {
  std::vector<mx::array> out{to};
  cuda::encode(copy_strided_launches({from}, out), {from}, out, {0, 1}, stream);
}

// The kernels read 16 bytes at a time from dense arrays. Others are copied, pools counted.
mx::array readable(const mx::array& a, mx::Stream stream) {
  if (a.flags().row_contiguous && a.offset() % 16 == 0) {
    return a;
  }
  mx::array dense(a.shape(), a.dtype(), nullptr, {});
  cuda::allocate(dense, stream);
  copy(a, dense, stream);
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
      in[0], in[1], readable(in[2], stream()), readable(in[3], stream()), in[4]};
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
      readable_pool(in[0], stream()), readable_pool(in[1], stream()), in[2], in[3]};
  cuda::encode(gather_kv_launches(inputs, out), inputs, out, {0, 1}, stream());
}

void PagedAttention::eval_gpu(const std::vector<mx::array>& in, std::vector<mx::array>& out) {
  check_paged_attention(in, stream());
  // The launches follow from the contents of the plan. A plan comes from the host, so it is there;
  // one that was computed on the GPU is waited for.
  if (!is_on_host(in[5]) || !is_on_host(in[6])) {
    mx::synchronize(stream());
  }
  cuda::allocate(out[0], stream());
  auto inputs = in;
  inputs[0] = readable(in[0], stream());
  inputs[1] = readable_pool(in[1], stream());
  inputs[2] = readable_pool(in[2], stream());
  auto list = cuda::with_variants(
      paged_attention_launches(inputs, out, {scale_, window_, softcap_}), inputs);
  cuda::encode(list, inputs, out, {1, 2}, stream());
}

}  // namespace mlx_paged
