// Copyright © 2026 the mlx_paged authors. Apache-2.0.

#include "gather_kv.h"
