// Copyright © 2026 the mlx_paged authors. Apache-2.0.
//
// Keeps daemon threads from aborting the process while the interpreter exits.
//
// MLX has thread-local variables with Python objects in them: the functions that `mx.compile` has
// compiled, and the state of `mx.random`. When a thread ends, their destructors take the
// GIL. While the interpreter exits, only its main thread gets it: the attempt ends the thread once
// more, inside a destructor, and that aborts the process.

#pragma once

namespace mlx_paged {

// From now on, if this thread ends while the interpreter exits, it waits for the end of the process
// instead of destroying MLX's variables. Call it after `mx.random.state` has been read. A further
// call on the same thread does nothing.
void outlast_interpreter();

}  // namespace mlx_paged
