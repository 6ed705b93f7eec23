// Copyright © 2026 the mlx_paged authors. Apache-2.0.

#include "array_contents.h"

namespace mlx_paged {

namespace {

// Reads an array's private descriptor. MLX exposes only its address, which another array may get
// later. An explicit instantiation may name a private member ([temp.spec.general]) and passes it to
// descriptor_in.
template <auto Member>
struct DescriptorAccess {
  friend std::shared_ptr<const void> descriptor_in(const mlx::core::array& a) { return a.*Member; }
};

std::shared_ptr<const void> descriptor_in(const mlx::core::array& a);

template struct DescriptorAccess<&mlx::core::array::array_desc_>;

}  // namespace

std::shared_ptr<const void> descriptor_of(const mlx::core::array& a) {
  return descriptor_in(a);
}

}  // namespace mlx_paged
