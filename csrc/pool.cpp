// Copyright © 2026 the mlx_paged authors. Apache-2.0.
//
// Allocates pools and decides whether an output shares an input's buffer.

#include <atomic>
#include <cstdlib>
#include <new>
#include <stdexcept>
#include <string>
#include <utility>

#include "allocation.h"
#include "mlx/ops.h"
#include "primitives.h"
#include "validate.h"

#ifdef __linux__
#include <sys/mman.h>
#endif

namespace mlx_paged {

namespace {

std::atomic<int64_t> num_pool_copies{0};

void advise_huge_pages([[maybe_unused]] void* data, [[maybe_unused]] size_t bytes) {
#if defined(__linux__) && defined(MADV_HUGEPAGE)
  constexpr uintptr_t kHugePage = 1 << 21;
  auto begin = (reinterpret_cast<uintptr_t>(data) + kHugePage - 1) / kHugePage * kHugePage;
  auto end = (reinterpret_cast<uintptr_t>(data) + bytes) / kHugePage * kHugePage;
  if (begin < end) {
    madvise(reinterpret_cast<void*>(begin), end - begin, MADV_HUGEPAGE);  // only a hint
  }
#endif
}

}  // namespace

mx::array allocate_pool(const std::vector<int>& shape, mx::Dtype dtype) {
  Validator("allocate_pool").pool_layout(shape, dtype, "pool");
  mx::Shape extents(shape.begin(), shape.end());
  extents[3] = last_extent(dtype, shape[3]);
  size_t bytes = mx::size_of(dtype);  // cannot overflow; see pool_layout
  for (int extent : extents) {
    bytes *= extent;
  }
  auto refusal = [&](const char* reason = "") {
    auto purpose = " for a pool of " + std::to_string(shape[0]) + " blocks" + reason;
    return OutOfMemory(bytes, "allocate_pool", purpose.c_str());
  };
#ifdef MLX_PAGED_CUDA
  // MLX's allocator returns managed memory; MLX's operations allocate the GPU's own memory.
  if (mx::default_device() == mx::Device::gpu) {
    auto pool = mx::zeros(extents, dtype);
    try {
      pool.eval();
    } catch (const std::runtime_error& error) {
      if (std::string(error.what()).find("out of memory") == std::string::npos) {
        throw;
      }
      throw refusal((std::string(": ") + error.what()).c_str());
    }
    return pool;
  }
#endif
  try {
    auto data = allocate(bytes);
    if (mx::default_device() == mx::Device::cpu) {
      advise_huge_pages(data.buffer().raw_ptr(), bytes);
    }
    return mx::array(std::move(data), extents, dtype);
  } catch (const OutOfMemory&) {
    throw refusal();
  }
}

int64_t pool_copies() {
  return num_pool_copies.load();
}

void count_pool_copy() {
  num_pool_copies++;
}

bool can_donate(const mx::array& in) {
  constexpr size_t kSlack = 1 << 14;
  return in.is_donatable() && in.flags().row_contiguous && in.buffer_size() <= in.nbytes() + kSlack;
}

bool can_alias_pool(const mx::array& pool) {
  return pool.flags().row_contiguous && pool.data_size() == pool.size();
}

bool can_read_on_gpu(const mx::array& a) {
  constexpr int64_t kAlignment = 16;
  return a.flags().row_contiguous && a.offset() % kAlignment == 0;
}

bool can_alias_pool_on_gpu(const mx::array& pool) {
  return can_alias_pool(pool) && can_read_on_gpu(pool);
}

}  // namespace mlx_paged
