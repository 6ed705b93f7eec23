// Copyright © 2026 the mlx_paged authors. Apache-2.0.
//
// Linked where MLX's own arrays serve: on a CPU, and where it shares its memory with the GPU.

#include <stdexcept>

#include "transfer.h"

namespace mlx_paged {

bool has_transfers() {
  return false;
}

std::vector<mx::array> upload(const std::vector<HostArray>&, mx::StreamOrDevice) {
  throw std::runtime_error("[upload] this build of mlx_paged has no CUDA backend");
}

mx::array to_host(const mx::array&, mx::StreamOrDevice) {
  throw std::runtime_error("[to_host] this build of mlx_paged has no CUDA backend");
}

}  // namespace mlx_paged
