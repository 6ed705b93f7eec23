// Copyright © 2026 the mlx_paged authors. Apache-2.0.
//
// ArrayContents: detects whether an array still has the contents it had.

#pragma once

#include <memory>

#include "mlx/array.h"

namespace mlx_paged {

// Returns the array object's current descriptor. In-place updates (`w -= x`, `w[...] = y`) give the
// object a new one.
std::shared_ptr<const void> descriptor_of(const mlx::core::array& a);

// Identifies an array's contents without keeping its data alive. The descriptor's address is not
// reused while this exists.
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
