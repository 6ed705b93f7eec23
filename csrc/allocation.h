// Copyright © 2026 the mlx_paged authors. Apache-2.0.
//
// Checked memory for arrays and kernels: a failed allocation throws OutOfMemory before anything is
// stored.
//
// MLX's CPU allocator reports failure by a null pointer, which MLX's own operations do not check.
// On Linux extension.py redirects them to `checked_allocator`, which throws instead.

#pragma once

#include <cstddef>
#include <new>

#include "mlx/allocator.h"
#include "mlx/array.h"

namespace mlx_paged {

namespace mx = mlx::core;

// Becomes mlx_paged.errors.OutOfMemoryError in Python.
class OutOfMemory : public std::bad_alloc {
 public:
  // The message is "[operation] cannot allocate N bytes", followed by `purpose`.
  explicit OutOfMemory(
      size_t num_bytes, const char* operation = "allocate", const char* purpose = "");
  const char* what() const noexcept override { return message_; }
  size_t num_bytes() const { return num_bytes_; }

 private:
  size_t num_bytes_;
  char message_[200];  // fixed size: a string could fail to allocate
};

// Allocates from MLX. Throws OutOfMemory.
mx::allocator::Data allocate(size_t num_bytes);

// Allocates the memory of an array. Throws OutOfMemory.
void allocate(mx::array& a);

// Memory outside of arrays, aligned to 64 bytes. Grows on demand and is never shrunk; growing loses
// the contents.
class Scratch {
 public:
  Scratch() = default;
  Scratch(const Scratch&) = delete;
  Scratch& operator=(const Scratch&) = delete;
  ~Scratch();

  // Throws OutOfMemory and then holds no memory.
  template <typename T>
  T* at_least(size_t count) {
    if (count * sizeof(T) > num_bytes_) {
      grow(count * sizeof(T));
    }
    return static_cast<T*>(memory_);
  }

 private:
  void grow(size_t num_bytes);

  void* memory_ = nullptr;
  size_t num_bytes_ = 0;
};

// MLX's allocator with a check of its results. The first call must precede any use of it by this
// library.
mx::allocator::Allocator& checked_allocator();

}  // namespace mlx_paged
