// Copyright © 2026 the mlx_paged authors. Apache-2.0.

#include "../bindings.h"

NB_MODULE(_ext_cuda, m) {
  mlx_paged::bind_extension(m);
}
