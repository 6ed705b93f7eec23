// Copyright © 2026 the mlx_paged authors. Apache-2.0.
//
// Ends a process that hangs where no Python runs.
//
// After the death of a rank, a GPU may wait for it forever. Then whatever waits for the GPU hangs,
// perhaps with the GIL, and MLX waits for it once more while the process exits.

#pragma once

#include <string>

namespace mlx_paged {

// Prints `message` to stderr and ends the process with status 1, unless this is called again within
// `seconds`, again and again. A process that was stopped or slept has its whole time again.
//
// Throws std::invalid_argument if `seconds` is not positive.
void exit_unless_extended(double seconds, std::string message);

}  // namespace mlx_paged
