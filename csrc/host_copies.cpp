// Copyright © 2026 the mlx_paged authors. Apache-2.0.

#include "host_copies.h"

#include <array>
#include <cstddef>
#include <mutex>
#include <utility>

namespace mlx_paged {

namespace {

struct HostCopy {
  std::shared_ptr<mx::array::Data> data;
  std::shared_ptr<const std::byte> copy;
};

// Enough for the plans of all steps in flight, on several threads.
using HostCopies = std::array<HostCopy, 32>;

std::mutex mutex;
size_t next = 0;

// Never destroyed, because MLX's allocator may be gone before its buffers at process exit.
HostCopies& host_copies() {
  static auto* kept = new HostCopies;
  return *kept;
}

}  // namespace

void remember_host_copy(const mx::array& a, std::shared_ptr<const std::byte> copy) {
  std::lock_guard lock(mutex);
  for (auto& entry : host_copies()) {
    if (entry.data.use_count() == 1) {
      entry = {};
    }
  }
  host_copies()[next++ % host_copies().size()] = {a.data_shared_ptr(), std::move(copy)};
}

std::shared_ptr<const std::byte> find_host_copy(const mx::array& a) {
  const auto& data = a.data_shared_ptr();
  std::lock_guard lock(mutex);
  for (const auto& entry : host_copies()) {
    if (data && entry.data == data) {
      return {entry.copy, entry.copy.get() + a.offset()};
    }
  }
  return nullptr;
}

}  // namespace mlx_paged
