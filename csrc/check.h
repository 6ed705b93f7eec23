// Copyright © 2026 the mlx_paged authors. Apache-2.0.
//
// MLX_PAGED_CHECK=1: block ids and slots are compared with the pool before a kernel may follow
// them. Their values exist only when the graph runs, so graph construction cannot see them, and a
// kernel that trusted a wrong one would read or overwrite foreign memory.
//
// Each primitive's eval calls its check first, whatever the backend. The check waits for the inputs
// and throws std::out_of_range (Python: IndexError) that names the row and the id; it runs on the
// evaluating thread because an exception on a stream's own thread leaves that stream unusable.

#pragma once

#include <vector>

#include "mlx/array.h"
#include "mlx/stream.h"

namespace mlx_paged {

namespace mx = mlx::core;

// `inputs` are those of the primitive, as primitives.h lists them. All do nothing unless
// MLX_PAGED_CHECK is 1.
void check_write_kv(const std::vector<mx::array>& inputs, mx::Stream stream);
void check_copy_blocks(const std::vector<mx::array>& inputs, mx::Stream stream);
void check_gather_kv(const std::vector<mx::array>& inputs, int max_context_len, mx::Stream stream);
void check_paged_attention(const std::vector<mx::array>& inputs, mx::Stream stream);

}  // namespace mlx_paged
