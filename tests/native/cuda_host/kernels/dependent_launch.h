// Copyright © 2026 the mlx_paged authors. Apache-2.0.

#pragma once

namespace paged {

inline void wait_for_kernel_before() {}
inline void begin_after_kernel_before() {}
inline void let_next_kernel_begin() {}
inline void fetch_to_l2(const void*) {}

}  // namespace paged
