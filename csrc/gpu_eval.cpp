// Copyright © 2026 the mlx_paged authors. Apache-2.0.
//
// GPU evaluation of every KernelNode: allocates or aliases the outputs, makes the inputs readable,
// and encodes the launches.

#include "dense.h"
#include "gpu.h"
#include "host_copies.h"
#include "primitives.h"

namespace mlx_paged {

namespace {

// Adds leading axes of size 1, as copy_strided requires.
mx::array of_rank_4(const mx::array& a) {
  mx::Shape shape(4 - a.ndim(), 1);
  mx::Strides strides(4 - a.ndim(), 0);
  shape.insert(shape.end(), a.shape().begin(), a.shape().end());
  strides.insert(strides.end(), a.strides().begin(), a.strides().end());
  mx::array view(shape, a.dtype(), nullptr, {});
  view.copy_shared_buffer(a, strides, a.flags(), a.data_size());
  return view;
}

void copy(const mx::array& from, mx::array& to, mx::Stream stream) {
  Arrays in{from.ndim() < 4 ? of_rank_4(from) : from};
  Arrays out{to};
  gpu::encode(copy_strided_launches(in, out), in, out, {0, 1}, stream);
}

mx::array dense_copy(const mx::array& a, mx::Stream stream) {
  mx::array dense(a.shape(), a.dtype(), nullptr, {});
  gpu::allocate(dense, stream);
  copy(a, dense, stream);
  gpu::keep(dense, stream);
  return dense;
}

mx::array readable_pool(const mx::array& pool, mx::Stream stream) {
  if (can_alias_pool_on_gpu(pool)) {
    return pool;
  }
  count_pool_copy();
  return dense_copy(pool, stream);
}

void alias_or_copy_pool(const mx::array& in, mx::array& out, mx::Stream stream) {
  if (can_alias_pool_on_gpu(in)) {
    out.copy_shared_buffer(in);
    return;
  }
  count_pool_copy();
  gpu::allocate(out, stream);
  copy(in, out, stream);
}

}  // namespace

mx::array gpu::readable(const mx::array& a, mx::Stream stream) {
  return can_read_on_gpu(a) ? a : dense_copy(a, stream);
}

void KernelNode::eval_gpu(const Arrays& in, Arrays& out) {
  // Must be checked before anything takes another reference to it.
  bool donates = donated() >= 0 && can_donate(in[donated()]) && can_read_on_gpu(in[donated()]);
  check_ids(in);
  auto [first, count, written] = pools(in);
  for (size_t i = 0; i < out.size(); i++) {
    if (written) {
      alias_or_copy_pool(in[first + i], out[i], stream());
    } else if (donates) {
      out[i].copy_shared_buffer(in[donated()]);
    } else {
      gpu::allocate(out[i], stream());
    }
  }
  Arrays inputs = in;
  std::vector<int> read_pools;
  for (int i = 0; i < int(in.size()); i++) {
    bool is_pool = i >= first && i < first + count;
    if (!is_pool) {
      inputs[i] = gpu::readable(in[i], stream());
    } else if (!written) {
      inputs[i] = readable_pool(in[i], stream());
      read_pools.push_back(i);
    }
  }
  // Inputs that the host reads usually came from the host, which kept a copy. Waits for inputs that
  // the GPU computed.
  for (int i : read_by_host()) {
    bool copied = inputs[i].data_shared_ptr() != in[i].data_shared_ptr();
    if (!find_host_copy(inputs[i]) && (copied || !is_on_host(in[i]))) {
      mx::synchronize(stream());
    }
  }
  gpu::encode(launches(inputs, out, gpu::kind()), inputs, out, read_pools, stream());
}

}  // namespace mlx_paged
