// Copyright © 2026 the mlx_paged authors. Apache-2.0.

#pragma once

// After a parameter that is the kernel's threadgroup memory, of the size that the host asks for. A
// macro, because other compilers have to name it otherwise.
#ifndef PAGED_SCRATCH
#define PAGED_SCRATCH [[threadgroup(0)]]
#endif
