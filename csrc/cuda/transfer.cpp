// Copyright © 2026 the mlx_paged authors. Apache-2.0.

#include "transfer.h"

#include <cuda_runtime.h>

#include <algorithm>
#include <bit>
#include <cstring>
#include <map>
#include <mutex>
#include <stdexcept>
#include <string>
#include <utility>

#include "../gpu.h"
#include "../host_copies.h"
#include "../validate.h"
#include "mlx/backend/cuda/allocator.h"
#include "mlx/backend/cuda/device.h"
#include "mlx/ops.h"

namespace mlx_paged {

namespace {

constexpr size_t kStagingAlignment = 64;
constexpr size_t kSmallest = 4096;  // a page

size_t staged_size(size_t bytes) {
  return (bytes + kStagingAlignment - 1) / kStagingAlignment * kStagingAlignment;
}

size_t size_of(const HostArray& a) {
  size_t size = 4;
  for (int extent : a.shape) {
    size *= extent;
  }
  return size;
}

// Pinned buffers by size, kept for reuse because pinning takes as long as a decode step. Never
// freed, because CUDA may be torn down before static objects are.
class StagingPool {
 public:
  static StagingPool& get() {
    static auto* pool = new StagingPool;
    return *pool;
  }

  std::shared_ptr<std::byte> take(size_t bytes) {
    size_t size = std::bit_ceil(std::max(bytes, kSmallest));
    void* buffer = nullptr;
    {
      std::lock_guard lock(mutex_);
      auto& free = free_[size];
      if (!free.empty()) {
        buffer = free.back();
        free.pop_back();
      }
    }
    if (!buffer) {
      auto status = cudaHostAlloc(&buffer, size, cudaHostAllocPortable);
      if (status != cudaSuccess) {
        throw std::runtime_error(
            "[cuda] cannot allocate " + std::to_string(size) +
            " bytes of pinned memory: " + cudaGetErrorString(status));
      }
    }
    return {static_cast<std::byte*>(buffer), [this, size](std::byte* p) { give_back(p, size); }};
  }

 private:
  void give_back(void* buffer, size_t size) {
    std::lock_guard lock(mutex_);
    free_[size].push_back(buffer);
  }

  std::mutex mutex_;
  std::map<size_t, std::vector<void*>> free_;
};

// Sets `a` on pinned memory and keeps that memory alive.
void set_pinned_data(mx::array& a, std::shared_ptr<std::byte> pinned, size_t bytes) {
  auto* buffer = new mx::cu::CudaBuffer{pinned.get(), bytes, -1};
  auto free = [pinned = std::move(pinned)](mx::allocator::Buffer owned) {
    delete static_cast<mx::cu::CudaBuffer*>(owned.ptr());
  };
  a.set_data(mx::allocator::Data(mx::allocator::Buffer(buffer), std::move(free)));
}

// Makes `part` a dense array that starts `offset` bytes into `all`.
void share(const mx::array& all, mx::array& part, size_t offset) {
  mx::Strides strides(part.ndim(), 1);
  for (int axis = int(part.ndim()) - 2; axis >= 0; axis--) {
    strides[axis] = strides[axis + 1] * part.shape(axis + 1);
  }
  part.copy_shared_buffer(
      all, strides, {true, true, part.ndim() < 2}, part.size(), int64_t(offset / 4));
}

void copy_async(const mx::array& from, mx::array& to, mx::Stream stream) {
  Arrays out{to};
  gpu::encode(copy_strided_launches({from}, out), {from}, out, {}, stream);
  // Keep the buffers until the GPU is done: the pool would reuse pinned memory once no array holds
  // it.
  gpu::keep(from, stream);
  gpu::keep(to, stream);
}

[[noreturn]] void throw_gpu_only(const char* name) {
  throw std::runtime_error(std::string("[") + name + "] must run on the GPU");
}

}  // namespace

bool has_transfers() {
  return mx::default_device() == mx::Device::gpu;
}

Arrays upload(const std::vector<HostArray>& arrays, mx::StreamOrDevice s_, bool stays) {
  auto s = mx::to_stream(s_);
  std::vector<size_t> offsets;
  std::vector<mx::Shape> shapes;
  std::vector<mx::Dtype> dtypes;
  size_t bytes = 0;
  for (const auto& a : arrays) {
    Validator("upload").require(mx::size_of(a.dtype) == 4, "dtype", "of 4 bytes", a.dtype);
    offsets.push_back(bytes);
    shapes.push_back(a.shape);
    dtypes.push_back(a.dtype);
    bytes += staged_size(size_of(a));
  }
  bytes = std::max(bytes, kStagingAlignment);
  auto staged = StagingPool::get().take(bytes);
  for (size_t i = 0; i < arrays.size(); i++) {
    if (size_t size = size_of(arrays[i])) {
      std::memcpy(staged.get() + offsets[i], arrays[i].data, size);
    }
  }
  if (stays) {
    mx::array pinned(mx::Shape{int(bytes / 4)}, mx::int32, nullptr, {});
    set_pinned_data(pinned, std::move(staged), bytes);
    Arrays out;
    for (size_t i = 0; i < arrays.size(); i++) {
      out.emplace_back(shapes[i], dtypes[i], nullptr, Arrays{});
      share(pinned, out.back(), offsets[i]);
      out.back().set_status(mx::array::Status::available);
    }
    return out;
  }
  return mx::array::make_arrays(
      std::move(shapes), dtypes,
      std::make_shared<Upload>(s, std::move(staged), std::move(offsets), bytes), {});
}

void Upload::eval_gpu(const Arrays&, Arrays& out) {
  mx::Shape words{int(bytes_ / 4)};
  mx::array pinned(words, mx::int32, nullptr, {});
  set_pinned_data(pinned, staged_, bytes_);
  mx::array device(words, mx::int32, nullptr, {});
  gpu::allocate(device, stream());
  copy_async(pinned, device, stream());
  for (size_t i = 0; i < out.size(); i++) {
    share(device, out[i], offsets_[i]);
  }
  remember_host_copy(device, staged_);
}

void Upload::eval_cpu(const Arrays&, Arrays&) {
  throw_gpu_only("upload");
}

mx::array to_host(const mx::array& a, mx::StreamOrDevice s_) {
  auto s = mx::to_stream(s_);
  Validator v("to_host");
  v.int32(a, "a");
  auto dense = mx::contiguous(a, /* allow_col_major = */ false, s);
  return mx::array(a.shape(), a.dtype(), std::make_shared<ToHost>(s), {dense});
}

void allocate_pinned(mx::array& a) {
  size_t bytes = std::max<size_t>(a.nbytes(), 4);
  set_pinned_data(a, StagingPool::get().take(bytes), bytes);
}

void ToHost::eval_gpu(const Arrays& in, Arrays& out) {
  allocate_pinned(out[0]);
  if (out[0].size() > 0) {
    copy_async(in[0], out[0], stream());
  }
}

void ToHost::eval_cpu(const Arrays&, Arrays&) {
  throw_gpu_only("to_host");
}

}  // namespace mlx_paged
