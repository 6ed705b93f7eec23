// Copyright © 2026 the mlx_paged authors. Apache-2.0.

#include "mlx/distributed/distributed.h"
#include "bindings.h"
#include "peer_sum.h"

namespace mlx_paged {

void bind_distributed(nb::module_& m) {
  m.def(
      "join_group",
      [](const std::string& backend) {
        namespace distributed = mlx::core::distributed;
        distributed::clear_backends();  // else `init` would return the group of an earlier call
        // MLX's Python function holds the GIL while it waits for the other processes, so no thread
        // could notice that one has ended.
        nb::gil_scoped_release release;
        return distributed::init(true, backend);
      },
      "backend"_a,
      "Connects this process to those that the environment names, as a new group. Waits without "
      "the interpreter's lock until all of them have come.");

  m.def(
      "make_peer_buffer", [] { return reinterpret_cast<uintptr_t>(make_peer_buffer()); },
      "Makes a buffer of GPU memory for other ranks; returns its address. Raises RuntimeError.");

  m.def(
      "peer_buffer_handle",
      [](uintptr_t buffer) {
        auto handle = peer_buffer_handle(reinterpret_cast<char*>(buffer));
        return nb::bytes(handle.data(), handle.size());
      },
      "buffer"_a, "Returns what another process needs to map a buffer. Raises RuntimeError.");

  m.def(
      "open_peer_buffer",
      [](const nb::bytes& handle) {
        return reinterpret_cast<uintptr_t>(open_peer_buffer({handle.c_str(), handle.size()}));
      },
      "handle"_a,
      "Maps the buffer of another process; returns its address here. Raises RuntimeError.");

  m.def(
      "use_peer_memory",
      [](const mx::distributed::Group& group, const std::vector<uintptr_t>& buffers) {
        PeerMemory memory{group.rank(), {}};
        for (auto buffer : buffers) {
          memory.buffers.push_back(reinterpret_cast<char*>(buffer));
        }
        use_peer_memory(group, std::move(memory));
      },
      "group"_a, "buffers"_a,
      "Lets `all_sum` of this group use the buffers of its ranks. Raises ValueError.");

  m.def(
      "try_peer_memory", &try_peer_memory, "group"_a, nb::call_guard<nb::gil_scoped_release>(),
      "Adds up numbers of all ranks in such memory; returns False if the sum is wrong. Every rank "
      "must call it before its first sum.");

  m.def(
      "forget_peer_memory", &forget_peer_memory, "group"_a,
      "Leaves the sums of a group to MLX again.");

  m.def(
      "all_sum", &all_sum, "x"_a, nb::kw_only(), "group"_a, "stream"_a = nb::none(),
      "The sum of all ranks' x: in memory that their GPUs share, if the group has some and the sum "
      "fits, else by MLX.");
}

}  // namespace mlx_paged
