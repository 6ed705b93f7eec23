// Copyright © 2026 the mlx_paged authors. Apache-2.0.

#include "mlx/distributed/distributed.h"
#include "bindings.h"

namespace mlx_paged {

void bind_distributed(nb::module_& m) {
  m.def(
      "join_group",
      [](const std::string& backend) {
        namespace distributed = mlx::core::distributed;
        distributed::clear_backends();  // else `init` would return the group of an earlier call
        // MLX's Python function keeps the lock while it waits for the other processes, so that no
        // thread could notice the end of one.
        nb::gil_scoped_release release;
        return distributed::init(true, backend);
      },
      "backend"_a,
      "Connects this process to those that the environment names, as a new group. Waits without "
      "the interpreter's lock until all of them have come.");
}

}  // namespace mlx_paged
