// Copyright © 2026 the mlx_paged authors. Apache-2.0.
//
// ArrayContents: tells later whether an array still has the contents that it has now.

#pragma once

#include <memory>

#include "mlx/array.h"

namespace mlx_paged {

// The descriptor that an array object has at the moment. Updates in place (`w -= x`, `w[...] = y`)
// give the object another one.
std::shared_ptr<const void> descriptor_of(const mlx::core::array& a);

// Does not keep the array's data alive. A descriptor's address is not used again while this exists.
class ArrayContents {
 public:
  explicit ArrayContents(const mlx::core::array& a) : descriptor_(descriptor_of(a)) {}

  bool are_still_of(const mlx::core::array& a) const {
    auto now = descriptor_of(a);
    return !descriptor_.owner_before(now) && !now.owner_before(descriptor_);
  }

 private:
  std::weak_ptr<const void> descriptor_;
};

}  // namespace mlx_paged
