// Copyright © 2026 the mlx_paged authors. Apache-2.0.

#include "copy_strided.h"
#include "instantiate.h"
#include "kernel_table.h"

#define STRIDED(bits, type) PAGED_INSTANTIATE("copy_strided_" #bits, copy_strided<type>)
PAGED_FOR_EACH_WORD(STRIDED)
