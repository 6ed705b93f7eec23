// Copyright © 2026 the mlx_paged authors. Apache-2.0.

#pragma once

// Before loops over arrays that must stay in registers: an index known at compile time keeps them
// there.
#ifndef PAGED_UNROLL
#define PAGED_UNROLL _Pragma("clang loop unroll(full)")
#endif
