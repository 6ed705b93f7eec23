// Copyright © 2026 the mlx_paged authors. Apache-2.0.
//
// mlx_paged._asan: the extension with the CPU's side under sanitizers. Built with
// -DMLX_PAGED_SANITIZE=ON or ALL only, for tests/native/test_sanitizers.py.

#include "../../../csrc/bindings.h"

NB_MODULE(_asan, m) {
  mlx_paged::bind_extension(m);
  m.attr("sanitizes_all") = bool(MLX_PAGED_SANITIZES_ALL);
}
