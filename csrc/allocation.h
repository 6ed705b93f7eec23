// Copyright © 2026 the mlx_paged authors. Apache-2.0.
//
// Memory for arrays and kernels, checked where it is allocated: without memory OutOfMemory is
// thrown, and nothing is stored.
//
// MLX's CPU allocator reports a lack of memory by a null pointer that MLX's own operations do not
// look at. On Linux extension.py binds them to `checked_allocator`, which throws instead.

#pragma once

#include <cstddef>
#include <new>

#include "mlx/allocator.h"
#include "mlx/array.h"

namespace mlx_paged {

namespace mx = mlx::core;

// In Python mlx_paged.errors.OutOfMemoryError.
class OutOfMemory : public std::bad_alloc {
 public:
  // The message is "[operation] cannot allocate N bytes" and `purpose`.
  explicit OutOfMemory(
      size_t num_bytes, const char* operation = "allocate", const char* purpose = "");
  const char* what() const noexcept override { return message_; }
  size_t num_bytes() const { return num_bytes_; }

 private:
  size_t num_bytes_;
  char message_[200];  // a string might find no memory either
};

// Memory of MLX's. Throws OutOfMemory.
mx::allocator::Data allocate(size_t num_bytes);

// Gives an array memory of its own. Throws OutOfMemory.
void allocate(mx::array& a);

// Memory that no array has, aligned to 64 bytes. It grows and stays; what it held is lost then.
class Scratch {
 public:
  Scratch() = default;
  Scratch(const Scratch&) = delete;
  Scratch& operator=(const Scratch&) = delete;
  ~Scratch();

  // Throws OutOfMemory, and has no memory then.
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

// MLX's allocator with a check of what it returns. The first call must come before anything of this
// library is bound to it.
mx::allocator::Allocator& checked_allocator();

}  // namespace mlx_paged
