// Copyright © 2026 the mlx_paged authors. Apache-2.0.
//
// eval_gpu of every primitive on Apple GPUs: allocate or alias the outputs, then encode.

#include <vector>

#include "../check.h"
#include "../launch.h"
#include "../primitives.h"
#include "binder.h"
#include "mlx/allocator.h"
#include "mlx/backend/metal/device.h"

namespace mlx_paged {

namespace {

void allocate(mx::array& a) {
  a.set_data(mx::allocator::malloc(a.nbytes()));
}

void copy(const mx::array& from, mx::array& to, mx::Stream stream) {
  std::vector<mx::array> out{to};
  metal::encode(copy_strided_launches({from}, out), {from}, out, stream);
}

// The kernels read 16 bytes at a time from dense arrays. Others are copied, pools counted.
mx::array readable(const mx::array& a, mx::Stream stream) {
  if (a.flags().row_contiguous && a.offset() % 16 == 0) {
    return a;
  }
  mx::array dense(a.shape(), a.dtype(), nullptr, {});
  allocate(dense);
  copy(a, dense, stream);
  mx::metal::get_command_encoder(stream).add_temporary(dense);
  return dense;
}

mx::array readable_pool(const mx::array& pool, mx::Stream stream) {
  if (pool.flags().row_contiguous) {
    return pool;
  }
  mx::array dense(pool.shape(), pool.dtype(), nullptr, {});
  alias_pool(pool, dense);
  copy(pool, dense, stream);
  mx::metal::get_command_encoder(stream).add_temporary(dense);
  return dense;
}

void alias_or_copy_pool(const mx::array& in, mx::array& out, mx::Stream stream) {
  if (alias_pool(in, out)) {
    copy(in, out, stream);
  }
}

// array::is_available is also true of what this very evaluation computes: it has no event yet.
bool is_on_host(const mx::array& a) {
  return a.status() == mx::array::Status::available || (a.event().valid() && a.is_available());
}

}  // namespace

void WriteKV::eval_gpu(const std::vector<mx::array>& in, std::vector<mx::array>& out) {
  check_write_kv(in, stream());
  alias_or_copy_pool(in[0], out[0], stream());
  alias_or_copy_pool(in[1], out[1], stream());
  std::vector<mx::array> inputs{
      in[0], in[1], readable(in[2], stream()), readable(in[3], stream()), in[4]};
  metal::encode(write_kv_launches(inputs, out), inputs, out, stream());
}

void CopyBlocks::eval_gpu(const std::vector<mx::array>& in, std::vector<mx::array>& out) {
  check_copy_blocks(in, stream());
  for (size_t i = 0; i < out.size(); i++) {
    alias_or_copy_pool(in[i], out[i], stream());
  }
  auto inputs = in;
  inputs.back() = readable(in.back(), stream());
  metal::encode(copy_blocks_launches(inputs, out), inputs, out, stream());
}

void GatherKV::eval_gpu(const std::vector<mx::array>& in, std::vector<mx::array>& out) {
  check_gather_kv(in, max_context_len_, stream());
  for (auto& o : out) {
    allocate(o);
  }
  std::vector<mx::array> inputs{
      readable_pool(in[0], stream()), readable_pool(in[1], stream()), in[2], in[3]};
  metal::encode(gather_kv_launches(inputs, out), inputs, out, stream());
}

void PagedAttention::eval_gpu(const std::vector<mx::array>& in, std::vector<mx::array>& out) {
  check_paged_attention(in, stream());
  // The launches follow from the contents of the plan. A plan comes from the host, so it is there;
  // one that was computed on the GPU is waited for.
  if (!is_on_host(in[5]) || !is_on_host(in[6])) {
    mx::synchronize(stream());
  }
  allocate(out[0]);
  auto inputs = in;
  inputs[0] = readable(in[0], stream());
  inputs[1] = readable_pool(in[1], stream());
  inputs[2] = readable_pool(in[2], stream());
  auto list = paged_attention_launches(inputs, out, {scale_, window_, softcap_});
  metal::encode(list, inputs, out, stream());
}

}  // namespace mlx_paged
