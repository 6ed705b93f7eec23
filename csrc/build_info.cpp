// Copyright © 2026 the mlx_paged authors. Apache-2.0.

#include "build_info.h"

#include "cpu/kernels.h"
#include "cpu/parallel_for.h"
#include "mlx/version.h"

#define MLX_PAGED_STRING_(x) #x
#define MLX_PAGED_STRING(x) MLX_PAGED_STRING_(x)

namespace mlx_paged {

std::vector<std::pair<std::string, std::string>> build_info() {
#if defined(__clang__)
  std::string compiler = "clang " __clang_version__;
#else
  std::string compiler = "gcc " __VERSION__;
#endif
  return {
      {"mlx_version", MLX_PAGED_STRING(MLX_VERSION_MAJOR) "." MLX_PAGED_STRING(
                          MLX_VERSION_MINOR) "." MLX_PAGED_STRING(MLX_VERSION_PATCH)},
      {"nanobind_version", MLX_PAGED_NANOBIND_VERSION},
      {"backends", MLX_PAGED_BACKENDS},
      {"compiler", compiler},
      {"simd", cpu::kernels().simd},
      {"num_threads", std::to_string(cpu::num_threads())},
  };
}

}  // namespace mlx_paged
